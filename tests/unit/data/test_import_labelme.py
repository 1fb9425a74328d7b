"""labelme JSON files to records."""

import json

import pytest

from coordexp.data.importers import ImportCounts, read_labelme
from coordexp.errors import DataError
from tests.unit.data.sources import count_reasons, list_shapes, write_and_read, write_image


def shape(kind, points, label="cat", **more):
    return {"label": label, "points": points, "shape_type": kind, **more}


def import_files(folder, drawn, images=None, rules=None, **changes):
    document = {"imagePath": "a.png", "imageWidth": 64, "imageHeight": 48, "imageData": None, "shapes": drawn}
    (folder / "labels").mkdir(exist_ok=True)
    (folder / "labels/a.json").write_text(json.dumps(document | changes))
    counts = ImportCounts()
    return write_and_read(folder, read_labelme(folder / "labels", images, counts), counts, **rules or {}), counts


def test_rectangles_and_polygons_are_kept_in_order(tmp_path):
    write_image(tmp_path / "labels/a.png")
    drawn = [
        shape("rectangle", [[40, 30], [10, 20]], "dog"),
        shape("polygon", [[1, 1], [9, 1], [9, 9]]),
        {"label": "old", "points": [[1, 1], [9, 1], [9, 9]]},
    ]
    records, counts = import_files(tmp_path, drawn)
    assert records[0].image == "labels/a.png"
    assert [item.desc for item in records[0].objects] == ["dog", "cat", "old"]
    assert list_shapes(records)[:2] == [("bbox_2d", (10, 20, 40, 30)), ("poly", (1, 1, 9, 1, 9, 9))]
    assert counts.entries == ()


def test_a_circle_is_a_polygon_of_32_points_at_its_radius(tmp_path):
    ((kind, coords),) = list_shapes(import_files(tmp_path, [shape("circle", [[30, 20], [40, 20]])])[0])
    assert kind == "poly"
    assert len(coords) == 64
    radii = [((x - 30) ** 2 + (y - 20) ** 2) ** 0.5 for x, y in zip(coords[::2], coords[1::2], strict=True)]
    assert radii == pytest.approx([10] * 32, abs=0.001)


def test_shapes_of_one_group_are_parts_of_one_object(tmp_path):
    parts = [
        shape("polygon", [[1, 1], [9, 1], [9, 9]], group_id=3),
        shape("rectangle", [[20, 20], [40, 40]], group_id=3),
    ]
    records, counts = import_files(tmp_path, [*parts, shape("rectangle", [[0, 0], [5, 5]], "dog", group_id=3)])
    assert list_shapes(records) == [("poly", (20, 20, 40, 20, 40, 40, 20, 40)), ("bbox_2d", (0, 0, 5, 5))]
    assert count_reasons(counts)["changed: object of several parts: the largest is taken"] == 1


def test_images_in_another_folder_are_located_by_their_name(tmp_path):
    write_image(tmp_path / "images/a.png")
    records, _ = import_files(tmp_path, [], images=tmp_path / "images", imagePath="..\\photos\\a.png")
    assert records[0].image == "images/a.png"


def test_files_of_others_are_counted_and_a_folder_without_any_is_refused(tmp_path):
    (tmp_path / "labels").mkdir()
    with pytest.raises(DataError):
        list(read_labelme(tmp_path / "labels", None, ImportCounts()))
    (tmp_path / "labels/settings.json").write_text("{}")
    (tmp_path / "labels/torn.json").write_text('{"imagePath":')
    records, counts = import_files(tmp_path, [])
    assert len(records) == 1
    assert count_reasons(counts)["dropped: file that is not one of labelme's"] == 2
