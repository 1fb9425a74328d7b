"""YOLO text files to records."""

import pytest

from coordexp.data.images import image_size
from coordexp.data.importers import SourceError, Tally, read_yolo
from tests.unit.data.sources import collected, counts, picture, shapes


@pytest.fixture
def folder(tmp_path):
    picture(tmp_path / "images/a.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "data.yaml").write_text("names: {0: cat, 4: '\u72ac'}\n", encoding="utf-8")
    return tmp_path


def imported(folder, text=None, names=None, **rules):
    tally = Tally()
    if text is not None:
        (folder / "labels/a.txt").write_text(text)
    images = read_yolo(folder / "labels", folder / "images", names, tally, image_size)
    return collected(folder, images, tally, **rules), tally


def test_boxes_and_polygons_become_pixels(folder):
    records, tally = imported(folder, "4 0.5 0.5 0.25 0.5\n\n0 0.25 0.25 0.5 0.25 0.5 0.75\n")
    assert records[0].image == "images/a.png"
    assert [found.desc for found in records[0].objects] == ["\u72ac", "cat"]
    assert shapes(records) == [("bbox_2d", (24, 12, 40, 36)), ("poly", (16, 12, 32, 12, 32, 36))]
    assert tally.entries == ()


def test_polygons_become_boxes_when_asked(folder):
    records, _ = imported(folder, "0 0.25 0.25 0.5 0.25 0.5 0.75\n", geometry="box")
    assert shapes(records) == [("bbox_2d", (16, 12, 32, 36))]


def test_a_box_over_the_border_is_clipped_and_counted(folder):
    records, tally = imported(folder, "0 0.95 0.5 0.2 0.5\n")
    assert shapes(records) == [("bbox_2d", (54.4, 12, 64, 36))]
    assert counts(tally) == {"changed: object that leaves the image: clipped": 1}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("cat 0.5 0.5 0.2 0.2", "dropped: line that is not numbers"),
        ("0 nan 0.5 0.2 0.2", "dropped: line that is not numbers"),
        ("1 0.5 0.5 0.2 0.2", "dropped: object of a class without a name"),
        ("0.5 0.5 0.5 0.2 0.2", "dropped: object of a class without a name"),
        ("0 0.5 0.5 0.2 0.2 0.9", "dropped: line of 6 numbers: neither a box (5) nor a polygon (7, 9, ...)"),
        ("0 32 24 10 10", "dropped: line whose numbers are not in units of the image (0 to 1)"),
        ("0 0.5 0.5 0 0.2", "dropped: box whose width or height is not above 0"),
        ("0 0.1 0.1 0.2 0.2 0.3 0.3", "dropped: ring without area"),
    ],
)
def test_a_line_that_cannot_be_used_is_dropped_and_counted(folder, line, reason):
    records, tally = imported(folder, line)
    assert shapes(records) == []
    assert counts(tally)[reason] == 1


def test_labels_without_images_and_images_without_labels_are_counted(folder):
    (folder / "labels/other.txt").write_text("0 0.5 0.5 0.1 0.1")
    records, tally = imported(folder)
    assert len(records) == 1
    assert counts(tally)["dropped: file of labels without an image"] == 1
    assert counts(tally)["noted: image without a file of labels: no objects"] == 1


def test_a_picture_that_cannot_be_read_is_counted(folder):
    (folder / "images/b.png").write_text("no")
    records, tally = imported(folder, "0 0.5 0.5 0.1 0.1")
    assert len(records) == 1
    assert counts(tally) == {"dropped: image that cannot be read": 1}


def test_names_come_from_classes_txt_one_a_line(folder):
    (folder / "data.yaml").unlink()
    (folder / "labels/classes.txt").write_text("dog\ncat\n")
    records, tally = imported(folder, "1 0.5 0.5 0.1 0.1")
    assert records[0].objects[0].desc == "cat"
    assert tally.entries == ()


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("names: [yes, no]", r"names\[0\]: True is not a name[\s\S]*quote it"),
        ("names: {a: cat}", "no names"),
        ("nc: 2", "no names"),
        ("names: [", "cannot be read"),
    ],
)
def test_names_that_are_none_are_refused(folder, yaml, words):
    (folder / "data.yaml").write_text(yaml)
    with pytest.raises(SourceError, match=words):
        imported(folder, "0 0.5 0.5 0.1 0.1")


def test_names_are_looked_for_once_and_never_chosen_between(folder):
    (folder / "classes.txt").write_text("dog")
    with pytest.raises(SourceError, match="more than one file with the names"):
        imported(folder)
    assert imported(folder, names=folder / "classes.txt")
    (folder / "classes.txt").unlink()
    (folder / "data.yaml").unlink()
    with pytest.raises(SourceError, match="no file with the names"):
        imported(folder)


def test_two_images_for_one_file_of_labels_are_refused(folder):
    picture(folder / "images/a.jpg")
    with pytest.raises(SourceError, match=r"would share the labels a\.txt"):
        imported(folder)


def test_a_folder_without_images_is_refused(folder):
    (folder / "images/a.png").unlink()
    with pytest.raises(SourceError, match="no images"):
        imported(folder)


def test_a_photo_on_its_side_has_the_size_that_people_see(folder):
    from PIL import Image

    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (64, 48)).save(folder / "images/a.png", exif=turned)
    records, _ = imported(folder, "0 0.5 0.5 0.5 0.5")
    assert (records[0].width, records[0].height) == (48, 64)
