"""Which predicted objects are suggested as missing labels, the files of suggestions, and completed records."""

import json
from dataclasses import replace

import pytest

from coordexp.data import Geometry, Record, RecordFile, RecordObject
from coordexp.data.records import SPACES
from coordexp.detect.suggestions import (
    Suggestion,
    SuggestionRules,
    accept,
    add_labels,
    complete_records,
    merge_answers,
    read_decisions,
    read_suggestions,
    suggest_labels,
    to_record_object,
    write_suggestions,
)
from coordexp.errors import DataError
from tests.unit.evaluate.scenes import BOX, FAR, answer, prediction, record

RULES = SuggestionRules(iou=0.5, other_iou=0.7)
NEAR = (100, 100, 300, 240)  # IoU 0.7 with BOX
HALF = (100, 100, 300, 200)  # IoU 0.5 with BOX
THIRD = (200, 100, 400, 300)  # IoU 1/3 with BOX


def suggest(labels, *answers, rules=RULES, known=("cat", "dog", "cup")):
    """Return the report on one image with these labels. Another image has the known classes."""
    other = record(*((desc, BOX) for desc in known), image="b.png")
    return suggest_labels([(1, record(*labels)), (2, other)], answers, rules)


def shapes(report):
    return [(item.item.desc, tuple(map(int, item.item.coords))) for item in report.suggestions]


def test_an_object_that_no_label_has_is_suggested():
    report = suggest([("cat", BOX)], answer(prediction("cat", BOX, 0.9), prediction("cat", FAR, 0.8)))
    assert shapes(report) == [("cat", FAR)]
    (suggestion,) = report.suggestions
    assert (suggestion.id, suggestion.image_id, suggestion.image, suggestion.labels) == (1, 1, "a.png", 1)
    assert (suggestion.score, suggestion.agreement) == (0.8, None)
    assert (report.images, report.objects, report.explained, report.repeated) == (1, 2, 1, 0)


@pytest.mark.parametrize(
    ("label", "predicted", "is_explained"),
    [
        (("cat", BOX), ("cat", HALF), True),
        (("cat", BOX), ("cat", THIRD), False),
        (("dog", BOX), ("cat", NEAR), True),
        (("dog", BOX), ("cat", HALF), False),
    ],
)
def test_a_label_of_another_class_explains_only_what_it_overlaps_more(label, predicted, is_explained):
    report = suggest([label], answer(prediction(*predicted)))
    assert (report.suggestions == ()) is is_explained
    assert report.explained == is_explained


def test_one_label_explains_several_predictions():
    report = suggest([("cat", BOX)], answer(prediction("cat", BOX, 0.9), prediction("cat", NEAR, 0.8)))
    assert (report.suggestions, report.explained) == ((), 1)  # the two are one object
    apart = answer(prediction("cat", HALF, 0.9), prediction("cat", (100, 200, 300, 300), 0.8))
    assert suggest([("cat", BOX)], apart).explained == 2


def test_of_two_suggestions_for_one_object_the_better_score_wins():
    report = suggest([], answer(prediction("dog", NEAR, 0.4), prediction("cat", BOX, 0.6)))
    assert shapes(report) == [("cat", BOX)]
    assert report.repeated == 1


def test_polygons_are_compared_by_their_masks():
    triangle = (100, 100, 300, 100, 100, 300)  # half of BOX
    rest = (300, 100, 300, 300, 100, 300)
    report = suggest([("cat", triangle)], answer(prediction("cat", triangle), prediction("cat", rest)))
    assert shapes(report) == [("cat", rest)]
    assert report.suggestions[0].item.kind == "poly"


def test_all_images_are_ranked_together_and_numbered_from_the_best():
    first = answer(prediction("cat", BOX, 0.3), prediction("cat", FAR, 0.9))
    second = answer(prediction("cat", FAR, 0.6), image_id=2, image="b.png")
    report = suggest([], first, second)
    assert [(item.id, item.image_id, item.score) for item in report.suggestions] == [
        (1, 1, 0.9),
        (2, 2, 0.6),
        (3, 1, 0.3),
    ]


def test_classes_that_no_label_has_are_left_out_and_counted_unless_they_are_asked_for():
    predicted = answer(prediction("ghost", BOX), prediction("ghost", FAR), prediction("cat", THIRD))
    report = suggest([], predicted)
    assert shapes(report) == [("cat", THIRD)]
    assert report.new_classes == {"ghost": 2}
    report = suggest([], predicted, rules=replace(RULES, new_classes=True))
    assert [desc for desc, _ in shapes(report)].count("ghost") == 2
    assert not report.new_classes


