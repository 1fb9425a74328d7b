"""The pages of records, of an evaluation and of predictions in a browser: filters, order, pages, their width."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from coordexp.evaluate import evaluate
from coordexp.pages.document import save_page
from coordexp.pages.evaluation import render_evaluation
from coordexp.pages.predictions import render_predictions
from tests.browser.conftest import Open
from tests.command import run
from tests.unit.evaluate.scenes import BOX, FAR, answer, prediction, record

pytestmark = pytest.mark.timeout(60)
NARROW = {"width": 640, "height": 450}  # 1280 x 900 at 200 %


@dataclass(frozen=True)
class RecordsPage:
    """The page of a data file of 30 records: every third one has a cat, and the last one is broken."""

    folder: Path

    def save(self, path: Path) -> Path:
        Image.new("RGB", (64, 48), "teal").save(self.folder / "a.png")
        rows = []
        for k in range(30):
            objects = [{"desc": "cat" if k % 3 == 0 else "dog", "bbox_2d": [4, 4, 40, 30]}]
            size = {"image": "a.png", "width": 64, "height": 48, "space": "pixel"}
            rows.append(json.dumps(size | {"objects": objects}) if k < 29 else "{")
        file = self.folder / "data.jsonl"
        file.write_text("\n".join(rows))
        run("data", "view", file, "--out", path)
        return path


@dataclass(frozen=True)
class EvaluationPage:
    """The page of an evaluation of three images: one has a miss, one a wrong name and an extra, one is right."""

    folder: Path

    def save(self, path: Path) -> Path:
        names = {1: "cat", 2: "cat", 3: "bird"}
        truth = [(id, record((desc, BOX), image=f"{id}.png")) for id, desc in names.items()]
        truth[1] = (2, record(("cat", BOX), ("bird", FAR), image="2.png"))
        answers = [
            answer(image_id=1, image="1.png"),
            answer(
                *(prediction(desc, box, 0.5) for desc, box in (("cat", BOX), ("dog", FAR), ("cow", FAR))),
                image_id=2,
                image="2.png",
            ),
            answer(prediction("bird", BOX, 0.9), image_id=3, image="3.png"),
        ]
        save_page(path, render_evaluation(evaluate(truth, answers), self.folder, "preds on data", 9))
        return path


@dataclass(frozen=True)
class PredictionsPage:
    """The page of predictions on 30 images: a cat with score 0.9 and a dog with 0.3 on each, but on the last."""

    folder: Path

    def save(self, path: Path) -> Path:
        images = [(id, record(image=f"{id}.png")) for id in range(1, 31)]
        objects = (prediction("cat", BOX, 0.9), prediction("dog", FAR, 0.3))
        answers = [answer(*objects[: 2 * (id < 30)], image_id=id, image=f"{id}.png") for id, _ in images]
        save_page(path, render_predictions(images, answers, self.folder, "model on images"))
        return path


def visible_cards(page: Page) -> list[str]:
    return page.locator(".card:visible h3").all_inner_texts()


def test_records_are_shown_twelve_at_a_time_and_arrow_keys_turn_the_pages(open_page: Open, tmp_path: Path) -> None:
    page = open_page(RecordsPage(tmp_path))
    assert len(visible_cards(page)) == 12
    expect(page.locator("#where")).to_have_text("1 of 3")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#where")).to_have_text("3 of 3")
    assert visible_cards(page)[-1] == "line 30"
    page.locator("#back").click()
    expect(page.locator("#where")).to_have_text("2 of 3")


def test_records_can_be_filtered_by_class_and_by_problem(open_page: Open, tmp_path: Path) -> None:
    page = open_page(RecordsPage(tmp_path))
    page.locator("#class").select_option(label="cat (10)")
    assert len(visible_cards(page)) == 10
    page.locator("#problem").select_option("any")
    expect(page.locator("#nothing")).to_be_visible()
    page.locator("#class").select_option("")
    assert visible_cards(page) == ["line 30"]
    page.locator("#problem").select_option("none")
    expect(page.locator("#where")).to_have_text("1 of 3")
    page.locator("[data-kind=names]").uncheck()
    expect(page.locator(".tag").first).to_be_hidden()


def test_the_worst_images_can_be_filtered_and_ordered(open_page: Open, tmp_path: Path) -> None:
    page = open_page(EvaluationPage(tmp_path))
    expect(page.locator("#where")).to_have_text("2 of 2 shown")
    assert [text.split()[0] for text in visible_cards(page)] == ["1.png", "2.png"]
    page.locator("#order").select_option("errors")
    assert [text.split()[0] for text in visible_cards(page)] == ["2.png", "1.png"]
    page.locator("#filter").select_option("misses")
    assert [text.split()[0] for text in visible_cards(page)] == ["1.png"]
    page.locator("#filter").select_option("truncated")
    expect(page.locator("#nothing")).to_be_visible()


@pytest.mark.parametrize("make", [RecordsPage, EvaluationPage])
@pytest.mark.parametrize("viewport", [{"width": 1400, "height": 900}, {"width": 390, "height": 800}])
def test_an_image_is_enlarged_with_its_shapes_by_a_click_or_a_key_and_closed_again(
    open_page: Open, tmp_path: Path, make: type[RecordsPage | EvaluationPage], viewport: dict[str, int]
) -> None:
    page = open_page(make(tmp_path), viewport=viewport)
    dialog, stage = page.locator("dialog.enlarged"), page.locator(".card .stage").first
    before = stage.bounding_box()
    stage.click()
    expect(dialog).to_be_visible()
    after = dialog.locator(".stage").bounding_box()
    assert before and after and after["x"] >= 0 and after["x"] + after["width"] <= viewport["width"]
    assert after["y"] >= 0 and after["y"] + after["height"] <= viewport["height"]
    assert after["width"] > 1.5 * before["width"] or after["width"] > 0.9 * viewport["width"]
    assert dialog.locator("svg polygon, svg rect").count() == stage.locator("svg polygon, svg rect").count() > 0
    page.keyboard.press("ArrowRight")  # it does not turn the page below
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(stage).to_be_visible()
    stage.locator("button").focus()
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    dialog.locator("[data-object], .shape").first.hover(force=True)
    dialog.locator("button").click()
    expect(dialog).to_be_hidden()


def test_a_click_on_a_column_sorts_the_classes(open_page: Open, tmp_path: Path) -> None:
    page = open_page(EvaluationPage(tmp_path))
    names = page.locator(".sortable tbody th")
    head = page.locator(".sortable thead th").first
    head.click()
    falling = names.all_inner_texts()
    head.click()
    assert names.all_inner_texts() == falling[::-1] == ["bird", "cat"]
    assert head.get_attribute("aria-sort") == "ascending"


def test_predictions_below_a_score_are_hidden_and_answers_filtered(open_page: Open, tmp_path: Path) -> None:
    page = open_page(PredictionsPage(tmp_path))
    expect(page.locator("#where")).to_have_text("1 of 3")
    card = page.locator(".card").first
    expect(card.locator(".tag:visible")).to_have_text(["cat 0.90", "dog 0.30"])
    page.locator("#least").fill("0.35")
    expect(page.locator("#least-score")).to_have_text("0.35")
    expect(card.locator(".tag:visible")).to_have_text(["cat 0.90"])
    expect(card.locator("li:visible")).to_have_text(["cat 0.90"])
    expect(card.locator("polygon:visible")).to_have_count(1)
    page.locator("#least").press("ArrowLeft")  # moves the slider, and does not turn the page
    expect(card.locator(".tag:visible")).to_have_count(2)
    expect(page.locator("#where")).to_have_text("1 of 3")
    page.locator("#flag").select_option("empty")
    assert [text.split()[0] for text in visible_cards(page)] == ["30.png"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("make", [RecordsPage, EvaluationPage, PredictionsPage])
def test_at_200_percent_nothing_is_wider_than_the_window(
    open_page: Open, tmp_path: Path, make: type[RecordsPage | EvaluationPage | PredictionsPage], scheme: str
) -> None:
    page = open_page(make(tmp_path), viewport=NARROW, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
