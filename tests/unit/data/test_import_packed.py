"""WebDataset and TSV become records whose images stay where they are, one file after the other."""

import json
import tarfile
import tracemalloc

import pytest

from coordexp.data import DataError, RecordFile, read_records, stores
from coordexp.data.images import read_image_bytes
from coordexp.data.importers import packed
from coordexp.data.importers.packed import find_sources, read_webdataset
from coordexp.data.importers.rows import RowReader
from coordexp.data.importers.source import ImportCounts, Rules
from tests.command import run
from tests.unit.data.packed import draw, write_members, write_tsv, write_webdataset

LISTS = {"objects": {"bbox": [[8, 6, 16, 12], [1, 2, 3, 4]], "category": ["cat", "dog"], "id": [1, 2]}}
COCO = {"annotations": [{"bbox": [8, 6, 16, 12], "category_id": 1, "iscrowd": 0}], "image_id": 7}
OWN = {"image": "else.png", "width": 64, "height": 48, "space": "unit", "classes": ["cup"], "meta": {"a": 1}}
OWN |= {"objects": [{"desc": "cup", "poly": [0, 0, 0.5, 0, 0.5, 0.5], "meta": {"b": 2}}], "exhaustive": ["cup"]}
SIZE = {"width": 64, "height": 48}
REX = {"boxes": [{"bbox": [8, 6, 24, 18], "phrase": "red cup"}]}


def import_packed(form, source, out, *more):
    """Import into a folder, and join the records. Return what the import printed."""
    shown = run("data", "import", form, source, "--out", out.with_suffix(""), *more).output
    run("shards", "merge", out.with_suffix(""), "--out", out)
    return shown


def load(file):
    """Return records and the bytes of their images."""
    records = RecordFile(file)
    return [
        (record, read_image_bytes(records.image_address(record)))
        for record in (records[k] for k in range(len(records)))
    ]


def test_the_images_of_webdataset_stay_in_the_tar_and_every_form_of_labels_is_read(tmp_path):
    rows = {"a/0": LISTS, "a/1": COCO, "2": OWN, "3": {}}
    (tmp_path / "names.txt").write_text("zero\none\n")
    write_webdataset(tmp_path / "shards-0.tar", rows)
    out = tmp_path / "deep/train.jsonl"
    options = ("--boxes", "xywh", "--names", tmp_path / "names.txt")
    shown = import_packed("webdataset", tmp_path / "shards-*.tar", out, *options)
    loaded = load(out)
    assert [content for _, content in loaded] == [draw(number) for number in range(4)]
    assert [[(item.desc, item.coords, item.category_id) for item in record.objects] for record, _ in loaded] == [
        [("cat", (8, 6, 24, 18), None), ("dog", (1, 2, 4, 6), None)],
        [("one", (8, 6, 24, 18), 1)],
        [("cup", (0, 0, 32, 0, 32, 24), None)],
        [],
    ]
    own = loaded[2][0]
    assert (own.classes, own.exhaustive, own.meta, own.objects[0].meta) == (("cup",), ("cup",), {"a": 1}, {"b": 2})
    assert loaded[1][0].image_id == 7 and loaded[0][0].image.startswith("../shards-0.tar#bytes=")
    assert "4 images, 4 objects" in shown and "image without labels" in shown
    assert not list(tmp_path.glob("deep/**/*.tar"))
    run("data", "doctor", out)


@pytest.mark.parametrize("quoted", [False, True])
def test_the_images_of_a_tsv_stay_in_it(tmp_path, quoted):
    write_tsv(tmp_path, [REX, {"boxes": []}, REX], quoted=quoted)
    import_packed("tsv", tmp_path, tmp_path / "train.jsonl")
    loaded = load(tmp_path / "train.jsonl")
    assert [content for _, content in loaded] == [draw(number) for number in range(3)]
    assert [[(item.desc, item.coords) for item in record.objects] for record, _ in loaded] == [
        [("red cup", (8, 6, 24, 18))],
        [],
        [("red cup", (8, 6, 24, 18))],
    ]


@pytest.mark.parametrize("place", ["", "-1", "9007199254740993"])  # the last is more than a file system can have
def test_a_line_of_a_tsv_with_an_impossible_place_is_left_out(tmp_path, place):
    write_tsv(tmp_path, [REX])
    with (tmp_path / "toy.annotations.tsv").open("a") as file:
        file.write(f"{place}\t{json.dumps(REX)}\n")
    import_packed("tsv", tmp_path, tmp_path / "train.jsonl")
    assert len(load(tmp_path / "train.jsonl")) == 1


def test_what_a_box_means_is_not_guessed_and_numbers_of_classes_need_names(tmp_path):
    file = write_webdataset(tmp_path / "s.tar", {"0": LISTS})
    words = ("data", "import", "webdataset", file, "--out")
    refused = run(*words, tmp_path / "out", code=1)
    assert "--boxes xywh" in refused.output
    import_packed("webdataset", file, tmp_path / "o.jsonl", "--boxes", "xyxy")
    record = load(tmp_path / "o.jsonl")[0][0]
    assert record.objects[0].coords == (8, 6, 16, 12)
    write_webdataset(file, {"0": COCO})
    refused = run(*words, tmp_path / "out", "--boxes", "xywh", code=1)
    assert "--names" in refused.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shards.lock"]


