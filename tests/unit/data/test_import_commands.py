"""`coordexp data import` as a person meets it."""

import json
import os

import pytest
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.data import read_records
from tests.unit.data.sources import annotation, coco, write_image


def run(*arguments):
    return CliRunner().invoke(app, ["data", "import", *map(str, arguments)])


@pytest.fixture
def source(tmp_path):
    write_image(tmp_path / "images/a.png")
    (tmp_path / "coco.json").write_text(json.dumps(coco([annotation(), annotation(2, iscrowd=1)])))
    return tmp_path


def test_the_counts_are_printed_and_the_file_can_be_trained_on(source):
    out = source / "deep/train.jsonl"
    result = run("coco", source / "coco.json", "--images", source / "images", "--out", out)
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith("dropped"))
    assert line.split()[1] == "1"
    ((_, record),) = read_records(out)
    assert (out.parent / record.image).samefile(source / "images/a.png")
    assert CliRunner().invoke(app, ["data", "doctor", str(out)]).exit_code == 0


def test_a_file_that_exists_is_not_overwritten(source):
    out = source / "train.jsonl"
    out.write_text("mine")
    result = run("coco", source / "coco.json", "--images", source / "images", "--out", out)
    assert result.exit_code == 1
    assert "exists" in result.output
    assert out.read_text() == "mine"


def test_the_message_names_the_source_and_is_short(source):
    """Also if it is about one image, and if what is wrong there is long."""
    images = [{"id": ["x" * 9000], "file_name": "a.png", "width": 64, "height": 48}]
    (source / "coco.json").write_text(json.dumps(coco([], images)))
    result = run("coco", source / "coco.json", "--images", source / "images", "--out", source / "train.jsonl")
    assert result.exit_code == 1
    assert str(source / "coco.json") in result.output and len(result.output) < 2000


def test_an_output_behind_a_link_finds_its_images(source):
    (source / "real/place").mkdir(parents=True)
    (source / "link").symlink_to(source / "real/place")
    out = source / "link/train.jsonl"
    run("coco", source / "coco.json", "--images", source / "images", "--out", out)
    ((_, record),) = read_records(out)
    assert os.path.exists(out.parent / record.image)  # noqa: PTH110  (as the system follows it)


def test_an_import_stops_when_most_image_files_do_not_exist(source):
    entries = [{"id": k, "file_name": f"{name}.png", "width": 64, "height": 48} for k, name in enumerate("abc", 1)]
    words = ["coco", source / "coco.json", "--images", source / "images", "--out", source / "train.jsonl"]

    (source / "coco.json").write_text(json.dumps(coco([annotation()], entries[:2])))
    result = run(*words)  # one of the two files exists
    assert result.exit_code == 0, result.output
    (source / "train.jsonl").unlink()

    (source / "coco.json").write_text(json.dumps(coco([annotation()], entries)))
    result = run(*words)
    assert result.exit_code == 1
    assert f"{source}/images/b.png" in result.output
    assert not (source / "train.jsonl").exists()

    result = run(*words, "--missing", "drop")
    assert result.exit_code == 1
    write_image(source / "images/b.png")
    result = run(*words, "--missing", "drop")
    assert result.exit_code == 0, result.output
    assert len(list(read_records(source / "train.jsonl"))) == 2
    (source / "train.jsonl").unlink()
    (source / "images/b.png").unlink()

    assert run(*words, "--missing", "keep").exit_code == 0
    assert len(list(read_records(source / "train.jsonl"))) == 3
