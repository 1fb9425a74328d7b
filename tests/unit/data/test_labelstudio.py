"""Records and suggestions as tasks of Label Studio, and its JSON export as records."""

import json
from xml.etree import ElementTree

import pytest

from coordexp.data import Record, RecordObject
from coordexp.data.importers import ImportCounts, read_labelstudio
from coordexp.data.importers.labelstudio import labelling_config, to_task, write_tasks
from tests.unit.data.sources import count_reasons, list_shapes, write_and_read, write_image

CUP = RecordObject("cup", "bbox_2d", (64, 120, 320, 240), 3)
LEAF = RecordObject('a "leaf" & <more>', "poly", (0, 0, 64, 48, 128, 480))
RECORD = Record("images/a b.png", 640, 480, "pixel", (CUP, LEAF), 7)
DOG = (1, RecordObject("dog", "bbox_2d", (0, 0, 320, 480), 9), 0.75)


def region(kind="rectanglelabels", names=("cat",), original=(64, 48), **value):
    shape = {"x": 25, "y": 50, "width": 50, "height": 25, "rotation": 0} if kind == "rectanglelabels" else {}
    return {
        "type": kind,
        "original_width": original[0],
        "original_height": original[1],
        "value": shape | value | {kind: list(names)},
    }


def task(*regions, data=None, **annotation):
    return {
        "id": 5,
        "data": data or {"image": "/data/local-files/?d=a.png"},
        "annotations": [{"result": list(regions), "updated_at": "2026-01-02T00:00:00Z"} | annotation],
    }


def import_tasks(folder, *tasks, key="image"):
    (folder / "export.json").write_text(json.dumps(tasks))
    (folder / "images").mkdir(exist_ok=True)
    counts = ImportCounts()
    images = read_labelstudio(folder / "export.json", folder / "images", key, counts)
    return write_and_read(folder, images, counts), counts


def test_labels_are_an_annotation_and_suggestions_a_prediction_in_percent():
    result = to_task(RECORD, [DOG], "/data/local-files/?d=", "run 3")
    assert result["data"] == {
        "image": "/data/local-files/?d=images/a%20b.png",
        "coordexp": {"image": "images/a b.png", "width": 640, "height": 480, "image_id": 7},
        "category_ids": {"cup": 3, "dog": 9},
    }
    box, polygon = result["annotations"][0]["result"]
    assert box["type"] == "rectanglelabels" and box["from_name"] == "box" and box["to_name"] == "image"
    corner_and_size = {"x": 10, "y": 25, "width": 40, "height": 25, "rotation": 0}
    assert box["value"] == corner_and_size | {"rectanglelabels": ["cup"]}
    assert polygon["value"]["points"] == [[0, 0], [10, 10], [20, 100]]
    assert polygon["value"]["polygonlabels"] == [LEAF.desc]
    (prediction,) = result["predictions"]
    assert (prediction["model_version"], prediction["score"]) == ("run 3", 0.75)
    assert prediction["result"][:2] == [box, polygon]
    assert prediction["result"][2]["score"] == 0.75
    assert prediction["result"][2]["value"]["rectanglelabels"] == ["dog"]


def test_the_labelling_config_has_every_class_for_both_tools():
    tree = ElementTree.fromstring(labelling_config(["cup", LEAF.desc]))
    for name in ("RectangleLabels", "PolygonLabels"):
        assert [label.get("value") for label in tree.find(name)] == ["cup", LEAF.desc]


def test_what_was_exported_is_imported_without_loss(tmp_path):
    for name in ("a b.png", "c.png"):
        write_image(tmp_path / "images" / name, (640, 480))
    more = {"classes": ("cup",), "prompt": "Cup?", "exhaustive": ("leaf",), "meta": {"camera": 7}}
    other = Record("images/c.png", 640, 480, "pixel", (), **more)
    assert write_tasks(tmp_path / "tasks.json", [(RECORD, [DOG]), (other, [])]) == (2, 3)
    tally = ImportCounts()
    images = read_labelstudio(tmp_path / "tasks.json", tmp_path, "image", tally)
    assert write_and_read(tmp_path, images, tally) == [RECORD, other]
    assert count_reasons(tally) == {"noted: image without objects: kept": 1}


def test_of_several_annotations_the_latest_that_was_not_cancelled_counts(tmp_path):
    first = task(region(names=["new"]), updated_at="2026-01-05T00:00:00Z")
    first["annotations"] += task(region(names=["old"]), updated_at="2026-01-04T00:00:00Z")["annotations"]
    first["annotations"] += task(region(names=["skipped"]), was_cancelled=True)["annotations"]
    skipped = task(region(), was_cancelled=True)
    ((record,), counts) = import_tasks(tmp_path, first, skipped)
    assert [item.desc for item in record.objects] == ["new"]
    assert count_reasons(counts)["dropped: task without an annotation"] == 1


def test_a_rotated_rectangle_becomes_a_polygon(tmp_path):
    turned = region(x=50, y=0, width=25, height=50, rotation=90)  # 16 x 24 pixels, around (32, 0)
    (records, counts) = import_tasks(tmp_path, task(turned))
    assert list_shapes(records) == [("poly", (32, 0, 32, 16, 8, 16, 8, 0))]
    assert count_reasons(counts)["changed: rotated rectangle: kept as a polygon"] == 1


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"image": "/data/local-files/?d=deep/a%20b.png"}, "deep/a b.png"),
        ({"image": "/data/upload/3/0f3a9b1c-a.png"}, "a.png"),
        ({"image": "https://example.org/x/a%20b.png?token=1"}, "a b.png"),
        ({"image": "s3://bucket/folder/a.png"}, "a.png"),
        ({"image": "x", "coordexp": {"image": "deep/c.png", "width": 64, "height": 48}}, "deep/c.png"),
    ],
)
def test_the_file_of_an_image_comes_from_its_address(tmp_path, data, name):
    (records, _) = import_tasks(tmp_path, task(region(), data=data))
    assert records[0].image == f"images/{name}"


def test_only_records_with_suggestions_are_exported_if_asked_for(tmp_path):
    other = Record("images/c.png", 640, 480, "pixel", (), 8)
    tasks, _ = write_tasks(tmp_path / "tasks.json", [(other, []), (RECORD, [DOG])], only_suggested=True)
    assert tasks == len(json.loads((tmp_path / "tasks.json").read_text())) == 1
    assert write_tasks(tmp_path / "none.json", [(other, [])], only_suggested=True) == (0, 0)
    assert json.loads((tmp_path / "none.json").read_text()) == []
