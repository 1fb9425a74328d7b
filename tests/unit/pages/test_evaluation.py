"""The page of an evaluation: one file that needs nothing else, safe for any text in the data."""

import re
from itertools import pairwise

import pytest
from PIL import Image

from coordexp.evaluate import evaluate
from coordexp.pages.evaluation import (
    choose_changed_images,
    choose_worst_images,
    draw_objects,
    make_notes,
    render_evaluation,
)
from tests.unit.evaluate.scenes import BOX, FAR, answer, invalid_object, prediction, record
from tests.unit.pages.reader import Reader

NASTY = '"><script>alert(1)</script>&amp; <img src=x onerror=alert(2)>'


@pytest.fixture
def nasty(tmp_path):
    """Hostile text in every possible place, and three images: a large one, one of another size, none."""
    for name, size in (("large.png", (1600, 800)), ("other.png", (10, 20))):
        Image.new("RGB", size, "navy").save(tmp_path / name)
    truth = [
        (1, record((NASTY, BOX), ("cup", FAR), image="large.png", width=1600, height=800)),
        (2, record(("cup", BOX), image="other.png")),
        (3, record(("cup", BOX), image=NASTY)),
    ]
    answers = [
        answer(
            prediction(NASTY, BOX),
            prediction(f"ghost {NASTY}", FAR),
            invalid_object(NASTY),
            image="large.png",
            text=f"{{{NASTY}",
        ),
        answer(image_id=2, image="other.png", finish="length"),
        answer(prediction("cup", FAR), image_id=3, image=NASTY, finish=NASTY),
    ]
    return render_evaluation(evaluate(truth, answers), tmp_path, f"preds of {NASTY}", 9)


def test_text_from_the_data_is_escaped_everywhere(nasty):
    assert nasty.count("<script") == 2
    assert "<img src=x" not in nasty
    reader = Reader(nasty)
    assert not [names for _, names in reader.elements if any(name.startswith("on") for name in names)]
    assert all(image["src"].startswith("data:image/") for image in reader.all("img"))
    assert "".join(reader.shown).count(NASTY) >= 6  # title, class, reason, unknown class, image, answer


def test_an_image_that_is_missing_or_has_another_size_gets_a_remark(nasty):
    text = "".join(Reader(nasty).shown)
    assert "image not shown: No such file or directory" in text
    assert "the file is 10 x 20, but its record says 999 x 999" in text


def test_an_overlay_draws_each_object_once_by_its_kind():
    truth = [(1, record(("cat", BOX), ("cat", FAR)))]
    (image,) = evaluate(truth, [answer(prediction("cat", BOX), prediction("dog", (0, 0, 50, 100), 0.25))]).images
    shapes = draw_objects(image)
    assert [shape.style for shape in shapes] == ["true", "matched", "missed", "extra"]
    assert shapes[-1].title == "extra: dog 0.25"
    assert shapes[-1].points == "0,0 50,0 50,100 0,100"
    assert [shape.name for shape in shapes if shape.name] == ["- cat", "+ dog"]


def test_a_wrong_name_at_the_right_place_is_one_mark_with_both_names():
    truth = [(1, record(("cat", BOX), ("cow", FAR)))]
    answers = [answer(prediction("dog", BOX, 0.25), prediction("cow", FAR), prediction("dog", BOX))]
    (image,) = evaluate(truth, answers).images
    shapes = draw_objects(image)
    assert [shape.style for shape in shapes] == ["true", "true", "matched", "wrong-name", "extra"]
    assert "wrong-name: cat \N{RIGHTWARDS ARROW} dog 0.25" in [shape.title for shape in shapes]
    assert [shape.name for shape in shapes if shape.name] == ["cat \N{RIGHTWARDS ARROW} dog", "+ dog"]


