"""The page of the rollout inspector in a browser: highlighting, navigation, keys and numbers."""

import json
from math import exp
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from coordexp.data import TrueObject
from tests.browser.conftest import Open
from tests.browser.rollouts import RunInspectorPage, say, write_answers, write_demo
from tests.unit.answers.conftest import box

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> RunInspectorPage:
    return write_demo(tmp_path_factory.mktemp("runs") / "table-top")


def lit_shapes(page: Page) -> set[tuple[str, str]]:
    """Return the owner and the kind of each highlighted shape."""
    shapes = page.locator("#stage .shape.lit").evaluate_all(
        "nodes => nodes.map(node => [node.dataset.owner, node.classList[1]])"
    )
    return {(owner, kind) for owner, kind in shapes}


def lit_tokens(page: Page) -> set[str]:
    return set(page.locator("#strip .token.lit").evaluate_all("nodes => nodes.map(node => node.dataset.owner)"))


def sample_id(page: Page) -> str:
    return str(page.evaluate("location.hash.slice(1)"))


def focus_attribute(page: Page, name: str) -> str | None:
    return page.evaluate("name => document.activeElement.getAttribute(name)", name)  # type: ignore[no-any-return]


# Highlighting


def test_a_shape_highlights_its_tokens_and_its_row(open_page: Open, demo: RunInspectorPage) -> None:
    page = open_page(demo, "#100.0.0")
    page.locator('#stage .shape.missed[data-owner="-4"] polygon >> nth=1').hover()
    assert lit_tokens(page) == {"-4"}
    assert page.locator(".object.lit .desc").all_inner_texts() == ["spoon"]


def test_an_invalid_object_has_no_shape_and_says_why(open_page: Open, demo: RunInspectorPage) -> None:
    page = open_page(demo, "#50.0.0")
    row = page.locator(".object.invalid")
    expect(row).to_contain_text("a box needs four coordinates")
    row.hover()
    assert lit_shapes(page) == set()
    assert lit_tokens(page) == {"1"}
    assert page.locator('#stage .shape[data-owner="1"]').count() == 0


def test_an_overlap_highlights_both_of_its_objects(open_page: Open, demo: RunInspectorPage) -> None:
    page = open_page(demo, "#100.0.0")
    pairs = page.locator(".pair.chosen")
    assert [text.split(".")[0] for text in pairs.all_inner_texts()] == ["red cup", "plate", "green leaf"]
    pairs.nth(2).hover()
    assert lit_shapes(page) == {("2", "matched"), ("2", "true")}


# Navigation

ALL = ["1.0.0", "50.0.0", "50.0.1", "100.0.0", "150.0.0", "200.0.0", "200.0.2"]


@pytest.mark.parametrize(
    ("list", "choice", "ids"),
    [
        ("filter", "invalid", ["50.0.0", "50.0.1"]),
        ("filter", "truncated", ["50.0.1"]),
        ("filter", "missed", [id for id in ALL if id != "200.0.0"]),
        ("filter", "extra", ["1.0.0", "50.0.0", "100.0.0"]),
        ("order", "missed", ["1.0.0", "50.0.0", "50.0.1", "100.0.0", "150.0.0", "200.0.2", "200.0.0"]),
        ("order", "loss", ["1.0.0", "50.0.1", "50.0.0", "100.0.0", "150.0.0", "200.0.0", "200.0.2"]),
    ],
)
def test_a_filter_or_an_order_goes_through_its_samples(
    open_page: Open, demo: RunInspectorPage, list: str, choice: str, ids: list[str]
) -> None:
    page = open_page(demo, "#200.0.2")
    page.locator(f"#{list}").select_option(choice)
    walked = [sample_id(page)]
    page.locator("h1").click()  # keys go to the page again
    while page.locator("#on").is_enabled():
        page.keyboard.press("j")
        walked.append(sample_id(page))
    assert walked == ids


