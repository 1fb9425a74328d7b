"""COCO results of other detectors have the numbers of pycocotools, and of our own predictions with answers."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from pycocotools import mask as rle
from pycocotools.coco import COCO

from coordexp.errors import DataError
from coordexp.evaluate import evaluate, evaluate_results, read_results, write_predictions
from coordexp.evaluate.behaviour import DEFINITIONS, NEED_TEXT
from tests.command import run
from tests.unit.evaluate.scenes import BOX, FAR, crowd, masks_alone, record, run_pycocotools
from tests.unit.evaluate.test_coco import twelve_numbers


def write(folder, truth, results):
    (folder / "val.jsonl").write_text("".join(f"{line.as_json()}\n" for _, line in truth))
    (folder / "results.json").write_text(json.dumps(results))


def detect(truth, seed, segmentation=None):
    """Return detections of a detector that knows pixels, not bins, and is often wrong."""
    rng = random.Random(seed)
    results = []
    for image_id, line in truth:
        for item in line.objects:
            coords = [value + rng.gauss(0, 4) for value in line.in_pixels(item)]
            xs, ys = coords[::2], coords[1::2]
            box = [min(xs), min(ys), max(xs) - min(xs) + 0.37, max(ys) - min(ys) + 0.21]
            category = (
                rng.choice([1, 2, 3, 4]) if rng.random() < 0.3 else {"cat": 1, "cup": 2, "dog": 3}[item.desc]
            )
            result = {"image_id": image_id, "category_id": category, "bbox": box, "score": rng.random(), "id": 5}
            results.append(result | ({} if segmentation is None else {"segmentation": segmentation(box, line)}))
    return results


def twelve_of_pycocotools(folder, results, kind="bbox"):
    run("data", "export", "coco", folder / "val.jsonl", "--out", folder / "truth.json")
    return run_pycocotools(COCO(folder / "truth.json"), results, kind).stats


@pytest.mark.parametrize("seed", range(3))
def test_the_numbers_of_another_detector_are_those_of_pycocotools_on_the_exported_data(tmp_path, seed):
    truth, _ = crowd(seed)
    results = detect(truth, seed)
    write(tmp_path, truth, results)
    report = evaluate_results(truth, read_results(tmp_path / "results.json", truth))
    expected = twelve_of_pycocotools(tmp_path, results)
    np.testing.assert_allclose(twelve_numbers(report.boxes), expected, atol=1e-6, rtol=0)
    assert 0.05 < expected[0] < 0.95


def to_mask(box, line):
    pixels = np.zeros((line.height, line.width), np.uint8, order="F")
    x, y, width, height = (max(0, round(value)) for value in box)
    pixels[y : y + height, x : x + width // 2 + 1] = 1
    mask = rle.encode(pixels)
    return {"size": mask["size"], "counts": mask["counts"].decode()}


def to_rings(box, line):
    x, y, width, height = box
    return [
        [x, y, x + width / 3, y, x, y + height],
        [x + width, y, x + width, y + height, x + width / 2, y + height],
    ]


def to_ring(box, line):
    return to_rings(box, line)[:1]  # whose box is smaller than the one that the detector states


@pytest.mark.parametrize("segmentation", [to_mask, to_rings, to_ring])
def test_masks_of_another_detector_give_the_numbers_of_pycocotools(tmp_path, segmentation):
    truth, _ = crowd(1, shapes=("poly",))
    results = detect(truth, 1, segmentation)
    write(tmp_path, truth, results)
    report = evaluate_results(truth, read_results(tmp_path / "results.json", truth))
    masks = masks_alone(json.loads((tmp_path / "results.json").read_text()), truth)
    expected = twelve_of_pycocotools(tmp_path, masks, "segm")
    np.testing.assert_allclose(twelve_numbers(report.masks), expected, atol=1e-6, rtol=0)
    (tmp_path / "truth.json").unlink()
    boxes = [{name: value for name, value in result.items() if name != "segmentation"} for result in results]
    expected = twelve_of_pycocotools(tmp_path, boxes)
    np.testing.assert_allclose(twelve_numbers(report.boxes), expected, atol=1e-6, rtol=0)


def test_our_own_predictions_without_their_answers_have_the_same_numbers_but_those_of_answers(tmp_path):
    truth, answers = crowd(2)
    write_predictions(tmp_path / "results.json", answers, truth)
    (tmp_path / "results.answers.jsonl").unlink()
    whole, alone = (
        evaluate(truth, answers),
        evaluate_results(truth, read_results(tmp_path / "results.json", truth)),
    )
    numbers, others = whole.metrics(), alone.metrics()
    assert {name for name in numbers if name not in others} == NEED_TEXT
    assert others == pytest.approx({name: numbers[name] for name in others})


def test_the_command_shows_what_is_not_available(tmp_path):
    truth, _ = crowd(0)
    write(tmp_path, truth, detect(truth, 0))
    files = ["--data", tmp_path / "val.jsonl", "--preds", tmp_path / "results.json"]
    result = run("evaluate", *files, "--page", tmp_path / "page.html", "--out", tmp_path / "report.json")
    for name in DEFINITIONS:
        (row,) = [line for line in result.stdout.splitlines() if line.startswith(name.replace("_", " "))]
        assert ("not available" in row) == (name in NEED_TEXT)

    assert json.loads((tmp_path / "report.json").read_text())["behaviour"]["truncated"]["rate"] is None
    page = (tmp_path / "page.html").read_text()
    assert page.count("not available") >= 4 and "Raw answer" not in page


def test_images_may_be_named_by_their_files_as_ultralytics_does(tmp_path):
    truth, _ = crowd(0)
    named = [(image_id, replace(line, image=f"images/scene-{image_id}.png")) for image_id, line in truth]
    results = detect(named, 0)
    write(tmp_path, named, [result | {"image_id": f"scene-{result['image_id']}"} for result in results])
    read = read_results(tmp_path / "results.json", named)
    assert [result.image_id for result in read] == [result["image_id"] for result in results]


def read_numbers(folder, files, numbers, own_ids=False):
    """Return the images of detections with these numbers, in data whose files are called by numbers too."""
    names = [replace(record(("cat", BOX)), image=f"images/{name:06}.png") for name in files]
    truth = [(k, replace(line, image_id=k if own_ids else None)) for k, line in enumerate(names, start=1)]
    entry = {"category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}
    write(folder, truth, [entry | {"image_id": number} for number in numbers])
    return [result.image_id for result in read_results(folder / "results.json", truth)]


def test_numbers_are_names_of_files_if_nothing_else_can_be_meant(tmp_path):
    assert read_numbers(tmp_path, files=(12, 2, 30), numbers=(12, 30)) == [1, 3]  # as Ultralytics writes them
    assert read_numbers(tmp_path, files=(12, 50, 30), numbers=(1, 3)) == [1, 3]  # of lines
    assert read_numbers(tmp_path, files=(1, 2, 3), numbers=(1, 3)) == [1, 3]  # both are the same
    assert read_numbers(tmp_path, files=(2, 1, 30), numbers=(1, 2), own_ids=True) == [1, 2]
    with pytest.raises(DataError, match="image_id 1 "):
        read_numbers(tmp_path, files=(2, 1, 30), numbers=(1, 2))


def test_detections_of_classes_that_a_record_does_not_ask_for_are_left_out(tmp_path):
    asked = replace(record(("cat", BOX), ("dog", FAR)), classes=("cat",))
    results = [{"image_id": 1, "category_id": k, "bbox": [100, 100, 200, 200], "score": 0.5} for k in (1, 2)]
    write(tmp_path, [(1, asked)], results)
    report = evaluate_results([(1, asked)], read_results(tmp_path / "results.json", [(1, asked)]))
    assert (report.with_class.at(0.5).predicted, report.with_class.at(0.5).true) == (1, 1)
