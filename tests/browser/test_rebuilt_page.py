"""The inspector's page of answers that a correction policy rebuilt: what was removed, moved and added is visible,
and its tokens are linked to its shapes."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Open
from tests.browser.rollouts import HOSTILE, RunInspectorPage
from tests.dumped import NEAR_CUP, NEAR_ROOF, SCRIPT
from tests.scripted import Said
from tests.unit.answers.conftest import answer, box, entry
from tests.unit.pages.run_folders import write_dumped_run

pytestmark = pytest.mark.timeout(60)

LAMP, SOFA = box(850, 0, 950, 100), box(700, 100, 900, 300)
MESSY = Said(
    answer(
        entry("object_1", "roof", NEAR_ROOF),
        entry("object_2", "cup", NEAR_CUP),
        entry("object_3", "mug", box(15, 12, 113, 109)),
        entry("object_4", "sofa", SOFA),
    )
)
OTHER = Said(answer(entry("object_1", HOSTILE, LAMP)))
SETTINGS = {
    "rollouts_per_sample": 3,
    "decoding": {"temperature": 0.7},
    "choice": {"rule": "union"},
    "correction": {
        "duplicates": "remove",
        "extras": "remove",
        "insertion": "reading_order",
        "supervise": "matched",
    },
}
ROOF_OWNER, MUG_OWNER, SOFA_OWNER, DOG_OWNER, LAMP_OWNER = 0, 2, 3, -3, -5


@pytest.fixture
def page(open_page: Open, tmp_path: Path) -> Page:
    """The corrected answer is the lamp that the other answers agree on, the cup, the dog and the roof."""
    script = {name: [said] * 3 for name, said in SCRIPT.items()} | {"partly.png": [OTHER, MESSY, OTHER]}
    folder = write_dumped_run(tmp_path / "run", steps=(0,), script=script, **SETTINGS)
    return open_page(RunInspectorPage(folder), "#1.0.0")


def of_owner(page: Page, selector: str, owner: int) -> str:
    return page.locator(f'{selector}[data-owner="{owner}"]').first.inner_text()


def test_what_was_removed_moved_and_added_is_named_in_the_list_and_in_the_image(page: Page) -> None:
    rows = {owner: of_owner(page, ".object", owner).split("\n")[:4] for owner in (0, 2, 3, -3, -5)}
    assert rows[MUG_OWNER] == ["duplicate", "object_3", "mug", "repeats another object: removed"]
    assert rows[SOFA_OWNER] == ["extra", "object_4", "sofa", "matches no true object: removed"]
    assert rows[ROOF_OWNER][3].endswith("moved: object_1 → object_4")
    assert rows[DOG_OWNER][3] == "added as object_3"
    assert rows[LAMP_OWNER][0] == "agreed"
    assert rows[LAMP_OWNER][3].endswith("added as object_1")
    tags = {owner: of_owner(page, ".tag", owner) for owner in rows}
    assert tags[MUG_OWNER].endswith("duplicate")
    assert tags[SOFA_OWNER].endswith("removed")
    assert tags[ROOF_OWNER].endswith("1 → 4")
    assert tags[DOG_OWNER].endswith("→ 3")
    assert page.locator("#stage .shape line").count() == 2, "shapes that were removed are struck through"


def test_a_token_of_an_added_object_highlights_it_and_one_of_a_moved_object_both_of_its_places(page: Page) -> None:
    page.locator(f'#strip .token.bin[data-owner="{DOG_OWNER}"]').first.click()
    assert page.locator("#stage .shape.lit").evaluate_all("nodes => nodes.map(n => n.dataset.owner)") == ["-3"]
    expect(page.locator(".object.lit .desc")).to_have_text(["dog"])
    expect(page.locator(".owner")).to_contain_text("x1 of true 2, dog (missed)")
    page.locator(f'#strip .token.bin[data-owner="{LAMP_OWNER}"]').first.click()
    assert page.locator("#stage .shape.lit.agreed").count() == 1
    moved = page.locator(f'#strip .token.bin[data-owner="{ROOF_OWNER}"]')
    assert moved.count() == 12
    for at in (0, 6):
        moved.nth(at).click()
        expect(page.locator(".owner")).to_contain_text("x of point 1 of object_1, roof (matched)")
    assert page.locator("#strip .token.bin.lit").count() == 12
    margins = page.locator(f'#strip .margin[data-owner="{ROOF_OWNER}"]').all_inner_texts()
    assert margins[0] == "moved below" and margins[1].startswith("matched")


def test_the_answers_that_were_not_chosen_are_there_as_text_when_they_are_asked_for(page: Page) -> None:
    expect(page.locator("#about")).to_contain_text("answer 2 of 3, the one with the highest F1")
    expect(page.locator("#others pre").first).to_be_hidden()
    page.locator("#others summary").click()
    expect(page.locator("#others pre")).to_have_text([OTHER.text, OTHER.text])
    assert page.locator("#others pre img, #others pre script").count() == 0
