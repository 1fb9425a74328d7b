"""The page of predictions: what it shows of each image, and its limits."""

import re

from PIL import Image

from coordexp.detect.answering import make_record
from coordexp.evaluate.answer import NO_IMAGE
from coordexp.pages import predictions
from coordexp.pages.predictions import render_predictions
from tests.unit.evaluate.scenes import BOX, FAR, answer, invalid_object, prediction, record


def test_a_page_shows_names_scores_and_how_the_answers_ended(tmp_path):
    Image.new("RGB", (99, 99), "teal").save(tmp_path / "a.png")
    images = [(1, record(width=99, height=99)), (2, record(image="gone.png")), (3, record(image="b.png"))]
    answers = [
        answer(prediction("cup", BOX, 0.87), prediction("fork", FAR, 0.5), invalid_object(), text="raw text"),
        answer(image_id=2, image="gone.png", finish=NO_IMAGE),
        answer(prediction("cup", BOX, 0.3), image_id=3, image="b.png", finish="length"),
    ]
    page = render_predictions(images, answers, tmp_path, "model on images")
    assert "all 3 images, 3 objects of 2 classes" in page
    assert page.count("cup 0.87") == 2 and "fork 0.50" in page  # in the image and in its tooltip
    assert "refused: degenerate 1" in page and "raw text" in page
    assert "the image could not be read" in page and "image not shown: No such file" in page
    assert re.findall(r'data-flags="([^"]*)"', page) == ["refused", "unread", "truncated"]
    assert page.count("data:image/png;base64") == 1
    for words in ("with refused objects (1)", "cut off (1)", "not read (1)"):
        assert words in page
    assert "without objects" not in page  # no answer is empty


def test_text_of_models_and_files_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    images = [(1, make_record(f"{evil}.png", (9, 9), [evil], None, f"{evil} {{classes}}"))]
    answers = [answer(prediction(evil, BOX, 0.5), image=f"{evil}.png", text=evil)]
    page = render_predictions(images, answers, tmp_path, evil)
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page


def test_a_page_has_a_limit_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "MOST_IMAGES", 2)
    images = [(k, record(image=f"{k}.png")) for k in range(1, 6)]
    answers = [answer(prediction("cup", BOX, 0.5), image_id=k, image=f"{k}.png") for k in range(1, 6)]
    page = render_predictions(images, answers, tmp_path, "model on images")
    assert "the first 2 of 5 images (a page has at most 2), 2 objects" in page
    assert page.count("<article") == 2
