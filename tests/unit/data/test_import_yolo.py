"""YOLO text files to records."""

import pytest

from coordexp.data import RecordFile
from coordexp.data.importers import ImportCounts, find_split, read_yolo
from coordexp.errors import DataError
from tests.command import run
from tests.unit.data.sources import count_reasons, list_shapes, write_and_read, write_image


@pytest.fixture
def folder(tmp_path):
    write_image(tmp_path / "images/a.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "data.yaml").write_text("names: {0: cat, 4: '\u72ac'}\n", encoding="utf-8")
    return tmp_path


def import_files(folder, text=None, names=None, **rules):
    counts = ImportCounts()
    if text is not None:
        (folder / "labels/a.txt").write_text(text)
    images = read_yolo(folder / "labels", folder / "images", names, counts)
    return write_and_read(folder, images, counts, **rules), counts


def test_boxes_and_polygons_become_pixels(folder):
    records, counts = import_files(folder, "4 0.5 0.5 0.25 0.5\n\n0 0.25 0.25 0.5 0.25 0.5 0.75\n")
    assert records[0].image == "images/a.png"
    assert [item.desc for item in records[0].objects] == ["\u72ac", "cat"]
    assert list_shapes(records) == [("bbox_2d", (24, 12, 40, 36)), ("poly", (16, 12, 32, 12, 32, 36))]
    assert counts.entries == ()


def test_labels_without_images_and_images_without_labels_are_counted(folder):
    (folder / "labels/other.txt").write_text("0 0.5 0.5 0.1 0.1")
    records, counts = import_files(folder)
    assert len(records) == 1
    assert count_reasons(counts)["dropped: file of labels without an image"] == 1
    assert count_reasons(counts)["noted: image without a file of labels: no objects"] == 1


def test_names_come_from_classes_txt_one_per_line(folder):
    (folder / "data.yaml").unlink()
    (folder / "labels/classes.txt").write_text("dog\ncat\n")
    records, counts = import_files(folder, "1 0.5 0.5 0.1 0.1")
    assert records[0].objects[0].desc == "cat"
    assert counts.entries == ()


def test_more_than_one_file_of_names_or_none_is_refused(folder):
    (folder / "classes.txt").write_text("dog")
    with pytest.raises(DataError, match=r"classes\.txt"):
        import_files(folder)
    assert import_files(folder, names=folder / "classes.txt")
    (folder / "classes.txt").unlink()
    (folder / "data.yaml").unlink()
    with pytest.raises(DataError):
        import_files(folder)


def test_two_images_for_one_file_of_labels_are_refused(folder):
    write_image(folder / "images/a.jpg")
    with pytest.raises(DataError, match=r"a\.txt"):
        import_files(folder)


def test_a_photo_on_its_side_has_the_size_that_people_see(folder):
    from PIL import Image

    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (64, 48)).save(folder / "images/a.png", exif=turned)
    records, _ = import_files(folder, "0 0.5 0.5 0.5 0.5")
    assert (records[0].width, records[0].height) == (48, 64)


@pytest.mark.parametrize(
    ("images", "content"),
    [
        ("images/val", "path: .\nval: images/val"),
        ("images/val", "val: ./images/val/"),
        ("images", "val: images"),
        ("valid/images", "val: ../valid/images"),  # as Roboflow writes it
        ("valid/images", "val: valid"),
        ("sets/images/images2/val", "path: sets\nval: images/images2/val"),
    ],
)
def test_the_folders_of_a_split_are_found_as_ultralytics_finds_them(tmp_path, images, content):
    labels = "labels".join(f"{images}/".rsplit("images/", 1)).rstrip("/") if images.endswith("images") else None
    labels = labels or images.replace("images/", "labels/", 1)
    write_image(tmp_path / images / "a.png")
    (tmp_path / labels).mkdir(parents=True)
    (tmp_path / labels / "a.txt").write_text("0 0.5 0.5 0.25 0.5\n")
    file = tmp_path / "data.yaml"
    file.write_text(f"names: [cat]\ntrain: nowhere\n{content}\n")
    assert [path.resolve() for path in find_split(file, "val")] == [tmp_path / labels, tmp_path / images]
    out = tmp_path / "val.jsonl"
    run("data", "import", "yolo", file, "--split", "val", "--out", out)
    assert RecordFile(out)[0].objects[0].desc == "cat"


def test_a_folder_of_labels_needs_images_and_data_yaml_does_without(folder):
    for words in (
        ["labels"],
        ["data.yaml", "--images", "images"],
        ["labels", "--images", "images", "--split", "val"],
    ):
        paths = [word if word.startswith("--") or word == "val" else str(folder / word) for word in words]
        result = run("data", "import", "yolo", *paths, "--out", folder / "new.jsonl", code=1)
        assert "--images" in result.output
