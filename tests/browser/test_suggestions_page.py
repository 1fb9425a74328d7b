"""The page of suggestions in a browser: keys, filters, and the file of decisions."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from coordexp.data import Record, RecordObject
from coordexp.detect.suggestions import Suggestion, fix_order, read_decisions, read_suggestions, write_suggestions
from coordexp.pages.document import save_page
from coordexp.pages.suggestions import ImagePlace, render_suggestions
from tests.browser.conftest import Open

pytestmark = pytest.mark.timeout(60)
PHONE = {"width": 390, "height": 844}


@dataclass(frozen=True)
class SuggestionsPage:
    """Six suggestions in three images, with scores 0.9, 0.8, ... 0.4: cats and dogs in turn."""

    folder: Path
    place: ImagePlace = "inside"
    sizes: tuple[tuple[int, int], ...] = field(default=((64, 48), (48, 96), (64, 64)))

    @property
    def suggestions(self) -> Path:
        return self.folder / "suggestions.jsonl"

    def save(self, path: Path) -> Path:
        records, suggestions = {}, []
        for k, size in enumerate(self.sizes, start=1):
            Image.new("RGB", size, "teal").save(self.folder / f"{k}.png")
            label = RecordObject("bird", "bbox_2d", (30, 20, 46, 40), 5)
            records[k] = Record(f"{k}.png", *size, "pixel", (label,), k)
        for k in range(6):
            box = (2.0 + k, 3.0, 20.0 + k, 18.0)
            item = RecordObject(("cat", "<i>dog</i>")[k % 2], "bbox_2d", box)
            image = 1 + k // 2
            suggestions.append(Suggestion(k + 1, image, f"{image}.png", 1, item, 0.9 - k / 10, 0.5))
        file = write_suggestions(self.suggestions, suggestions)
        data = self.folder / "data.jsonl"
        page = render_suggestions(file, records, data, target=path.parent, most=100, place=self.place)
        save_page(path, page)
        return path


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def save_decisions(page: Page, path: Path) -> Path:
    with page.expect_download() as download:
        press(page, "s")
    assert download.value.suggested_filename == "decisions.json"
    download.value.save_as(path)
    return path


def test_keys_decide_and_go_to_the_next_suggestion(open_page: Open, tmp_path: Path) -> None:
    page = open_page(SuggestionsPage(tmp_path))
    expect(page.locator("#where")).to_have_text("1 of 6")
    expect(page.locator("#number")).to_have_text("1 of 6")
    press(page, "a")
    expect(page.locator("#number")).to_have_text("2 of 6")
    expect(page.locator("#name")).to_have_text("<i>dog</i>")
    press(page, "r", "y", "n")
    expect(page.locator("#number")).to_have_text("5 of 6")
    expect(page.locator("#counts")).to_have_text("4 of 6 decided: 2 accepted, 2 rejected")


def test_undo_takes_decisions_back_one_by_one(open_page: Open, tmp_path: Path) -> None:
    page = open_page(SuggestionsPage(tmp_path))
    expect(page.locator("#undo")).to_be_disabled()
    press(page, "a", "r", "u")
    expect(page.locator("#number")).to_have_text("2 of 6")
    expect(page.locator("#state")).to_have_text("undecided")
    press(page, "u", "u")
    expect(page.locator("#number")).to_have_text("1 of 6")
    expect(page.locator("#counts")).to_have_text("0 of 6 decided: 0 accepted, 0 rejected")


def test_decisions_can_be_loaded_from_a_file_of_the_same_suggestions(open_page: Open, tmp_path: Path) -> None:
    page = open_page(SuggestionsPage(tmp_path))
    press(page, "a", "r")
    file = save_decisions(page, tmp_path / "decisions.json")
    press(page, "u", "u")
    page.locator("#load").set_input_files(file)
    expect(page.locator("#counts")).to_have_text("2 of 6 decided: 1 accepted, 1 rejected")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"format": 1, "suggestions": "0" * 64, "decisions": {"3": "accept"}}))
    page.locator("#load").set_input_files(other)
    expect(page.locator("#trouble")).to_contain_text("decisions about other suggestions")
    expect(page.locator("#counts")).to_have_text("2 of 6 decided: 1 accepted, 1 rejected")


def test_suggestions_are_filtered_by_class_score_and_decision(open_page: Open, tmp_path: Path) -> None:
    page = open_page(SuggestionsPage(tmp_path))
    page.locator("#class").select_option(label="cat (3)")
    expect(page.locator("#where")).to_have_text("1 of 3")
    page.locator("#least").fill("0.6")
    expect(page.locator("#where")).to_have_text("1 of 2")
    page.locator("h1").click()  # keys go to the page again
    press(page, "a")
    page.locator("#filter").select_option("accept")
    expect(page.locator("#where")).to_have_text("1 of 1")
    page.locator("#filter").select_option("reject")
    expect(page.locator("#nothing")).to_be_visible()
    expect(page.locator("#decide")).to_be_hidden()
    page.locator("#filter").select_option("undecided")
    expect(page.locator("#number")).to_have_text("3 of 6")


def test_the_image_has_labels_the_suggestion_and_the_others(open_page: Open, tmp_path: Path) -> None:
    page = open_page(SuggestionsPage(tmp_path))
    stage = page.locator("#stage")
    for kind in ("label", "suggested", "other"):
        expect(stage.locator(f".shape.{kind}")).to_have_count(1)
    colours = {
        page.locator(f"#stage .shape.{kind} polygon").last.evaluate("node => getComputedStyle(node).stroke")
        for kind in ("label", "suggested")
    }
    assert len(colours) == 2
    press(page, "a")
    expect(stage.locator(".shape.accepted")).to_have_count(1)
    press(page, "l")
    expect(stage.locator(".shape.accepted")).to_be_hidden()
    expect(stage.locator(".shape.suggested")).to_be_visible()


def test_linked_images_are_shown_from_their_files(browser, tmp_path: Path) -> None:
    """The other tests allow no request but the page itself; this page requests its images, and nothing else."""
    path = SuggestionsPage(tmp_path, "linked").save(tmp_path / "out/complete.html")
    page = browser.new_page()
    requests: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: problems.append(message.text))
    page.goto(path.as_uri())
    press(page, "a", "a")
    page.wait_for_timeout(200)
    expect(page.locator("#remark")).to_be_hidden()
    assert set(requests) <= {path.as_uri(), *((tmp_path / f"{k}.png").as_uri() for k in (1, 2, 3))}
    assert (tmp_path / "1.png").as_uri() in requests
    (tmp_path / "3.png").unlink()
    page.reload()
    press(page, "ArrowRight", "ArrowRight")
    expect(page.locator("#remark")).to_have_text("image not shown: the browser cannot read 3.png")
    page.close()
    assert not [problem for problem in problems if "Content Security Policy" in problem]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_window_and_buttons_are_in_reach(
    open_page: Open, tmp_path: Path, scheme: str
) -> None:
    page = open_page(SuggestionsPage(tmp_path), viewport=PHONE, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    expect(page.locator("#accept")).to_be_in_viewport()
    page.locator("#accept").click()
    expect(page.locator("#number")).to_have_text("2 of 6")


def draw(page: Page, desc: str, *corners: tuple[float, float]) -> None:
    """Draw an object from the first corner to the other. They are shares of the sides of the image."""
    stage = page.locator("#stage").bounding_box()
    assert stage
    press(page, "d")
    for (x, y), act in zip(corners, (page.mouse.down, page.mouse.up), strict=True):
        page.mouse.move(stage["x"] + x * stage["width"], stage["y"] + y * stage["height"])
        act()
    page.keyboard.type(desc)
    press(page, "Enter")


def test_decisions_and_drawn_objects_are_saved_and_read_by_the_command(open_page: Open, tmp_path: Path) -> None:
    source = SuggestionsPage(tmp_path)
    page = open_page(source)
    press(page, "a", "r", "ArrowLeft")
    draw(page, "bird", (0.75, 0.875), (0.25, 0.25))  # from the bottom right to the top left
    expect(page.locator("#stage .tag.added")).to_have_text("bird")
    draw(page, " new class ", (0.5, 0.5), (1.3, 0.75))  # beyond the edge
    for desc, keys in (("", "Escape"), ("bird", "Delete"), ("cat", "u")):
        draw(page, desc, (0.1, 0.1), (0.3, 0.3))
        press(page, keys)
    draw(page, "", (0.1, 0.1), (0.1, 0.1))
    expect(page.locator("#naming")).to_be_hidden()
    page.reload()  # the browser keeps them
    expect(page.locator("#looked")).to_have_text("2 added, 0 of 3 images complete")
    file = read_decisions(save_decisions(page, tmp_path / "d.json"), read_suggestions(source.suggestions))
    *suggestions, bird, new = file.suggestions
    assert [item.state for item in suggestions[:3]] == ["accepted", "rejected", "undecided"] and not file.complete
    assert (bird.image_id, bird.item.desc, bird.item.category_id) == (1, "bird", 5)
    assert (new.image_id, new.item.desc, new.item.category_id) == (1, "new class", None)
    assert bird.item.coords == pytest.approx((16, 12, 48, 42), abs=0.2)
    assert new.item.coords == pytest.approx((32, 24, 64, 36), abs=0.2) and new.item.coords[2] == 64


def test_images_are_completed_in_a_fixed_order_after_their_suggestions(open_page: Open, tmp_path: Path) -> None:
    source = SuggestionsPage(tmp_path)
    page = open_page(source)
    first, second, _ = fix_order([1, 2, 3])
    press(page, "i", "ArrowRight", "ArrowRight", "c")
    expect(page.locator("#where")).to_have_text("3 of 9")
    expect(page.locator("#trouble")).to_contain_text("2 suggestions")
    press(page, "ArrowLeft", "ArrowLeft", "a", "r")
    expect(page.locator("#accept")).to_be_hidden()
    draw(page, "cat", (0.1, 0.1), (0.3, 0.3))
    press(page, "c")
    expect(page.locator("#image")).to_contain_text(f"{second}.png")
    file = save_decisions(page, tmp_path / "d.json")
    assert read_decisions(file, read_suggestions(source.suggestions)).complete == {first}
    press(page, "u", "u")
    expect(page.locator("#looked")).to_have_text("0 added, 0 of 3 images complete")
    page.locator("#load").set_input_files(file)
    expect(page.locator("#looked")).to_have_text("1 added, 1 of 3 images complete")
