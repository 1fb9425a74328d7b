"""Records as COCO and YOLO: what is written can be read by pycocotools, and imported again."""

import json
import random
from pathlib import Path

import pytest
import yaml
from pycocotools.coco import COCO

from coordexp.data import Record, RecordObject, read_records
from tests.command import run
from tests.unit.data.sources import write_image
from tests.unit.evaluate.scenes import run_pycocotools


def write_records(path, records):
    path.write_text("".join(f"{record.as_json()}\n" for record in records))
    return path


def crowd(folder, ids=True, space="pixel"):
    """Return records with boxes and polygons, in two folders of images, with and without objects."""
    rng = random.Random(3)
    records = []
    for k in range(12):
        name = f"images/{'ab'[k % 2]}/{k}.png"
        write_image(folder / name, (640, 480))
        objects = []
        for _ in range(k % 5):
            x, y = rng.uniform(0, 500), rng.uniform(0, 300)
            box = (x, y, x + rng.uniform(5, 130), y + rng.uniform(5, 130))
            ring = (box[0], box[1], box[2], box[1] + 3, box[0] + 4, box[3])
            kind, coords = rng.choice([("bbox_2d", box), ("poly", ring)])
            desc = rng.choice(["cat", "dog", 'red "cup" é'])
            coords = tuple(round(value, 3) for value in coords)
            objects.append(RecordObject(desc, kind, coords, {"cat": 7, "dog": 3}.get(desc, 90) if ids else None))
        records.append(Record(name, 640, 480, space, tuple(objects), 1000 + 7 * k if ids else None))
    return records


def export_coco(folder, records, *more):
    run(
        "data",
        "export",
        "coco",
        write_records(folder / "val.jsonl", records),
        "--out",
        folder / "coco.json",
        *more,
    )
    return json.loads((folder / "coco.json").read_text())


def test_a_coco_export_is_imported_as_the_same_records(tmp_path):
    records = crowd(tmp_path)
    document = export_coco(tmp_path, records)
    assert [image["id"] for image in document["images"]] == [record.image_id for record in records]
    assert {entry["name"]: entry["id"] for entry in document["categories"]} == {
        "cat": 7,
        "dog": 3,
        'red "cup" é': 90,
    }
    run("data", "import", "coco", tmp_path / "coco.json", "--images", tmp_path, "--out", tmp_path / "again.jsonl")
    assert [record for _, record in read_records(tmp_path / "again.jsonl")] == records


def test_pycocotools_finds_perfect_detections_perfect(tmp_path):
    document = export_coco(tmp_path, crowd(tmp_path))
    truth = COCO(tmp_path / "coco.json")
    results = [{**entry, "score": 0.5} for entry in document["annotations"]]
    polygons = [entry for entry in document["annotations"] if entry["segmentation"]]
    assert run_pycocotools(truth, results).stats[0] == pytest.approx(1.0)
    assert polygons and all(truth.annToMask(entry).sum() == entry["area"] for entry in polygons)
    assert all(entry["area"] > 0 and entry["iscrowd"] == 0 for entry in document["annotations"])


def test_image_names_are_relative_to_the_folder_of_images(tmp_path):
    records = crowd(tmp_path)
    document = export_coco(tmp_path, records, "--images", tmp_path / "images")
    assert document["images"][0]["file_name"] == "a/0.png"
    (tmp_path / "coco.json").unlink()
    words = ("--out", tmp_path / "coco.json", "--images", tmp_path / "images/a")
    result = run("data", "export", "coco", tmp_path / "val.jsonl", *words, code=1)
    assert "val.jsonl:2: " in result.output
    assert not (tmp_path / "coco.json").exists()


def test_two_records_with_one_image_id_are_refused(tmp_path):
    records = crowd(tmp_path)
    file = write_records(tmp_path / "val.jsonl", [*records, records[0]])
    result = run("data", "export", "coco", file, "--out", tmp_path / "coco.json", code=1)
    assert "val.jsonl:13: " in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "val.jsonl"]