def test_classes_that_a_record_states_to_be_complete_are_not_suggested():
    labelled = replace(record(("cat", BOX), ("dog", BOX)), exhaustive=("cat",))
    answers = [answer(prediction("cat", FAR, 0.9), prediction("dog", THIRD, 0.8))]
    report = suggest_labels([(1, labelled)], answers, RULES)
    assert (shapes(report), report.complete) == ([("dog", THIRD)], 1)
    report = suggest_labels([(1, labelled)], answers, replace(RULES, ignore_exhaustive=True))
    assert (shapes(report), report.complete) == ([("cat", FAR), ("dog", THIRD)], 0)


def test_a_record_that_asks_for_an_expression_gets_no_suggestions():
    asking = replace(record(("cat", BOX)), expression="the cat on the left")
    report = suggest_labels([(1, asking)], [answer(prediction("cat", FAR))], RULES)
    assert (report.images, report.suggestions) == (0, ())


def test_a_suggestion_has_the_category_id_of_its_class_if_its_labels_have_one():
    numbered = RecordObject("cat", "bbox_2d", BOX, 17)
    plain = RecordObject("dog", "bbox_2d", BOX)
    truth = [(1, Record("a.png", 999, 999, "bin", (numbered,))), (2, Record("b.png", 999, 999, "bin", (plain,)))]
    report = suggest_labels(truth, [answer(prediction("cat", FAR), prediction("dog", THIRD))], RULES)
    assert {item.item.desc: item.item.category_id for item in report.suggestions} == {"cat": 17, "dog": None}


def test_suggestions_are_in_the_space_of_their_record():
    truth = [(1, Record("a.png", 640, 480, "unit", (RecordObject("cat", "bbox_2d", (0, 0, 0.1, 0.1)),)))]
    report = suggest_labels(truth, [answer(prediction("cat", (0, 333, 999, 666)))], RULES)
    assert report.suggestions[0].item.coords == (0, 0.333333, 1, 0.666667)


def test_answers_of_several_samples_are_merged_and_the_median_box_is_taken():
    answers = [
        answer(prediction("cat", (100, 100, 300, 300), 0.5)),
        replace(answer(prediction("cat", (104, 100, 300, 300), 0.9)), sample=1),
        replace(answer(prediction("cat", (110, 100, 306, 300), 0.8), prediction("cat", FAR, 0.2)), sample=2),
        replace(answer(), sample=3),
    ]
    best, weak = merge_answers(answers, 0.5)
    assert best.geometry.bins == (104, 100, 300, 300)
    assert best.scores == (0.9, 0.8, 0.5)
    assert best.agreement == 0.75
    assert weak.agreement == 0.25


def test_an_object_counts_once_per_answer():
    (candidate,) = merge_answers([answer(prediction("cat", BOX, 0.5), prediction("cat", NEAR, 0.6))], 0.5)
    assert (candidate.scores, candidate.geometry.bins) == ((0.6,), NEAR)


def test_agreement_ranks_first_and_the_mean_score_among_equals():
    certain, weak, often = prediction("cat", BOX, 0.9), prediction("dog", FAR, 0.1), prediction("cup", THIRD, 0.2)
    apart = (500, 0, 590, 90)
    answers = [answer(certain, often, prediction("dog", apart, 0.5)), replace(answer(often, weak), sample=1)]
    report = suggest([], *answers)
    assert [item.item.desc for item in report.suggestions] == ["cup", "cat", "dog", "dog"]
    assert [item.score for item in report.suggestions] == pytest.approx([0.6, 0.45, 0.25, 0.05])
    assert [item.agreement for item in report.suggestions] == [1.0, 0.5, 0.5, 0.5]


CUP = RecordObject("cup", "bbox_2d", (10, 20, 110.5, 220))
LEAF = RecordObject('a "leaf" ☘', "poly", (1, 2, 30, 4, 5, 60), 7)


def suggestion(id=1, item=CUP, image_id=1, image="a.png", labels=1, score=0.9, agreement=None):
    return Suggestion(id, image_id, image, labels, item, score, agreement)


def in_pixels(*objects, image="a.png", space="pixel", image_id=None):
    return Record(image, 640, 480, space, objects, image_id)


def write_records(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(item.as_json() + "\n" for item in records))
    return RecordFile(path)


def test_suggestions_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "suggestions.jsonl"
    written = write_suggestions(file, [suggestion(), suggestion(2, LEAF, 9, "b ä.png", 0, 0.25, 0.5)])
    assert read_suggestions(file) == written
    assert [item.item for item in written.suggestions] == [CUP, LEAF]
    assert list(json.loads(file.read_text().splitlines()[1])) == [
        *("id", "image_id", "image", "labels", "desc", "poly", "category_id", "score", "agreement")
    ]


def write_decisions(path, file, decisions, **changes):
    path.write_text(json.dumps({"format": 1, "suggestions": file.sha256, "decisions": decisions} | changes))
    return path


