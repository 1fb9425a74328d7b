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


def test_a_polygon_is_taken_where_there_is_one_unless_boxes_are_chosen(tmp_path):
    document = coco([annotation(segmentation=[SQUARE]), annotation(2)])
    write_image(tmp_path / "images/a.png")
    assert list_shapes(import_coco(tmp_path, document)[0]) == [("poly", tuple(SQUARE)), BOX]
    assert list_shapes(import_coco(tmp_path, document, geometry="box")[0]) == [BOX, BOX]
    records, counts = import_coco(tmp_path, document, geometry="poly")
    assert list_shapes(records) == [("poly", tuple(SQUARE))]
    assert count_reasons(counts) == {"dropped: object without a usable polygon (--geometry poly)": 1}


def test_a_box_is_made_from_the_polygon_when_there_is_none(tmp_path):
    document = coco([annotation(bbox=None, segmentation=[SQUARE, SMALL])])
    assert list_shapes(import_coco(tmp_path, document, geometry="box")[0]) == [("bbox_2d", (10, 10, 34, 34))]


@pytest.mark.parametrize(
    ("multipart", "expected", "reason"),
    [
        ("largest", [("poly", tuple(SQUARE))], "changed: object of several parts: the largest is taken"),
        ("box", [BOX], "changed: object of several parts: its box is taken"),
        (
            "split",
            [("poly", tuple(SMALL)), ("poly", tuple(SQUARE))],
            "changed: object of several parts: split into one object each",
        ),
        ("drop", [], "dropped: object of several parts (--multipart drop)"),
    ],
)
def test_an_object_of_several_parts_goes_by_the_rule(tmp_path, multipart, expected, reason):
    write_image(tmp_path / "images/a.png")
    document = coco([annotation(segmentation=[SMALL, SQUARE])])
    records, counts = import_coco(tmp_path, document, multipart=multipart)
    assert list_shapes(records) == expected
    assert count_reasons(counts)[reason] == 1


@pytest.mark.parametrize("form", ["compressed", "plain"])
def test_a_mask_becomes_its_outline(tmp_path, form):
    mask = mask_of((10, 10, 20, 20))
    plain = {"size": [48, 64], "counts": [10 * 48 + 10, *[10, 38] * 9, 10, 64 * 48 - 19 * 48 - 20]}
    segmentation = compress(mask) if form == "compressed" else plain
    records, counts = import_coco(tmp_path, coco([annotation(segmentation=segmentation)]))
    assert list_shapes(records) == [("poly", (10, 10, 20, 10, 20, 20, 10, 20))]
    assert [entry.effect for entry in counts.entries] == ["noted"]  # the image file does not exist


def test_a_tolerance_takes_vertices_away_and_is_counted(tmp_path):
    document = coco([annotation(segmentation=[[10, 10, 15, 10.2, 20, 10, 20, 20, 10, 20]])])
    assert len(list_shapes(import_coco(tmp_path, document)[0])[0][1]) == 10
    records, counts = import_coco(tmp_path, document, tolerance=0.5)
    assert list_shapes(records) == [("poly", tuple(SQUARE))]
    assert count_reasons(counts)["changed: polygon drawn with fewer vertices (--tolerance)"] == 1


def test_a_mask_of_two_parts_with_a_hole_is_counted_for_both(tmp_path):
    mask = mask_of((10, 10, 20, 20), (30, 30, 33, 33))
    mask[15, 15] = 0
    records, counts = import_coco(tmp_path, coco([annotation(segmentation=compress(mask))]))
    assert list_shapes(records) == [("poly", (10, 10, 20, 10, 20, 20, 10, 20))]
    assert count_reasons(counts)["changed: mask with a hole: the hole is filled"] == 1
    assert count_reasons(counts)["changed: object of several parts: the largest is taken"] == 1


def test_crowds_are_dropped_or_kept_and_counted(tmp_path):
    document = coco([annotation(iscrowd=1, segmentation=compress(mask_of((10, 10, 20, 20))))])
    records, counts = import_coco(tmp_path, document)
    assert list_shapes(records) == []
    assert count_reasons(counts)["dropped: crowd (--crowd drop)"] == 1
    records, counts = import_coco(tmp_path, document, crowd="keep")
    assert len(list_shapes(records)) == 1
    assert count_reasons(counts)["noted: crowd: kept as one object"] == 1


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


def test_a_box_put_outside_by_rounding_is_moved_onto_the_border_whatever_the_rule(tmp_path):
    document = coco([annotation(bbox=[40.04, 30.02, 24.01, 18.03])])
    records, counts = import_coco(tmp_path, document, outside="refuse")
    assert list_shapes(records) == [("bbox_2d", (40.04, 30.02, 64, 48))]
    assert count_reasons(counts)["changed: object put outside the image by rounding: moved onto the border"] == 1


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