def count_drops(tmp_path, members):
    counts = ImportCounts()
    file = write_members(tmp_path / "s.tar", members)
    images = list(read_webdataset(str(file), RowReader(None, Rules(boxes="xywh"), counts)))
    return len(images), {entry.reason: entry.count for entry in counts.entries if entry.effect == "dropped"}


def test_a_row_with_a_mistake_is_left_out_and_counted(tmp_path):
    image, good = draw(0), json.dumps(LISTS).encode()
    members = [
        *(("0.jpg", image), ("0.json", good)),
        *(("1.jpg", b"no image"), ("1.json", good)),
        *(("2.jpg", image), ("2.json", b"[")),
        *(("3.json", good), ("README", b"")),
        *(("4.jpg", image), ("4.png", image)),
        *(("5.jpg", image), ("5.json", b'{"objects": {"bbox": [[1, 2, 3, 4]], "category": []}}')),
        *(("6.jpg", image), ("6.json", b'{"space": "pixel"}')),
        *(("7.jpg", image), ("7.json", b'{"objects": [3, {"bbox": [1, 2, 3, 4]}]}')),
    ]
    images, drops = count_drops(tmp_path, members)
    assert images == 2 and sorted(drops.values()) == [1] * 7 + [2], drops


def test_a_crowd_leaves_its_class_incomplete(tmp_path):
    crowd = {"bbox": [1, 2, 30, 40], "category": "dog", "iscrowd": 1}
    row = {"annotations": [{"bbox": [8, 6, 16, 12], "category": "cat"}, crowd]}
    write_webdataset(tmp_path / "s.tar", {"0": row})
    words = ("webdataset", tmp_path / "s.tar")
    import_packed(*words, tmp_path / "a.jsonl", "--boxes", "xywh")
    import_packed(*words, tmp_path / "b.jsonl", "--boxes", "xywh", "--crowd", "keep")
    ((_, dropped),), ((_, kept),) = (list(read_records(tmp_path / name)) for name in ("a.jsonl", "b.jsonl"))
    assert (dropped.exhaustive, len(dropped.objects)) == (("cat",), 1)
    assert (kept.exhaustive, len(kept.objects)) == (None, 2)


def test_a_damaged_tar_is_refused(tmp_path):
    file = write_webdataset(tmp_path / "s.tar", {str(k): LISTS for k in range(9)})
    content = file.read_bytes()
    with tarfile.open(file) as tar:
        header = tar.getmembers()[7].offset
    words = ("data", "import", "webdataset", file, "--boxes", "xywh", "--out", tmp_path / "o")
    for damaged in (
        content[:9000],
        content[:header] + b"x" * 512 + content[header + 512 :],
        content[:header],
        content[:header] + bytes(512) + content[header:],
        content + content,
        b"\x1f\x8b" + content,
        b"",
    ):
        file.write_bytes(damaged)
        refused = run(*words, code=1)
        assert "s.tar: not a tar" in refused.output
        assert [path.name for path in (tmp_path / "o").iterdir()] == ["shards.lock"]


