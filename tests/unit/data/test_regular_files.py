"""A pipe, a device or a folder in place of an image or of records ends every reader at once, with a reason."""

import json
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from coordexp.data import RecordFile
from coordexp.data.doctor.clean import clean
from coordexp.data.images import read_image_facts
from coordexp.data.records import read_records
from coordexp.data.split import split_records
from coordexp.detect.predicting import read_images
from coordexp.errors import DataError, UserError
from coordexp.pages.cards import make_thumbnail
from coordexp.pages.records import view_records
from coordexp.rollout.backend import ImageRef
from coordexp.rollout.prompt import load_image
from coordexp.servers.answering import AllowedImages
from coordexp.servers.protocol import Refusal
from tests.command import run

REASON = "not a regular file"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Let a reader without an end fail soon: this process may take one more gigabyte."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(params=["pipe", "device", "folder"])
def odd(request, tmp_path) -> Callable[[str], Path]:
    """Return a function that makes something which is not a regular file."""

    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        return path

    return make


def write_record(folder: Path, image: str) -> Path:
    objects = [{"desc": "cat", "bbox_2d": [0, 0, 9, 9]}]
    record = {"image": image, "width": 64, "height": 64, "space": "pixel", "objects": objects}
    file = folder / "data.jsonl"
    file.write_text(json.dumps(record) + "\n")
    return file


@pytest.mark.parametrize("images", ["head", "decode"])
def test_the_doctor_reports_an_image_that_is_no_file_and_ends(tmp_path, odd, images):
    odd("a.png")
    result = run("data", "doctor", "--json", "--images", images, write_record(tmp_path, "a.png"), code=1)
    findings = {finding["subject"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings.keys() == {"image-unreadable"}
    assert findings["image-unreadable"]["places"][0]["detail"] == f"'a.png': {REASON}"


def test_training_prediction_servers_and_pages_refuse_an_image_that_is_no_file(tmp_path, odd):
    file = odd("a.png")
    with pytest.raises(DataError, match=REASON):
        load_image(ImageRef(str(file), 64, 64))
    with pytest.raises(Refusal, match=REASON):
        AllowedImages((tmp_path, Path("/dev"))).open(str(file))
    for read in (read_image_facts, make_thumbnail):
        with pytest.raises(OSError, match=REASON):
            read(file)
    (card,) = view_records(write_record(tmp_path, "a.png"), 1)
    assert [problem.code for problem in card.problems] == ["image-unreadable"] and card.image is None


def test_prediction_skips_what_is_no_file_in_a_folder_of_images(tmp_path, odd):
    file = odd("images/a.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "images/b.png")
    files = read_images([tmp_path / "images"], None, None, None)
    assert [Path(record.image).name for _, record in files.images] == ["b.png"]
    assert files.skipped == (() if file.is_dir() else ((file, REASON),))


def test_records_are_not_read_from_what_is_no_file(tmp_path, odd):
    file, other = odd("data.jsonl"), tmp_path / "other.jsonl"
    readers = [
        RecordFile,
        lambda path: list(read_records(path)),
        lambda path: list(view_records(path, 1)),
        partial(clean, target=other),
        lambda path: split_records(path, other, tmp_path / "more.jsonl", 0.5, None, 0, print),
    ]
    for read in readers:
        with pytest.raises(UserError, match=REASON) as raised:
            read(file)
        assert str(file) in str(raised.value) and raised.value.fix
    assert not other.exists()
    if not file.is_dir():  # which the parser of the command line refuses
        assert f"{file}: {REASON}" in " ".join(run("data", "doctor", file, code=1).output.split())


@pytest.mark.parametrize("kind", ["coco", "lvis", "labelstudio"])
def test_annotations_are_not_read_from_what_is_no_file(tmp_path, odd, kind):
    file = odd("annotations.json")
    words = ["data", "import", kind, file, "--images", tmp_path, "--out", tmp_path / "new.jsonl"]
    assert file.is_dir() or REASON in run(*words, code=1).output


def test_labels_and_names_are_not_read_from_what_is_no_file(tmp_path, odd):
    odd("labels/a.json")
    labels, names = tmp_path / "labels", odd("names.yaml")
    output = run("data", "import", "labelme", labels, "--out", tmp_path / "new.jsonl").output
    assert "dropped" in output and "0 images" in output
    Image.new("RGB", (64, 64)).save(labels / "a.png")
    yolo = ("yolo", labels, "--images", labels, "--names", names)
    assert (
        names.is_dir() or REASON in run("data", "import", *yolo, "--out", tmp_path / "more.jsonl", code=1).output
    )
