"""Addresses of images: files and parts of files; a broken image, and storage that does not answer."""

import base64
import errno
import json
import os
import resource
from pathlib import Path

import pytest
from PIL import Image

from coordexp.data import RecordFile
from coordexp.data.addresses import ImageError, move_address, parse_address
from coordexp.data.doctor import examine
from coordexp.data.doctor.clean import clean
from coordexp.data.images import read_image_facts
from coordexp.data.sets import locate_image
from coordexp.errors import DataError, StoreError
from coordexp.pages.records import view_records
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.prompt import load_image, open_image
from coordexp.servers.answering import AllowedImages
from coordexp.servers.asking import infer_payload
from tests.command import run
from tests.unit.data.addressed import pack_tar, pack_tsv, rewrite
from tests.unit.data.planted import HEIGHT, WIDTH, write_clean


@pytest.fixture
def planted(tmp_path):
    return write_clean(tmp_path)


@pytest.mark.parametrize("pack", [pack_tar, pack_tsv])
def test_a_part_of_a_file_is_the_image_that_was_put_there(planted, pack):
    file = planted.write()
    records = RecordFile(file)
    addressed = RecordFile(rewrite(file, "packed.jsonl", pack(file).__getitem__))
    assert len(addressed) == len(records) == 40
    for k in range(0, 40, 13):
        place, original = addressed.image_address(addressed[k]), records.image_address(records[k])
        assert read_image_facts(place, decode=True) == read_image_facts(original)
        assert open_image(place, (WIDTH, HEIGHT)).tobytes() == open_image(original, (WIDTH, HEIGHT)).tobytes()
        assert locate_image([records, addressed], place) == f"{addressed}:{k + 1}"
    assert examine(addressed.path, look=read_image_facts).findings == examine(file, look=read_image_facts).findings
    viewed, expected = (list(view_records(path, 3)) for path in (addressed.path, file))
    assert [item.image for item in viewed] == [item.image for item in expected] and viewed[0].image


def test_only_a_whole_range_at_the_end_names_a_part_of_a_file(tmp_path):
    for name in ("a#b.png", "a.png#bytes=1:2x", "#bytes=1:2.png", "a.png#bytes=1", "a.png#bytes=٣:1"):
        assert parse_address(name).size is None
        Image.new("RGB", (8, 8)).save(tmp_path / name, "PNG")
        assert open_image(str(tmp_path / name), (8, 8)).size == (8, 8)


def test_a_part_beyond_the_end_or_of_other_bytes_is_a_broken_image(planted):
    file = planted.write()
    address = pack_tar(file)["images/0.png"]
    offset, size = parse_address(address).offset, parse_address(address).size
    length = file.with_name("images.tar").stat().st_size
    for tail in (f"{length - 5}:{size}", f"{offset}:{10**15}", f"{offset + 1}:{size}", f"{offset}:0"):
        with pytest.raises(ImageError):
            read_image_facts(str(file.with_name(f"images.tar#bytes={tail}")))
    with pytest.raises(ImageError):
        read_image_facts(str(file.with_name(f"images.tar#bytes={offset}:{size};base64")))
    with pytest.raises(FileNotFoundError):
        read_image_facts(str(file.with_name(f"other.tar#bytes={offset}:{size}")))
    file = rewrite(file, "packed.jsonl", lambda name: address.replace(".tar", ".gone" if "1" in name else ".tar"))
    found = {finding.subject: finding.count for finding in examine(file, look=read_image_facts).findings}
    assert found["image-missing"] == 13 and "image-unreadable" not in found


def test_storage_that_does_not_answer_ends_the_doctor_and_clean_and_no_record_is_called_broken(
    planted, tmp_path, monkeypatch
):
    """The disk fails at the 30th image."""
    from coordexp.data import images

    file = planted.write()
    open_address, reads = images.open_address, 0

    def fail(address):
        nonlocal reads
        reads += 1
        if reads == 30:
            raise OSError(errno.EIO, os.strerror(errno.EIO), address)
        return open_address(address)

    monkeypatch.setattr(images, "open_address", fail)
    with pytest.raises(StoreError) as error:
        examine(file, look=read_image_facts)
    assert "images/29.png" in error.value.problem and not isinstance(error.value, OSError | ValueError)
    reads, target = 0, tmp_path / "clean.jsonl"
    with pytest.raises(StoreError):
        clean(file, target, look=read_image_facts)
    assert not target.exists()
    reads = 0
    result = run("data", "doctor", file, code=1)
    assert "did not answer" in result.output and "unreadable" not in result.output


def test_a_process_that_may_open_no_more_files_says_nothing_about_an_image(planted):
    planted.write()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    address = str(planted.folder / "images/0.png")
    read_image_facts(address)  # what is imported late is imported now
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        for read in (read_image_facts, lambda address: load_image(ImageRef(address, WIDTH, HEIGHT))):
            with pytest.raises(StoreError):
                read(address)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert load_image(ImageRef(address, WIDTH, HEIGHT)).size == (WIDTH, HEIGHT)


def test_a_server_gets_the_path_of_a_file_and_the_bytes_of_a_part_of_one(planted):
    file = planted.write()
    tar = str(file.with_name(pack_tar(file)["images/3.png"]))
    requests = [
        Request(ImageRef(image, WIDTH, HEIGHT), Decode(4)) for image in (str(planted.folder / "a.png"), tar)
    ]
    path, content = (item["images"][0] for item in infer_payload(requests, "Which?")["infer_requests"])
    assert path == str(planted.folder / "a.png")
    assert base64.b64decode(content.partition(",")[2]) == (planted.folder / "images/3.png").read_bytes()
    opened = AllowedImages(()).open(content, (WIDTH, HEIGHT))
    assert opened.decode().tobytes() == open_image(tar, (WIDTH, HEIGHT)).tobytes()
    broken = Request(ImageRef(f"{planted.folder}/images.tar#bytes={10**9}:5", WIDTH, HEIGHT), Decode(4))
    with pytest.raises(DataError):
        infer_payload([broken], "Which?")


def test_an_address_moves_with_its_data_file(tmp_path):
    for image in ("images/7.png", "shards/1.tar#bytes=5:6", "../x.png"):
        moved = move_address(image, tmp_path / "a", tmp_path / "b/c")
        assert (tmp_path / "b/c" / moved).resolve() == (tmp_path / "a" / image).resolve()
    assert move_address("/abs/1.tar#bytes=5:6", tmp_path / "a", tmp_path / "b") == "/abs/1.tar#bytes=5:6"


def test_tools_that_read_files_are_not_given_parts_of_files(planted, tmp_path):
    file = planted.write()
    file = rewrite(file, "packed.jsonl", pack_tar(file).__getitem__)
    for kind in ("yolo", "labelstudio"):
        result = run("data", "export", kind, file, "--out", tmp_path / kind, code=1)
        assert "not a file of its own" in result.output
    result = run("data", "export", "coco", file, "--out", tmp_path / "coco.json")
    stored = rewrite(file, "stored.jsonl", lambda image: f"s3://bucket/{image}")
    result = run("data", "export", "coco", stored, "--out", tmp_path / "stored.json")
    assert '"s3://bucket/images.tar#bytes=' in (tmp_path / "stored.json").read_text()
    names = [image["file_name"] for image in json.loads(Path(tmp_path / "coco.json").read_text())["images"]]
    assert names[0].startswith("images.tar#bytes=")
