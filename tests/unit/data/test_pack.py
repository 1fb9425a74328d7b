"""Records and their images in tars, which are imported again as the same records."""

import io
import json
import sys
import tarfile
from dataclasses import replace

import pytest
from PIL import Image

from coordexp.data import DataError, Record, RecordFile, RecordObject, pack
from tests.command import run
from tests.unit.data.packed import draw
from tests.unit.data.test_import_packed import import_packed, load


def write_set(folder, count=23):
    """Write records with images that are files, and return their file."""
    lines = []
    for number in range(count):
        form = ("png", "jpeg", "webp")[number % 3]
        (folder / f"{number}.img").write_bytes(draw(number, form))
        box = RecordObject("cat", "bbox_2d", (1, 2, 30 + number / 4, 40), number % 2 or None)
        ring = RecordObject("red cup", "poly", (1, 2, 9, 4, 5, 9.125))
        record = Record(f"{number}.img", 64, 48, "pixel", (box, ring)[: number % 3], 100 + number)
        lines.append(f"{record.as_json()}\n")
    (folder / "all.jsonl").write_text("".join(lines))
    return folder / "all.jsonl"


def by_id(loaded):
    return sorted(
        ((replace(record, image=""), content) for record, content in loaded), key=lambda row: row[0].image_id
    )


def test_a_webdataset_has_the_same_records_and_images_in_a_random_order_that_the_seed_decides(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(pack, "PER_SHARD", 5)
    monkeypatch.setattr(pack, "AHEAD", 3)
    file = write_set(tmp_path)
    run("data", "export", "webdataset", file, "--out", tmp_path / "one")
    for number in (2, 0, 1):
        run("data", "export", "webdataset", file, "--out", tmp_path / "two", "--shard", f"{number}/3")
    run("data", "export", "webdataset", file, "--out", tmp_path / "other", "--seed", "1")
    names = sorted(path.name for path in (tmp_path / "one").glob("*.tar"))
    assert len(names) == 5
    assert [(tmp_path / "one" / name).read_bytes() for name in names] == [
        (tmp_path / "two" / name).read_bytes() for name in names
    ]
    orders = []
    for folder in ("one", "other"):
        run("shards", "merge", tmp_path / folder, "--out", tmp_path / f"{folder}.jsonl")
        loaded = load(tmp_path / f"{folder}.jsonl")
        assert by_id(loaded) == by_id(load(file))
        orders.append([record.image_id for record, _ in loaded])
    assert orders[0] != orders[1] != sorted(orders[1]) and len(set(orders[0][:5]) - set(range(100, 105))) > 2
    with tarfile.open(tmp_path / "one" / names[0]) as tar:
        members = [member.name for member in tar]
    assert len(members) == 10 and {name.partition(".")[2] for name in members} <= {"png", "jpeg", "webp", "json"}
    assert all(members[k].partition(".")[0] == members[k + 1].partition(".")[0] for k in range(0, 10, 2))
    import_packed("webdataset", tmp_path / "one", tmp_path / "again.jsonl")
    assert by_id(load(tmp_path / "again.jsonl")) == by_id(load(file))


def test_an_image_that_cannot_be_read_ends_an_export_and_nothing_of_its_shard_is_finished(tmp_path):
    file = write_set(tmp_path, 4)
    (tmp_path / "2.img").write_bytes(b"torn")
    failed = run("data", "export", "webdataset", file, "--out", tmp_path / "out", code=1)
    assert "2.img" in failed.output and "clean" in failed.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["shards.lock"]
    (tmp_path / "2.img").write_bytes(draw(2))
    run("data", "export", "webdataset", file, "--out", tmp_path / "out")


def test_an_export_to_another_format_is_not_taken_for_finished(tmp_path):
    file = write_set(tmp_path, 1)
    run("data", "export", "webdataset", file, "--out", tmp_path / "out")
    other = pack.ExportJob("parquet", RecordFile(file), tmp_path / "out")
    with pytest.raises(DataError, match="another command and another format"):
        other(0)


def test_a_photo_with_further_images_in_it_is_a_jpeg():
    file = io.BytesIO()
    photo = Image.new("RGB", (8, 8))
    photo.save(file, "MPO", save_all=True, append_images=[photo])
    assert [pack.image_suffix(content) for content in (file.getvalue(), draw(0))] == [".jpeg", ".png"]


def test_parquet_says_which_package_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "importers" in path or "lib/python" in path])
    failed = run("data", "export", "parquet", write_set(tmp_path, 1), "--out", tmp_path / "out", code=1)
    assert "pip install pyarrow" in failed.output


def test_records_of_an_export_can_be_trained_on_before_they_are_joined(tmp_path):
    run("data", "export", "webdataset", write_set(tmp_path, 3), "--out", tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.records.jsonl")
    assert len(RecordFile(file)) == 3
    manifest = json.loads((tmp_path / "out/00000-of-00001.json").read_text())
    assert manifest["counts"] == {"images": 3, "objects": 3}
