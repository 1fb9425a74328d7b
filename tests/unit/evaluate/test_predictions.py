"""Predictions on disk: files read back as they were written, and what breaks a rule is named."""

import json
from dataclasses import replace

import pytest
from pycocotools.coco import COCO

from coordexp.data import RecordFile
from coordexp.detect.predicting import UnfinishedPredictions
from coordexp.errors import DataError
from coordexp.evaluate import evaluate, read_predictions, read_truth, write_predictions
from coordexp.evaluate.answer import NO_IMAGE, drop_duplicates
from coordexp.evaluate.behaviour import Rate
from coordexp.evaluate.predictions import category_ids
from tests.unit.data.sources import coco, import_coco
from tests.unit.evaluate.scenes import BOX, FAR, answer, invalid_object, prediction, record, run_pycocotools

POLY = (10, 20, 110, 20, 60, 220)
TRUTH = [
    (1, record(("dog", BOX), ("cat", FAR))),
    (3, record(("leaf", POLY), image="b.png", width=500, height=250)),
]
ANSWERS = (
    answer(
        prediction("cat", FAR, 0.25),
        invalid_object(),
        prediction("unicorn", BOX, 1.0),
        text='{"a": "\u732b</script>\n"',
    ),
    answer(prediction("leaf", POLY), image_id=3, image="b.png", finish="length"),
)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "deep" / "preds.json"
    write_predictions(path, ANSWERS, TRUTH)
    return path


def test_what_is_written_reads_back(written):
    assert read_predictions(written, TRUTH) == ANSWERS


def test_detections_are_coco_results_in_pixels(written):
    cat, unicorn, leaf = json.loads(written.read_text())
    assert cat == {"image_id": 1, "category_id": 1, "desc": "cat", "bbox": [600, 600, 200, 200], "score": 0.25}
    assert unicorn["category_id"] == 0
    assert leaf["category_id"] == 3
    assert leaf["bbox"] == pytest.approx([5.005, 5.005, 50.05, 50.05], abs=1e-3)
    assert leaf["segmentation"][0][:2] == pytest.approx([5.005, 5.005], abs=1e-3)


def test_duplicates_are_dropped_whatever_their_descs_are_and_stay_visible(tmp_path):
    first, copy, beside = prediction("cat", BOX), prediction("dog", BOX, 0.9), prediction("leaf", FAR)
    whole = answer(first, invalid_object(), copy, beside, text="as it was")
    kept = drop_duplicates(whole, 0.9)
    assert kept == replace(whole, objects=(first, invalid_object(), beside), dropped=(copy,))
    assert drop_duplicates(answer(first, beside), 0.9) == answer(first, beside)

    write_predictions(tmp_path / "preds.json", [kept], TRUTH[:1])
    assert [item["desc"] for item in json.loads((tmp_path / "preds.json").read_text())] == ["cat", "leaf"]
    assert read_predictions(tmp_path / "preds.json", TRUTH[:1]) == (kept,)
    report = evaluate(TRUTH[:1], [kept])
    assert report.behaviour.rates["invalid"] == Rate(1, 3)


def with_ids(record, image_id, *category_ids):
    objects = [replace(item, category_id=id) for item, id in zip(record.objects, category_ids, strict=True)]
    return image_id, replace(record, image_id=image_id, objects=tuple(objects))


def test_pycocotools_finds_predictions_in_the_coco_file_that_was_imported(tmp_path):
    """Ids that are no line numbers, 0 among them, and classes that are not in the order of their names."""
    names = {0: "zebra", 7: "ant", 90: "cow"}
    boxes = [[8, 6, 16, 12], [30, 20, 20, 20], [2, 30, 10, 10]]
    images = [{"id": id, "file_name": f"{id}.png", "width": 64, "height": 48} for id in (6000, 0, 4900)]
    annotations = [
        {"id": k, "image_id": image["id"], "category_id": category, "bbox": box, "area": 192, "iscrowd": 0}
        for k, (image, category, box) in enumerate(zip(images, names, boxes, strict=True), start=1)
    ]
    document = coco(annotations, images, [{"id": id, "name": name} for id, name in names.items()])
    import_coco(tmp_path, document)
    truth = read_truth(RecordFile(tmp_path / "out.jsonl"))
    answers = [
        answer(prediction(item.desc, item.geometry.bins), image_id=id, image=line.image)
        for id, line in truth
        for item in line.true_objects()
    ]
    answers[0] = replace(answers[0], objects=(*answers[0].objects, prediction("unicorn", FAR)))
    write_predictions(tmp_path / "preds.json", answers, truth)
    detections = json.loads((tmp_path / "preds.json").read_text())
    assert [(detection["image_id"], detection["category_id"]) for detection in detections] == [
        (6000, 0),
        (6000, 91),  # a class that the data does not have
        (0, 7),
        (4900, 90),
    ]
    original = COCO(str(tmp_path / "source.json"))
    scores = run_pycocotools(original, [d for d in detections if d["category_id"] != 91])
    assert scores.stats[1] == pytest.approx(1.0)
    assert read_predictions(tmp_path / "preds.json", truth) == tuple(answers)
    assert evaluate(truth, answers).metrics()["ap_50"] == pytest.approx(1.0)


def test_classes_without_an_id_get_the_next_free_numbers():
    truth = [with_ids(record(("b", BOX), ("a", FAR), ("b", FAR), ("c", BOX)), 5, 40, None, 3, None)]
    assert category_ids(truth) == {"a": 4, "b": 3, "c": 5}


def test_an_id_of_two_classes_or_of_two_images_is_refused(tmp_path):
    mixed = with_ids(record(("a", BOX), ("b", FAR)), 5, 1, 1)[1]
    (tmp_path / "a.jsonl").write_text(f"{mixed.as_json()}\n")
    with pytest.raises(DataError, match="category_id 1"):
        read_truth(RecordFile(tmp_path / "a.jsonl"))
    twice = [record(("a", BOX)), with_ids(record(("a", BOX)), 1, None)[1]]
    (tmp_path / "a.jsonl").write_text("".join(f"{line.as_json()}\n" for line in twice))
    with pytest.raises(DataError, match="image_id 1 "):
        read_truth(RecordFile(tmp_path / "a.jsonl"))


def test_an_image_that_could_not_be_read_is_noted_and_its_objects_are_missed():
    truth = [(1, record(("cat", BOX))), (2, record(("cat", BOX), image="b.png"))]
    answers = [answer(prediction("cat", BOX)), answer(image_id=2, image="b.png", text="", finish=NO_IMAGE)]
    report = evaluate(truth, answers)
    assert report.metrics()["recall_50"] == 0.5
    assert report.behaviour.rates["unreadable"].of == 1
    assert report.behaviour.rates["stopped"] == Rate(1, 2)
    assert any("b.png" in note for note in report.notes)


def test_unfinished_predictions_go_on_where_they_were_cut(tmp_path):
    request = {"model": "m", "prompt": "p"}
    unfinished = UnfinishedPredictions(tmp_path / "preds.json", request)
    unfinished.begin()
    unfinished.begin()  # no answer was lost
    unfinished.add(ANSWERS)
    with unfinished.path.open("ab") as file:
        file.write(b'{"image_id": 9, "ima')
    assert UnfinishedPredictions(tmp_path / "preds.json", request).resume() == list(ANSWERS)
    unfinished.keep(ANSWERS[:1])
    unfinished.add(ANSWERS[1:])
    assert unfinished.resume() == list(ANSWERS)
    unfinished.path.write_text("")
    with pytest.raises(DataError):
        unfinished.resume()