def test_the_address_names_a_sample_or_a_step(open_page: Open, demo: RunInspectorPage) -> None:
    page = open_page(demo, "#150.0.0")
    expect(page.locator("#name")).to_contain_text("Step 150")
    page.evaluate("location.hash = 'step=60'")
    expect(page.locator("#name")).to_contain_text("Step 100")
    expect(page.locator("#astray")).to_contain_text("step=60 is not on this page, which holds 7 answers")
    page.locator("#filter").select_option("truncated")
    page.evaluate("location.hash = '200.0.0'")
    expect(page.locator("#name")).to_contain_text("Step 200")
    expect(page.locator("#where")).to_have_text("6 of 7")
    expect(page.locator("#astray")).to_be_hidden()


# Keys


def test_everything_can_be_done_with_the_keyboard_only(open_page: Open, demo: RunInspectorPage) -> None:
    page = open_page(demo, "#100.0.0")
    for _ in range(30):
        page.keyboard.press("Tab")
        if focus_attribute(page, "data-i"):
            break
    assert page.evaluate("document.activeElement.matches('#strip .token:focus-visible')")
    page.keyboard.press("Control+Home")
    assert focus_attribute(page, "data-i") == "0"
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    assert lit_shapes(page) == {("3", "extra")}
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert lit_shapes(page) == {("-4", "missed")}
    page.keyboard.press("j")
    assert sample_id(page) == "150.0.0"
    assert page.evaluate("document.activeElement.matches('#strip .token')"), "the focus stays in the tokens"
    page.keyboard.press("k")
    page.keyboard.press("o")
    assert page.evaluate("!!document.activeElement.closest('#objects')")


# Numbers


def test_a_coordinate_shows_its_distribution_in_numbers(open_page: Open, tmp_path: Path) -> None:
    truth = {"cup.png": [TrueObject("cup", box(100, 100, 400, 400))]}
    script = {"cup.png": say(TrueObject("cup", box(90, 110, 390, 400)))}
    write_answers(tmp_path / "run", truth, {99: script})
    file = tmp_path / "run/dumps/trained-000099.jsonl"
    values = json.loads(file.read_text())
    first = min(values["bins"], key=int)
    at = values["where"].index(int(first))
    values["bins"][first], values["nll"][at], values["mass"][at] = [[90, 5000], [100, 2500, 2500]], 0.6931, 0.9
    file.write_text(json.dumps(values) + "\n")
    page = open_page(RunInspectorPage(tmp_path / "run"))
    page.locator("#strip .token.coord").first.hover()
    names = page.locator(".numbers dt").all_inner_texts()
    shown = dict(zip(names, page.locator(".numbers dd").all_inner_texts(), strict=True))
    assert shown["written bin"] == "90"
    assert shown["target"] == "100"
    assert shown["probability of the target bin"] == "25.0 %"
    assert shown["expected bin"] == "95.3"  # (90 * 2 + 100 + 101) / 4
    assert shown["probability of any coordinate"] == "90.0 %"
    assert shown["probability of the written bin"] == "50.0 %"
    distance = shown["distance to the target (W1)"].removesuffix(" bins")
    assert float(distance) == pytest.approx(w1_of_example(), abs=0.051)
    expect(page.locator(".owner")).to_contain_text("x1 of object_1, cup (matched)")


def w1_of_example(sigma: float = 8.0, truncate: int = 24) -> float:
    """Return the distance to a Gaussian around 100, as a sum of cumulative differences."""
    weights = [exp(-0.5 * ((bin - 100) / sigma) ** 2) * (abs(bin - 100) <= truncate) for bin in range(1000)]
    model = {90: 0.5, 100: 0.25, 101: 0.25}
    difference = total = 0.0
    for bin, weight in enumerate(weights):
        difference += model.get(bin, 0.0) - weight / sum(weights)
        total += abs(difference)
    return total