def test_the_worst_images_have_the_lowest_f1_or_the_most_errors():
    many = [prediction("cat", (k, 0, k + 9, 9)) for k in range(0, 400, 20)]
    truth = [
        (1, record(("cat", BOX), image="0")),
        (2, record(*[("cat", obj.bins) for obj in many], image="0")),
        (3, record(("cat", BOX), ("cat", FAR), image="0")),
        (4, record(("cat", BOX), image="0")),
    ]
    answers = [
        answer(prediction("cat", BOX), image="0"),  # right
        answer(*many[:15], image_id=2, image="0"),  # 5 errors, F1 0.86
        answer(prediction("cat", BOX), image_id=3, image="0"),  # 1 error, F1 0.67
        answer(image_id=4, image="0"),  # 1 error, F1 0
    ]
    images = evaluate(truth, answers).images
    assert [image.comparison.image_id for image in choose_worst_images(images, 9)] == [4, 3, 2]
    assert [image.comparison.image_id for image in choose_worst_images(images, 2)] == [4, 2]


def test_beside_another_model_images_are_there_twice_and_the_largest_change_comes_first(tmp_path):
    truth = [(k, record(("cat", BOX), ("cow", FAR), image=str(k))) for k in (1, 2, 3, 4)]
    both = (prediction("cat", BOX), prediction("cow", FAR))
    before = [answer(*both[:n], image_id=k, image=str(k)) for k, n in ((1, 2), (2, 0), (3, 1), (4, 1))]
    after = [answer(*both[:n], image_id=k, image=str(k)) for k, n in ((1, 1), (2, 2), (3, 2), (4, 1))]
    base, report = evaluate(truth, before), evaluate(truth, after)
    pairs = choose_changed_images(base.images, report.images, 3)
    assert [(old.comparison.image_id, new.comparison.image_id) for old, new in pairs] == [(2, 2), (3, 3), (1, 1)]
    reader = Reader(render_evaluation(report, tmp_path, "B against A", 3, base))
    cards = list(reader.all("article"))
    assert [card["data-flags"].split()[0] for card in cards] == ["better", "better", "worse"]
    stages = [div for div in reader.all("div") if div.get("class") == "stage"]
    assert len(stages) == 2 * len(cards)


def test_curves_have_steps_and_no_slopes_between_points(tmp_path):
    """A score of 0.9 is right and one of 0.1 is wrong. In between, nothing changes; there is no slope."""
    answers = [answer(prediction("cat", BOX, 0.9), prediction("cat", FAR, 0.1))]
    page = render_evaluation(
        evaluate([(1, record(("cat", BOX), ("cat", (0, 0, 9, 9))))], answers), tmp_path, "a", 2
    )
    paths = re.findall(r'<path class="line" d="M([0-9., ]+)"', page)
    lines = [[tuple(map(float, point.split(","))) for point in path.split()] for path in paths]
    assert [len(line) for line in lines] == [4] * 4
    for line in lines:
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(line))
    (start, corner, _, end), (_, low, _, high) = lines[0], lines[2]
    assert start[0] < corner[0] == end[0] and start[1] == corner[1] < end[1]  # precision 1 up to recall 0.5
    assert low[0] < high[0] and low[1] > high[1]  # precision 0.5 at the lowest score, and 1 above it


def test_what_may_explain_the_numbers_is_on_top(tmp_path):
    truth = [(k, record(("cat", BOX), image=f"{k}")) for k in range(1, 13)]
    garbage = [
        answer(image_id=k, image=f"{k}", finish="length", text="I see" if k <= 8 else "{") for k in range(1, 13)
    ]
    report = evaluate(truth, garbage)
    notes = make_notes(report)
    assert notes[0] == "no answer has a valid object, so every number of quality is 0"
    assert (
        notes[1].startswith("8 of 12 answers do not begin with {") and "12 of 12 answers were cut off" in notes[2]
    )
    page = render_evaluation(report, tmp_path, "a", 2)
    assert (
        page.index("What to look at") < page.index("12 of 12 answers were cut off") < page.index('class="tiles"')
    )
    right = [answer(prediction("cat", BOX), image_id=k, image=f"{k}") for k in range(1, 13)]
    assert make_notes(evaluate(truth, right)) == make_notes(evaluate(truth, [*right[:11], garbage[11]])) == []
    assert "What to look at" not in render_evaluation(evaluate(truth, right), tmp_path, "a", 2)
