"""Data sets of several files: which files a setting names, and reading them as one."""

import json
import resource
from pathlib import Path

import numpy as np
import pytest

import coordexp.data.index as index_module
from coordexp.data import DataError, RecordSet, open_data
from coordexp.data.sets import locate_image
from coordexp.files import find_data_files, match_files


def line(image, objects=0, **more):
    shapes = [{"desc": "cup", "bbox_2d": [1, 2, 30, 40]}] * objects
    return json.dumps({"image": image, "width": 64, "height": 48, "space": "pixel", "objects": shapes} | more)


@pytest.fixture
def shards(tmp_path):
    """Three files with 3, 1 and 2 records in two folders. The second one has a blank line and a broken record."""
    (tmp_path / "more").mkdir()
    files = [tmp_path / "part-0.jsonl", tmp_path / "part-1.jsonl", tmp_path / "more/part-2.jsonl"]
    files[0].write_text("".join(line(f"a{k}.png", k) + "\n" for k in range(3)))
    files[1].write_text("\n{}\n")
    files[2].write_text(f"{line('b0.png', 4)}\n{line('b1.png', 5)}")
    return files


def test_empty_files_are_left_out_unless_all_are_empty(shards, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    records = open_data([[empty, *shards]])
    assert len(records) == 6 and [file.path for file in records.files] == shards
    with pytest.raises(DataError, match="no records"):
        open_data([shards, [empty]])


def test_records_run_through_all_files(shards):
    records = open_data([shards])
    assert isinstance(records, RecordSet)
    assert (len(records), records.files[1].path) == (6, shards[1])
    assert [records[k].image for k in (0, 2, 4, 5, -1)] == ["a0.png", "a2.png", "b0.png", "b1.png", "b1.png"]
    assert records.object_counts.tolist() == [0, 1, 2, 0, 4, 5]
    with pytest.raises(IndexError):
        records[6]


def test_images_are_relative_to_their_own_file_and_errors_name_its_own_line(shards):
    records = open_data([shards])
    file, number = records.locate(5)
    assert (file.path, number) == (shards[2], 1)
    assert file.image_address(file[number]) == str(shards[2].parent / "b1.png")
    with pytest.raises(DataError, match=r"part-1\.jsonl:2"):
        records[3]


def test_predictions_name_an_image_by_its_image_id_or_by_its_number_in_all_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f"\n{line('0.png')}\n{line('1.png', image_id=70)}\n")
    records = open_data([[tmp_path / "a.jsonl", tmp_path / "b.jsonl"]])
    assert [records.read_with_image_id(k)[0] for k in range(4)] == [1, 70, 3, 70]


def test_several_sets_are_the_parts_of_the_whole(shards):
    records = open_data([shards[:1], shards[1:]])
    assert [len(part) for part in records.parts] == [3, 3]
    assert [file.path for file in records.files] == shards
    assert records[4].image == "b0.png"
    assert str(records) == f"{shards[0]} and 2 more files" and str(records.parts[1]).endswith("and 1 more file")
    assert records.sha256 == open_data([shards]).sha256


def test_the_hash_changes_with_every_file_and_with_their_order(shards):
    before = open_data([shards]).sha256
    assert open_data([[*shards[1:], shards[0]]]).sha256 != before
    shards[2].write_text(shards[2].read_text().replace("30", "31"))
    assert open_data([shards]).sha256 != before


def test_every_large_file_has_an_index_of_its_own_which_a_pattern_does_not_match(shards, monkeypatch):
    monkeypatch.setattr(index_module, "LARGE", 0)
    files = find_data_files([str(shards[0].parent / "part-*")])
    before = np.array(open_data([files]).object_counts)
    assert sorted(path.name for path in shards[0].parent.glob("*.index")) == [
        "part-0.jsonl.index",
        "part-1.jsonl.index",
    ]
    assert find_data_files([str(shards[0].parent / "part-*")]) == files == shards[:2]
    assert np.array_equal(open_data([files]).object_counts, before)


def test_a_pattern_stands_for_its_files_sorted_by_name_and_a_list_keeps_its_order(shards, monkeypatch):
    monkeypatch.chdir(shards[0].parent)
    named = [str(path) for path in find_data_files(["more/*", "part-[01].jsonl"])]
    assert named == ["more/part-2.jsonl", "part-0.jsonl", "part-1.jsonl"]
    assert len(find_data_files(["**/part-*.jsonl"])) == 3
    assert [path.name for path in match_files("*")] == ["part-0.jsonl", "part-1.jsonl"], "no folders"


def test_a_path_that_exists_is_no_pattern(tmp_path):
    (tmp_path / "a[1].jsonl").write_text(line("0.png"))
    (tmp_path / "a1.jsonl").write_text(line("0.png"))
    assert find_data_files([str(tmp_path / "a[1].jsonl")]) == [tmp_path / "a[1].jsonl"]


def count_open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize(("limit", "kept"), [(12, 3), (11, 0)])
def test_files_are_opened_when_they_are_read_and_of_too_many_none_stays_open(shards, monkeypatch, limit, kept):
    before = count_open_files()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, 1024))
    records = open_data([shards])
    assert count_open_files() == before
    for _ in range(2):
        assert [records[k].image for k in (0, 2, 4)] == ["a0.png", "a2.png", "b0.png"]
    with pytest.raises(DataError):
        records[3]
    assert count_open_files() == before + kept
    del records
    assert count_open_files() == before


def test_the_line_of_an_image_is_found_in_any_file_and_spelling(tmp_path):
    def line(image):
        return {"image": image, "width": 4, "height": 4, "space": "pixel", "objects": []}

    rows = [json.dumps(line("a/1.png")), "", "{broken 2.png", json.dumps(line("b/2.png"))]
    (tmp_path / "one.jsonl").write_text("\n".join(rows) + "\n")
    names = ("b/1.png", "\u00e9.png")
    texts = [
        json.dumps(line(names[0])),
        json.dumps(line(names[1])),
        json.dumps(line("\u00fc.png"), ensure_ascii=False),
    ]
    (tmp_path / "two.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    files = open_data([[tmp_path / "one.jsonl", tmp_path / "two.jsonl"]]).files
    for image, place in (
        ("b/2.png", "one.jsonl:4"),
        ("b/1.png", "two.jsonl:1"),
        ("\u00e9.png", "two.jsonl:2"),
        ("\u00fc.png", "two.jsonl:3"),
    ):
        assert locate_image(files, str(tmp_path / image)) == str(tmp_path / place)
    assert locate_image(files, str(tmp_path / "c/1.png")) == ""
