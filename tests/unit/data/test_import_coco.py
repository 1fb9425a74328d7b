"""COCO and LVIS to records, with every oddity handled, counted or refused."""

import numpy as np
import pytest
from pycocotools import mask as rle

from tests.unit.data.sources import (
    annotation,
    coco,
    count_reasons,
    import_coco,
    import_lvis,
    list_shapes,
    write_image,
)

BOX = ("bbox_2d", (8, 6, 24, 18))
SQUARE = [10, 10, 20, 10, 20, 20, 10, 20]
SMALL = [30, 30, 34, 30, 34, 34, 30, 34]


def mask_of(*rectangles):
    mask = np.zeros((48, 64), dtype=np.uint8)
    for x1, y1, x2, y2 in rectangles:
        mask[y1:y2, x1:x2] = 1
    return mask


def compress(mask):
    encoded = rle.encode(np.asfortranarray(mask))
    return {"size": list(encoded["size"]), "counts": encoded["counts"].decode()}


def test_boxes_come_in_source_order_with_paths_relative_to_the_file(tmp_path):
    write_image(tmp_path / "images/sub/a.png")
    images = [{"id": 7, "file_name": "sub/a.png", "width": 64, "height": 48}]
    annotations = [annotation(5, image_id=7, category_id=90), annotation(3, image_id=7, bbox=[0, 0, 64, 48])]
    categories = [{"id": 90, "name": "\u732b \U0001f642"}, {"id": 1, "name": "dog"}]
    records, counts = import_coco(tmp_path, coco(annotations, images, categories))
    assert [(r.image, r.width, r.height, r.space) for r in records] == [("images/sub/a.png", 64, 48, "pixel")]
    assert [item.desc for item in records[0].objects] == ["\u732b \U0001f642", "dog"]
    assert list_shapes(records) == [BOX, ("bbox_2d", (0, 0, 64, 48))]
    assert (counts.images, counts.objects, counts.entries) == (1, 2, ())


def two_parts_with_a_hole():
    mask = mask_of((10, 10, 20, 20), (30, 30, 33, 33))
    mask[15, 15] = 0
    return compress(mask)


POLYGON, WAVY = ("poly", tuple(SQUARE)), [10, 10, 15, 10.2, 20, 10, 20, 20, 10, 20]
MASK = compress(mask_of((10, 10, 20, 20)))
PLAIN_MASK = {"size": [48, 64], "counts": [10 * 48 + 10, *[10, 38] * 9, 10, 64 * 48 - 19 * 48 - 20]}
BOTH = {"segmentation": [SMALL, SQUARE]}
CROWD = {"iscrowd": 1, "segmentation": MASK}
PARTS = "changed: object of several parts:"


@pytest.mark.parametrize(
    ("changes", "rules", "shapes", "reasons"),
    [
        ({}, {}, [BOX], []),
        ({"segmentation": [SQUARE]}, {}, [POLYGON], []),
        ({"segmentation": [SQUARE]}, {"geometry": "box"}, [BOX], []),
        ({"bbox": None} | BOTH, {"geometry": "box"}, [("bbox_2d", (10, 10, 34, 34))], []),
        ({}, {"geometry": "poly"}, [], ["dropped: object without a usable polygon (--geometry poly)"]),
        (BOTH, {"multipart": "largest"}, [POLYGON], [f"{PARTS} the largest is taken"]),
        (BOTH, {"multipart": "box"}, [BOX], [f"{PARTS} its box is taken"]),
        (BOTH, {"multipart": "split"}, [("poly", tuple(SMALL)), POLYGON], [f"{PARTS} split into one object each"]),
        (BOTH, {"multipart": "drop"}, [], ["dropped: object of several parts (--multipart drop)"]),
        ({"segmentation": MASK}, {}, [POLYGON], []),
        ({"segmentation": PLAIN_MASK}, {}, [POLYGON], []),
        (
            {"segmentation": two_parts_with_a_hole()},
            {},
            [POLYGON],
            ["changed: mask with a hole: the hole is filled", f"{PARTS} the largest is taken"],
        ),
        ({"segmentation": [WAVY]}, {}, [("poly", tuple(WAVY))], []),
        (
            {"segmentation": [WAVY]},
            {"tolerance": 0.5},
            [POLYGON],
            ["changed: polygon drawn with fewer vertices (--tolerance)"],
        ),
        (CROWD, {}, [], ["dropped: crowd (--crowd drop)"]),
        (CROWD, {"crowd": "keep"}, [POLYGON], ["noted: crowd: kept as one object"]),
        (  # put outside by rounding
            {"bbox": [40.04, 30.02, 24.01, 18.03]},
            {"outside": "refuse"},
            [("bbox_2d", (40.04, 30.02, 64, 48))],
            ["changed: object put outside the image by rounding: moved onto the border"],
        ),
    ],
)
def test_an_annotation_becomes_the_shape_of_the_rules_and_every_change_is_counted(
    tmp_path, changes, rules, shapes, reasons
):
    write_image(tmp_path / "images/a.png")
    records, counts = import_coco(tmp_path, coco([annotation(**changes)]), **rules)
    assert list_shapes(records) == shapes
    noted = count_reasons(counts)
    assert [noted[reason] for reason in reasons] == [1] * len(reasons)
    assert {reason for reason in noted if "image without objects" not in reason} == set(reasons)