def test_an_import_goes_on_with_the_files_that_are_not_finished_and_shards_make_the_same_file(tmp_path):
    for number in range(5):
        write_webdataset(tmp_path / f"s{number}.tar", {f"{number}{k}": LISTS for k in range(3)})
    words = ("data", "import", "webdataset", tmp_path, "--boxes", "xywh", "--out")
    import_packed("webdataset", tmp_path, tmp_path / "whole.jsonl", "--boxes", "xywh")
    shards = tmp_path / "parts"
    run(*words, shards, "--shard", "1/2")
    run("shards", "status", shards, code=1)
    refused = run("shards", "merge", shards, "--out", tmp_path / "early.jsonl", code=1)
    assert "not finished" in refused.output
    before = {file.name: file.stat().st_mtime_ns for file in shards.glob("*.json*")}
    run(*words, shards, "--shard", "0/1")
    assert before.items() <= {file.name: file.stat().st_mtime_ns for file in shards.glob("*.json*")}.items()
    run("shards", "status", shards)
    shown = run("shards", "merge", shards, "--out", tmp_path / "merged.jsonl").output
    assert "15 images, 30 objects" in shown
    assert (tmp_path / "merged.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    (tmp_path / "s4.tar").write_bytes(b"torn")  # the last of five files fails, so four are kept
    run(*words, tmp_path / "torn", code=1)
    assert len(list((tmp_path / "torn").glob("*-of-00005.json"))) == 4
    other = run(*words, shards, "--shard", "0/1", code=1)
    assert "another data" in other.output


def test_an_import_needs_a_folder_without_shards_of_a_job_with_another_number(tmp_path):
    write_webdataset(tmp_path / "s0.tar", {"0": LISTS})
    words = ("data", "import", "webdataset", tmp_path, "--boxes", "xywh", "--out")
    run(*words, tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    write_webdataset(tmp_path / "s1.tar", {"1": LISTS})
    refused = run(*words, tmp_path / "out", code=1)
    assert "with 1 shards, and this one has 2" in refused.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_a_folder_of_records_has_not_the_name_of_a_file(tmp_path):
    write_webdataset(tmp_path / "s.tar", {"0": LISTS})
    words = ["data", "import", "webdataset", tmp_path, "--boxes", "xywh"]
    refused = run(*words, "--out", tmp_path / "train.jsonl", code=1)
    assert f"shards merge {tmp_path / 'train'} --out" in refused.output
    assert not (tmp_path / "train.jsonl").exists()


def test_a_folder_of_a_store_needs_a_pattern():
    with pytest.raises(DataError) as raised:
        find_sources("s3://bucket/folder/", "tsv")
    assert raised.value.fix.endswith("s3://bucket/folder/*annotations.tsv")


def test_a_merge_with_the_wrong_options_is_refused_before_results_are_read(tmp_path):
    write_webdataset(tmp_path / "s.tar", {"0": LISTS})
    run("data", "import", "webdataset", tmp_path, "--boxes", "xywh", "--out", tmp_path / "out")
    next((tmp_path / "out").glob("*.records.jsonl")).unlink()
    assert "--out train.jsonl" in run("shards", "merge", tmp_path / "out", code=1).output
    merged = run("shards", "merge", tmp_path / "out", "--out", tmp_path / "o", code=1)
    assert "not what its shard wrote" in merged.output


def test_a_header_with_a_broken_number_is_an_error_of_its_tar(tmp_path):
    file = write_webdataset(tmp_path / "s.tar", {"0": LISTS})
    content = bytearray(file.read_bytes())
    info = tarfile.TarInfo("h")
    info.type, record = tarfile.XHDTYPE, b"22 GNU.sparse.map=a,b\n"
    info.size = len(record)
    file.write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0") + content)
    with pytest.raises(DataError) as raised:
        list(read_webdataset(str(file), RowReader(None, Rules(boxes="xywh"), ImportCounts())))
    assert raised.value.problem.startswith(f"{file}: not a tar") and raised.value.fix


def test_a_stated_size_that_no_model_accepts_is_left_out(tmp_path):
    huge = {"width": 10**12, "height": 48}
    write_webdataset(tmp_path / "s.tar", {"0": LISTS | huge, "1": OWN | huge, "2": LISTS})
    shown = run("data", "import", "webdataset", tmp_path, "--boxes", "xywh", "--out", tmp_path / "out").output
    assert "1 images, 2 objects" in shown and "size that no model accepts" in shown


def test_what_is_too_large_to_be_read_at_once_is_left_out_or_named(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "MOST_LABELS", 200)
    monkeypatch.setattr(packed, "MOST_MEMBERS", 3)
    image, large = draw(0), json.dumps(LISTS).encode() + bytes(200)
    several = [(f"1.{kind}", image) for kind in ("png", "a", "b", "c")]
    images, drops = count_drops(tmp_path, [("0.png", image), ("0.json", large), *several, ("2.png", image)])
    assert images == 1 and drops == {"labels of more than 200 bytes": 1, "sample of more than 3 members": 1}
    file, counts = write_tsv(tmp_path, [REX, REX | {"more": "x" * 300}]), ImportCounts()
    with pytest.raises(DataError, match="tsv:2: a line of more than 200 bytes"):
        list(packed.read_tsv(str(file), RowReader(None, Rules(boxes="xyxy"), counts)))
    monkeypatch.setattr(stores, "LARGEST", len(image) // 2)
    assert not list(packed.read_tsv(str(write_tsv(tmp_path, [REX])), RowReader(None, Rules(boxes="xyxy"), counts)))
    assert [entry.reason for entry in counts.entries] == [f"image of more than {len(image) // 2} bytes"]


def test_a_name_in_a_tar_does_not_steer_the_terminal(tmp_path):
    write_webdataset(tmp_path / "s.tar", {"0\x1b[31m\x9b": LISTS})
    refused = run("data", "import", "webdataset", tmp_path, "--out", tmp_path / "out", code=1)
    assert r"0\x1b[31m\x9b, object 1" in refused.output
    shown = run("data", "import", "webdataset", tmp_path, "--boxes", "xywh", "--out", tmp_path / "out").output
    assert "\x1b[31m" not in shown


def test_memory_does_not_grow_with_a_tar(tmp_path):
    def measure(count):
        file = write_webdataset(tmp_path / "s.tar", {str(k): LISTS | SIZE for k in range(count)})
        tracemalloc.start()
        for _ in read_webdataset(str(file), RowReader(None, Rules(boxes="xywh"), ImportCounts())):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert measure(700) < measure(100) + 95_000


def test_a_tar_that_the_tarfile_module_reads_is_needed(tmp_path):
    with tarfile.open(tmp_path / "s.tar.gz", "w:gz") as tar:
        tar.add(__file__, "a.png")
    refused = run("data", "import", "webdataset", tmp_path / "s.tar.gz", "--out", tmp_path / "o", code=1)
    assert "compressed" in refused.output
