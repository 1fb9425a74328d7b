"""Images are opened in one place, in a fixed list of formats, and an unusable one is recognised by its header."""

import ast
import base64
import io
import json
import os
import struct
import subprocess
import zlib
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from coordexp.data.images import FORMATS, ImageError, read_image_facts, size_problem
from coordexp.errors import DataError
from coordexp.pages.cards import explain_missing_image, make_thumbnail
from coordexp.rollout.prompt import open_image, read_image
from coordexp.servers.answering import AllowedImages
from coordexp.servers.protocol import Refusal
from tests.command import run
from tests.source import SOURCE

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n0 0 64 64 rectfill\nshowpage\n%%EOF\n"


def write_record(folder: Path, image: str, size: tuple[int, int]) -> Path:
    objects = [{"desc": "cat", "bbox_2d": [0, 0, 900, 900]}]
    record = {"image": image, "width": size[0], "height": size[1], "space": "norm1000", "objects": objects}
    file = folder / "data.jsonl"
    file.write_text(json.dumps(record) + "\n")
    return file


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake `gs` on the PATH and return the file that it creates when anything starts it."""
    folder, trace = tmp_path / "bin", tmp_path / "gs-was-started"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {trace}\nexit 1\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # so that Pillow searches the PATH again
    return trace


GREY = [round(k * 255 / 63) for k in range(64)]  # the pixels of an image of 8 x 8


def grey_image(mode: str) -> Image.Image:
    """Return the same grey ramp in any mode of Pillow."""
    eight = Image.new("L", (8, 8))
    eight.putdata(GREY)
    if mode.startswith("I;16"):
        order = "big" if mode.endswith("B") else "little"
        return Image.frombytes(mode, (8, 8), b"".join((value * 257).to_bytes(2, order) for value in GREY))
    return eight.convert("RGB").convert(mode) if mode == "CMYK" else eight.convert(mode)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("L", "PNG"),
        ("LA", "PNG"),
        ("RGBA", "PNG"),
        ("P", "GIF"),
        ("I;16", "PNG"),
        ("I;16", "TIFF"),
        ("I;16B", "TIFF"),
        ("CMYK", "JPEG"),
        ("CMYK", "TIFF"),
    ],
)
def test_pixels_are_the_same_whatever_the_mode_of_the_file(tmp_path, mode, kind):
    """Pillow alone makes 16 bits of grey white."""
    file = tmp_path / f"a.{kind.lower()}"
    grey_image(mode).save(file, kind)
    for image in (read_image(file, "a"), Image.open(io.BytesIO(base64.b64decode(make_thumbnail(file)[22:])))):
        channels = [channel.tobytes() for channel in image.convert("RGB").split()]
        assert all(
            abs(value - expected) <= 3 for values in channels for value, expected in zip(values, GREY, strict=True)
        )


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_that_are_numbers_of_no_known_range_are_refused_by_the_doctor_and_by_training(tmp_path, mode):
    file = tmp_path / "a.tiff"
    grey_image("L").convert(mode).save(file)
    for read in (read_image_facts, partial(read_image, name="a")):
        with pytest.raises((ImageError, DataError), match="bits"):
            read(file)


@pytest.mark.parametrize(("tag", "value"), [(258, 12), (262, 0)])
def test_16_bits_of_another_range_are_refused(tmp_path, tag, value):
    """Pillow reads 12 bits, and 16 bits with white at zero, as if they were 16 bits with black at zero."""
    file = tmp_path / "a.tiff"
    grey_image("I;16").save(file)
    content = bytearray(file.read_bytes())
    place = content.index(tag.to_bytes(2, "little") + (3).to_bytes(2, "little")) + 8  # the value of a short tag
    content[place : place + 2] = value.to_bytes(2, "little")
    file.write_bytes(content)
    with pytest.raises(DataError, match="bits"):
        read_image(file, "a")


@pytest.mark.timeout(60)
def test_an_eps_is_an_unknown_format_everywhere_and_starts_no_ghostscript(tmp_path, ghostscript):
    file = tmp_path / "a.png"
    file.write_bytes(EPS)
    with pytest.raises((OSError, subprocess.SubprocessError)), Image.open(file) as image:
        image.load()  # Pillow alone starts Ghostscript
    assert ghostscript.exists()
    ghostscript.unlink()

    record = write_record(tmp_path, "a.png", (64, 64))
    problem = "not a PNG, JPEG, WEBP, BMP, GIF or TIFF image"
    for read in (read_image_facts, partial(read_image_facts, decode=True), make_thumbnail):
        with pytest.raises(ImageError, match=problem):
            read(file)
    with pytest.raises(DataError, match=problem):
        open_image(file, (64, 64))
    for source in (str(file), base64.b64encode(EPS).decode()):
        with pytest.raises(Refusal, match=problem):
            AllowedImages((tmp_path.resolve(),)).open(source)
    assert explain_missing_image(ImageError(problem)) == f"image not shown: {problem}"
    assert "image-unreadable" in run("data", "doctor", "--images", "decode", record, code=1).output
    assert not ghostscript.exists()


def test_only_one_module_opens_images():
    """Pillow tries every format that it knows unless it is given a list."""
    openers = []
    for file in (SOURCE / "coordexp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "open"
                and ast.unparse(node.value).endswith("Image")
            ):
                openers.append(file.name)
            if isinstance(node, ast.ImportFrom) and node.module == "PIL.Image":
                openers += [file.name for alias in node.names if alias.name == "open"]
    assert openers == ["images.py"]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_size_in_the_header_is_the_size_after_decoding(tmp_path, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = tmp_path / "a"
    Image.new("RGB", (40, 20)).save(file, kind, exif=exif)
    facts = read_image_facts(file)
    assert (facts.width, facts.height) == read_image(file, "a").size


def test_the_rule_of_the_aspect_ratio_is_that_of_the_image_processor():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    assert size_problem(2**14, 2**13) is None and size_problem(2**14, 2**13 + 1) is not None
    for short in (1, 2, 5):
        assert size_problem(short, 200 * short) is None and smart_resize(200 * short, short)
        assert size_problem(short, 200 * short + 1) is not None
        with pytest.raises(ValueError, match="aspect ratio"):
            smart_resize(200 * short + 1, short)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("images", ["head", "skip"])
def test_the_doctor_reports_an_image_that_training_would_refuse(tmp_path, images):
    Image.new("RGB", (1000, 2)).save(tmp_path / "a.png")
    record = write_record(tmp_path, "a.png", (1000, 2))
    report = json.loads(run("data", "doctor", "--json", "--images", images, record, code=1).stdout)
    (finding,) = [finding for finding in report["findings"] if finding["severity"] == "error"]
    assert finding["subject"] == "image-size"


def test_pixels_of_an_image_that_is_too_large_are_not_decoded(tmp_path, monkeypatch):
    Image.new("RGB", (50, 40)).save(tmp_path / "a.png")
    monkeypatch.setattr("coordexp.data.images.MOST_PIXELS", 1999)

    def load(self: object) -> None:
        raise AssertionError("the pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    for read in (partial(read_image_facts, decode=True), make_thumbnail, partial(read_image, name="a.png")):
        with pytest.raises((ImageError, DataError), match="1999"):
            read(tmp_path / "a.png")


def tiled_tiff(width: int, height: int, tile: tuple[int, int]) -> bytes:
    """Return a TIFF whose only tile is all zeros, compressed."""
    data = zlib.compress(bytes(tile[0] * tile[1]), 9)
    tags = [(256, width), (257, height), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile[0]), (323, tile[1])]
    tags += [(324, 8), (325, len(data))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)
    )


def test_a_tiff_whose_tiles_are_far_larger_than_its_image_is_not_decoded(tmp_path):
    file = tmp_path / "tiles.tif"
    file.write_bytes(tiled_tiff(64, 64, (8192, 8192)))
    with pytest.raises(ImageError, match="8192"):
        read_image_facts(file, decode=True)
    file.write_bytes(tiled_tiff(64, 64, (256, 256)))
    assert read_image_facts(file, decode=True).width == 64