def test_images_without_objects_are_kept_or_dropped_and_counted(tmp_path):
    records, counts = import_coco(tmp_path, coco([]))
    assert len(records) == 1
    assert count_reasons(counts)["noted: image without objects: kept"] == 1
    records, counts = import_coco(tmp_path, coco([]), empty="drop")
    assert records == []
    assert count_reasons(counts)["dropped: image without objects (--empty drop)"] == 1


def test_a_polygon_is_cut_at_the_border_and_keeps_its_area_inside(tmp_path):
    document = coco([annotation(segmentation=[[60, 10, 70, 10, 70, 20, 60, 20]])])
    ((kind, coords),) = list_shapes(import_coco(tmp_path, document)[0])
    assert kind == "poly"
    assert set(zip(coords[::2], coords[1::2], strict=True)) == {(60, 10), (64, 10), (64, 20), (60, 20)}


def test_a_size_that_is_missing_is_read_from_the_image(tmp_path):
    write_image(tmp_path / "images/a.png", (100, 50))
    records, counts = import_coco(tmp_path, coco([annotation()], [{"id": 1, "file_name": "a.png"}]))
    assert (records[0].width, records[0].height) == (100, 50)
    assert count_reasons(counts) == {"changed: image without width and height: read from its file": 1}


def test_the_same_image_or_category_twice_is_counted(tmp_path):
    document = coco([annotation(), annotation(2, category_id=2)])
    document["images"] *= 2
    document["categories"] = [*document["categories"] * 2, {"id": 2, "name": "cat"}]
    records, counts = import_coco(tmp_path, document)
    assert len(records) == 1
    assert count_reasons(counts)["dropped: image that occurs twice"] == 1
    assert count_reasons(counts)["dropped: category that occurs twice"] == 1
    assert count_reasons(counts)["noted: category with the name of another: they become one"] == 1


SIZES = {"width": 64, "height": 48}


def test_lvis_names_its_images_by_their_address_and_its_lists_are_noted(tmp_path):
    write_image(tmp_path / "images/val2017/9.png")
    entry = {"id": 1, "coco_url": "http://images.cocodataset.org/val2017/9.png"} | SIZES
    entry |= {"neg_category_ids": [3], "not_exhaustive_category_ids": [1]}
    records, counts = import_lvis(tmp_path, coco([annotation(segmentation=[SQUARE])], [entry]))
    assert records[0].image == "images/val2017/9.png"
    assert list_shapes(records) == [("poly", tuple(SQUARE))]
    assert [reason[:30] for reason in count_reasons(counts)] == ["noted: image in which not all "]


def test_lvis_is_exhaustive_for_the_categories_that_it_lists_for_an_image(tmp_path):
    names = [{"id": number, "name": name} for number, name in enumerate(("cat", "dog", "cow", "hen"), start=1)]
    write_image(tmp_path / "images/val2017/9.png")
    entry = {"id": 1, "coco_url": "http://images.cocodataset.org/val2017/9.png"} | SIZES
    entry |= {"neg_category_ids": [3], "not_exhaustive_category_ids": [2]}
    annotations = [annotation(segmentation=[SQUARE]), annotation(id=2, category_id=2, segmentation=[SQUARE])]
    (record,), _ = import_lvis(tmp_path, coco(annotations, [entry], names), ask="classes")
    assert record.exhaustive == ("cat", "cow")
    assert record.classes == ("cat", "dog")


def test_coco_is_exhaustive_for_all_categories_but_those_of_a_crowd_that_is_dropped(tmp_path):
    names = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    crowd = annotation(id=2, iscrowd=1, segmentation=compress(mask_of((10, 10, 20, 20))))
    document = coco([annotation(category_id=2), crowd], categories=names)
    assert import_coco(tmp_path, document)[0][0].exhaustive == ("dog",)
    assert import_coco(tmp_path, document, crowd="keep")[0][0].exhaustive is None


def test_ids_of_images_and_categories_are_kept(tmp_path):
    images = [{"id": 4900, "file_name": "a.png", "width": 64, "height": 48}]
    annotations = [annotation(image_id=4900, category_id=7, segmentation=[SMALL, SQUARE])]
    document = coco(annotations, images, [{"id": 7, "name": "cat"}])
    (record,), _ = import_coco(tmp_path, document, multipart="split")
    assert record.image_id == 4900
    assert [item.category_id for item in record.objects] == [7, 7]


def test_ids_that_are_texts_are_not_kept_and_that_is_counted(tmp_path):
    images = [{"id": "x", "file_name": "a.png", "width": 64, "height": 48}]
    document = coco([annotation(image_id="x", category_id="c")], images, [{"id": "c", "name": "cat"}])
    (record,), counts = import_coco(tmp_path, document)
    assert (record.image_id, record.objects[0].category_id) == (None, None)
    assert count_reasons(counts)["noted: image id that is not a whole number from 0: it is not kept"] == 1
    assert count_reasons(counts)["noted: category id that is not a whole number from 0: it is not kept"] == 1


def test_a_category_with_a_dropped_object_is_not_exhaustive(tmp_path):
    names = [{"id": number, "name": name} for number, name in enumerate(("cat", "dog", "cow"), start=1)]
    write_image(tmp_path / "images/val2017/9.png")
    entry = {"id": 1, "coco_url": "http://images.cocodataset.org/val2017/9.png"} | SIZES
    annotations = [annotation(), annotation(id=2, category_id=2), annotation(id=3, bbox=[200, 200, 9, 9])]
    (record,), _ = import_lvis(tmp_path, coco(annotations, [entry | {"neg_category_ids": [3]}], names))
    assert record.exhaustive == ("dog", "cow")