def test_a_yolo_export_is_imported_as_the_same_shapes(tmp_path):
    records = crowd(tmp_path)
    file = write_records(tmp_path / "val.jsonl", records)
    run("data", "export", "yolo", file, "--out", tmp_path / "yolo", "--images", tmp_path / "images")
    facts = yaml.safe_load((tmp_path / "yolo/data.yaml").read_text())
    assert facts["names"] == {0: "dog", 1: "cat", 2: 'red "cup" é'}  # in the order of their COCO numbers
    assert (tmp_path / "yolo/images/a/0.png").read_bytes() == (tmp_path / "images/a/0.png").read_bytes()
    labels, images = tmp_path / "yolo/labels", tmp_path / "yolo/images"
    run("data", "import", "yolo", labels, "--images", images, "--out", tmp_path / "again.jsonl")
    again = {record.image.rpartition("/")[2]: record for _, record in read_records(tmp_path / "again.jsonl")}
    assert len(again) == len(records)
    for record in records:
        twin = again[record.image.rpartition("/")[2]]
        assert [(item.desc, item.kind) for item in twin.objects] == [
            (item.desc, item.kind) for item in record.objects
        ]
        for item, other in zip(record.objects, twin.objects, strict=True):
            assert other.coords == pytest.approx(item.coords, abs=0.0011)


def test_two_splits_have_one_list_of_classes_and_come_back_apart(tmp_path):
    records = crowd(tmp_path)
    files = [write_records(tmp_path / "a.jsonl", records[:9]), write_records(tmp_path / "b.jsonl", records[8:])]
    run("data", "export", "yolo", files[0], "--val", files[1], "--out", tmp_path / "yolo")
    for split, part in (("train", records[:9]), ("val", records[8:])):
        again = tmp_path / f"{split}.jsonl"
        run("data", "import", "yolo", tmp_path / "yolo/data.yaml", "--split", split, "--out", again)
        found = {record.image.rpartition("/")[2]: record for _, record in read_records(again)}
        descs = {record.image.rpartition("/")[2]: [item.desc for item in record.objects] for record in part}
        assert {name: [item.desc for item in record.objects] for name, record in found.items()} == descs


def test_images_that_would_share_a_file_of_labels_are_refused(tmp_path):
    records = crowd(tmp_path)
    file = write_records(tmp_path / "val.jsonl", [*records, records[3]])
    result = run("data", "export", "yolo", file, "--out", tmp_path / "yolo", code=1)
    assert "b/3.txt" in result.output


def find_labels(image):
    """Return where Ultralytics looks for the labels of an image (`img2label_paths`)."""
    return Path("/labels/".join(str(image).rsplit("/images/", 1)).rsplit(".", 1)[0] + ".txt")


def test_ultralytics_finds_the_labels_of_every_image_in_a_folder_called_images(tmp_path):
    file = write_records(tmp_path / "val.jsonl", crowd(tmp_path))  # its images are in images/a and images/b
    run("data", "export", "yolo", file, "--out", tmp_path / "yolo")
    links = list((tmp_path / "yolo/images").rglob("*.png"))
    assert len(links) == 12
    assert {find_labels(link) for link in links} == set((tmp_path / "yolo/labels").rglob("*.txt"))


def test_yolo_labels_are_clipped_to_the_image(tmp_path):
    over = Record("a.png", 64, 48, "pixel", (RecordObject("cat", "bbox_2d", (-0.5, 12.0, 64.5, 48.4)),))
    run("data", "export", "yolo", write_records(tmp_path / "val.jsonl", [over]), "--out", tmp_path / "yolo")
    assert (tmp_path / "yolo/labels/a.txt").read_text().split() == [
        "0", "0.500000000", "0.625000000", "1.000000000", "0.750000000"
    ]  # fmt: skip
