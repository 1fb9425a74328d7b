"""`coordexp data import` as a person meets it."""

import json
import os

import pytest

from coordexp.data import read_records
from tests.command import run
from tests.unit.data.sources import annotation, coco, write_image


def import_coco(source, out, *more, code=0):
    files = ["--images", source / "images", "--out", out]
    return run("data", "import", "coco", source / "coco.json", *files, *more, code=code)


@pytest.fixture
def source(tmp_path):
    write_image(tmp_path / "images/a.png")
    (tmp_path / "coco.json").write_text(json.dumps(coco([annotation(), annotation(2, iscrowd=1)])))
    return tmp_path


def test_the_counts_are_printed_and_the_file_can_be_trained_on(source):
    out = source / "deep/train.jsonl"
    result = import_coco(source, out)
    line = next(line for line in result.stdout.splitlines() if line.startswith("dropped"))
    assert line.split()[1] == "1"
    ((_, record),) = read_records(out)
    assert (out.parent / record.image).samefile(source / "images/a.png")
    run("data", "doctor", out)


def test_a_file_that_exists_is_not_overwritten(source):
    out = source / "train.jsonl"
    out.write_text("mine")
    assert "exists" in import_coco(source, out, code=1).output
    assert out.read_text() == "mine"


def test_the_message_names_the_source_and_is_short(source):
    """Also if it is about one image, and if what is wrong there is long."""
    images = [{"id": ["x" * 9000], "file_name": "a.png", "width": 64, "height": 48}]
    (source / "coco.json").write_text(json.dumps(coco([], images)))
    shown = import_coco(source, source / "train.jsonl", code=1).output
    assert str(source / "coco.json") in shown and len(shown) < 2000


def test_an_output_behind_a_link_finds_its_images(source):
    (source / "real/place").mkdir(parents=True)
    (source / "link").symlink_to(source / "real/place")
    out = source / "link/train.jsonl"
    import_coco(source, out)
    ((_, record),) = read_records(out)
    assert os.path.exists(out.parent / record.image)  # noqa: PTH110  (as the system follows it)


def test_an_import_stops_when_most_image_files_do_not_exist(source):
    entries = [{"id": k, "file_name": f"{name}.png", "width": 64, "height": 48} for k, name in enumerate("abc", 1)]
    out = source / "train.jsonl"

    (source / "coco.json").write_text(json.dumps(coco([annotation()], entries[:2])))
    import_coco(source, out)  # one of the two files exists
    out.unlink()

    (source / "coco.json").write_text(json.dumps(coco([annotation()], entries)))
    assert f"{source}/images/b.png" in import_coco(source, out, code=1).output
    assert not out.exists()

    import_coco(source, out, "--missing", "drop", code=1)
    write_image(source / "images/b.png")
    import_coco(source, out, "--missing", "drop")
    assert len(list(read_records(out))) == 2
    out.unlink()
    (source / "images/b.png").unlink()

    import_coco(source, out, "--missing", "keep")
    assert len(list(read_records(out))) == 3