def test_decisions_are_read_by_the_id_of_the_suggestion(tmp_path):
    file = write_suggestions(tmp_path / "s.jsonl", [suggestion(), suggestion(2)])
    path = write_decisions(tmp_path / "d.json", file, {"2": "accept", "1": "reject"})
    assert [item.state for item in read_decisions(path, file).suggestions] == ["rejected", "accepted"]


@pytest.mark.parametrize("space", SPACES)
def test_what_a_person_added_is_a_label_in_the_space_of_its_record(tmp_path, space):
    file = write_suggestions(tmp_path / "s.jsonl", [suggestion()])
    lines = [{"desc": "cup", "bbox_2d": [64, 48.2, 640, 240], "category_id": 3}]
    notes = {"2": {"image": "a.png", "labels": 0, "complete": True, "added": lines}}
    said = read_decisions(write_decisions(tmp_path / "d.json", file, {"1": "reject"}, images=notes), file)
    records = write_records(tmp_path / "train.jsonl", in_pixels(CUP), in_pixels(space=space))
    _, record = complete_records(records, accept(said.suggestions, 0), tmp_path)
    assert record.in_bins(record.objects[0]) == (100, 100, 999, 500) and said.complete == {2}
    assert (record.objects[0].desc, record.objects[0].category_id, record.space) == ("cup", 3, space)


def test_a_decision_counts_before_the_score():
    plain = [suggestion(k, score=score) for k, score in enumerate((0.9, 0.8, 0.7, 0.6), start=1)]
    decided = [replace(plain[0], state="rejected"), *plain[1:3], replace(plain[3], state="accepted")]
    assert [item.id for item in accept(decided, None)] == [4]
    assert [item.id for item in accept(decided, 0.7)] == [2, 3, 4]
    assert [item.id for item in accept(plain, 0.8)] == [1, 2]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("size", [(640, 480), (1, 1), (33, 7000)])
def test_a_suggested_label_has_the_predicted_bins_in_every_space(space, size):
    target = Record("a.png", *size, space, ())
    for bins in ((0, 0, 999, 999), (1, 498, 2, 501), (333, 666, 334, 667)):
        item = to_record_object("cup", Geometry("bbox_2d", bins), target, 4)
        assert target.in_bins(item) == bins
        assert item.category_id == 4


def test_labels_in_reading_order_stay_in_reading_order():
    first, last = RecordObject("a", "bbox_2d", (50, 10, 60, 20)), RecordObject("b", "bbox_2d", (5, 90, 9, 99))
    added = [RecordObject("d", "poly", (7, 95, 9, 90, 8, 99)), RecordObject("c", "bbox_2d", (10, 10, 60, 20))]
    assert [item.desc for item in add_labels(in_pixels(first, last), added).objects] == ["c", "a", "b", "d"]
    assert [item.desc for item in add_labels(in_pixels(last, first), added).objects] == ["b", "a", "c", "d"]


def test_completed_records_keep_their_ids_and_their_other_labels(tmp_path):
    untouched, unnamed = in_pixels(CUP, image="b.png", image_id=4), in_pixels(CUP)
    records = write_records(tmp_path / "train.jsonl", in_pixels(LEAF, image_id=70), untouched, unnamed)
    accepted = [suggestion(1, CUP, image_id=70), suggestion(2, LEAF, image_id=3)]  # the third record has line 3
    completed = list(complete_records(records, accepted, tmp_path))
    assert completed == [in_pixels(LEAF, CUP, image_id=70), untouched, in_pixels(LEAF, CUP)]


def test_images_are_named_from_the_folder_of_the_completed_file(tmp_path):
    absolute = str(tmp_path / "c.png")
    records = write_records(
        tmp_path / "data/train.jsonl", in_pixels(image="images/a.png"), in_pixels(image=absolute)
    )
    completed = complete_records(records, [], tmp_path / "new/deep")
    assert [item.image for item in completed] == ["../../data/images/a.png", absolute]


def test_labels_are_not_added_twice(tmp_path):
    records = write_records(tmp_path / "train.jsonl", in_pixels(LEAF))
    completed = write_records(tmp_path / "new.jsonl", *complete_records(records, [suggestion()], tmp_path))
    with pytest.raises(DataError):
        list(complete_records(completed, [suggestion()], tmp_path))


def test_shuffled_suggestions_are_the_same_in_another_order_which_is_always_the_same():
    boxes = [(50 * k, 50 * k, 50 * k + 40, 50 * k + 40) for k in range(12)]
    given = answer(*(prediction("cat", box, 0.9 - k / 20) for k, box in enumerate(boxes)))
    ranked, *shuffled = (suggest([], given, rules=replace(RULES, shuffle=flag)) for flag in (False, True, True))
    assert shapes(shuffled[0]) == shapes(shuffled[1]) != shapes(ranked)
    assert sorted(shapes(shuffled[0])) == sorted(shapes(ranked))
    assert [item.id for item in shuffled[0].suggestions] == list(range(1, 13))
