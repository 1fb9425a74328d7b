"""Images of folders and lists: which files are images, their order and their size."""

from pathlib import Path

import pytest
from PIL import Image

from coordexp.detect.predicting import read_images
from coordexp.errors import UserError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("z.PNG", "a.jpg", "b/c.webp", "b/a.bmp", ".hidden/x.png", "d.jpeg"):
        Image.new("RGB", (30, 20), "teal").save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    return tmp_path


def find_images(paths):
    return read_images(paths, None, None, None)


def names(source, folder):
    return [str(Path(record.image).relative_to(folder)) for _, record in source.images]


def test_a_folder_is_read_by_name_with_its_subfolders_and_other_files_are_listed(folder):
    files = find_images([folder])
    assert names(files, folder) == ["a.jpg", "d.jpeg", "z.PNG", "b/a.bmp", "b/c.webp"]
    assert {path.name: reason for path, reason in files.skipped} == {
        "notes.txt": "its name does not end in .jpg, .jpeg, .png, .webp, .bmp",
        "broken.png": "not a PNG, JPEG, WEBP, BMP, GIF or TIFF image",
    }
    assert {(record.width, record.height) for _, record in files.images} == {(30, 20)}


def test_files_keep_the_order_of_the_command_and_none_is_taken_twice(folder):
    files = find_images([folder / "z.PNG", folder / "a.jpg", folder])
    assert names(files, folder) == ["z.PNG", "a.jpg", "d.jpeg", "b/a.bmp", "b/c.webp"]


def test_the_size_is_that_after_the_rotation_of_the_exif_data(folder):
    photo = Image.new("RGB", (30, 20))
    exif = photo.getexif()
    exif[0x0112] = 8
    photo.save(folder / "turned.jpg", exif=exif)
    ((_, record),) = find_images([folder / "turned.jpg"]).images
    assert (record.width, record.height) == (20, 30)


def test_a_path_that_does_not_exist_and_a_folder_without_images_are_refused(folder):
    with pytest.raises(UserError, match="nowhere"):
        find_images([folder / "nowhere"])
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        find_images([folder / "empty"])
