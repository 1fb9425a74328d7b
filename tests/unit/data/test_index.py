"""The index of a large data file is the same as reading the file, and is read instead of it."""

import errno
import fcntl
import hashlib
import json
import os
import pickle
import re
import tempfile
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.data import RecordFile, open_data, read_records
from coordexp.data import index as module
from coordexp.errors import DataError
from tests.examples import examples

SPACED = '{"objects": [{"desc" \t: "desc"}, {"desc"  : "d", "desc2": 1}, {"desc"'  # broken, as files may be
SPACED_TEXT = '  {"desc": "\\"desc\\": \\\\", "d": "desc"}  '
TRICKY = 'a "desc": label'  # a text with what a key looks like


def record(number, objects):
    items = [{"desc": TRICKY, "bbox_2d": [0, 0, 1 + k, 2]} for k in range(objects)]
    return json.dumps({"image": f"{number}.png", "width": 9, "height": 9, "space": "pixel", "objects": items})


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A data file that counts as large, with blank lines, records without objects, and no newline at its end."""
    monkeypatch.setattr(module, "LARGE", 0)
    path = tmp_path / "train.jsonl"
    path.write_text("\n" + "\n  \n".join(record(k, k % 4) for k in range(9)) + "\n" + record(9, 1))
    return path


def forbid_scanning(monkeypatch):
    def refuse(*_):
        raise AssertionError("the data file was read to its end")

    monkeypatch.setattr(module, "_scan", refuse)


def assert_same_as_reading(path):
    records, lines = RecordFile(path), list(read_records(path))
    assert [records.read_with_image_id(k) for k in range(len(records))] == lines
    assert records.object_counts.tolist() == [len(line.objects) for _, line in lines]
    assert records.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_index_says_what_reading_the_file_says_and_the_file_is_not_read_again(file, monkeypatch):
    assert_same_as_reading(file)
    assert file.with_name("train.jsonl.index").is_file()
    forbid_scanning(monkeypatch)
    assert_same_as_reading(file)
    assert sorted(path.name for path in file.parent.iterdir()) == ["train.jsonl", "train.jsonl.index"]


@examples(60)
@given(
    st.lists(st.sampled_from([*map(partial(record, 7), range(4)), SPACED, SPACED_TEXT, "", " ", "{}", "\f\v"])),
    st.sampled_from(["", "\n", "\n\n"]),
    st.integers(1, 300),
)
def test_whatever_the_lines_are_and_wherever_a_file_is_cut_it_is_read_as_line_by_line(lines, end, block):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(module, "BLOCK", block):
        path = Path(folder) / "train.jsonl"
        path.write_text("\n".join(lines) + end)
        (index,) = module.open_indices([path])
        content = path.read_bytes()
    numbered = [(k, line) for k, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    assert [index.line_number(k) for k in range(len(index))] == [number for number, _ in numbered]
    bounds = index.offsets.tolist()
    begun = [content[begin:end].split(b"\n")[0] for begin, end in pairwise(bounds)]
    assert begun == [line for _, line in numbered] and bounds[-1] == len(content)
    assert index.counts.tolist() == [len(re.findall(rb'"desc"\s*:', line)) for _, line in numbered]


@pytest.fixture
def small_files(tmp_path, monkeypatch):
    """Seven files of two records, of which three share an index, and the last one has an index of its own."""
    paths = [tmp_path / f"part-{k}.jsonl" for k in range(7)]
    for k, path in enumerate(paths):
        path.write_text(f"\n{record(k, 3 if k == 6 else 2)}\n{record(k, 1)}\n")
    monkeypatch.setattr(module, "SHARED", sum(path.stat().st_size for path in paths[:3]))
    monkeypatch.setattr(module, "LARGE", paths[6].stat().st_size)
    return paths


def test_small_files_share_an_index_and_only_those_that_share_one_with_a_changed_file_are_read_again(
    small_files, monkeypatch
):
    def read() -> list:
        records = open_data([small_files])
        return [records.read_with_image_id(k) for k in range(len(records))]

    before = read()
    names = sorted(re.sub("[.][0-9a-f]{8}", "", path.name) for path in small_files[0].parent.glob("*.index"))
    assert names == [f"part-{k}.jsonl.index" for k in (0, 3, 6)]
    assert [len(item.objects) for _, item in before] == [2, 1] * 6 + [3, 1]
    scanned, scan = [], module._scan
    monkeypatch.setattr(module, "_scan", lambda path, *more: scanned.append(path) or scan(path, *more))
    assert read() == before and not scanned
    os.utime(small_files[4], ns=(1, 1))
    assert read() == before and sorted(scanned) == small_files[3:6]


def test_a_file_that_changes_between_its_index_and_its_first_record_is_refused(file):
    records = RecordFile(file)
    file.write_text(file.read_text() + "\n" + record(10, 1))
    with pytest.raises(DataError, match="changed"):
        records[0]


def test_records_are_found_as_in_a_list(file):
    records = RecordFile(file)
    assert records[-1] == records[9] and [*records] == [records[k] for k in range(10)]
    with pytest.raises(IndexError):
        records[10]
    assert pickle.loads(pickle.dumps(records))[3] == records[3]


def test_a_line_of_unusual_blanks_does_not_belong_to_the_record_before_it(file):
    file.write_text(record(0, 1) + "\n\f\v\n" + record(1, 1) + "\n")
    assert_same_as_reading(file)


@pytest.mark.parametrize("change", ["longer", "same size"])
def test_a_changed_data_file_gets_a_new_index(file, change):
    RecordFile(file)
    text = file.read_text()
    file.write_text(text + "\n" + record(10, 3) if change == "longer" else text.replace("9.png", "8.png"))
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))  # a clock may be too coarse to see the change
    assert_same_as_reading(file)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"",
        lambda content: b"x" * len(content),
        lambda content: content.replace(b'"format": 2', b'"format": 9'),
        lambda content: content.replace(b'"records": 10', b'"records":  9'),
    ],
    ids=["cut", "longer", "empty", "no header", "another format", "another count"],
)
def test_an_index_file_that_does_not_fit_is_made_again(file, spoil, monkeypatch):
    RecordFile(file)
    place = file.with_name("train.jsonl.index")
    place.write_bytes(spoil(place.read_bytes()))
    assert_same_as_reading(file)
    forbid_scanning(monkeypatch)
    assert_same_as_reading(file)


def refuse(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("name", "number"), [("os.fsync", errno.ENOSPC), ("pathlib.Path.replace", errno.EACCES)])
def test_where_no_index_file_can_be_written_the_index_stays_in_memory_and_a_warning_says_so(
    file, monkeypatch, name, number
):
    monkeypatch.setattr(name, refuse(number))
    messages = []
    assert len(RecordFile(file, messages.append)) == 10
    assert len(messages) == 1 and f"{file}.index" in messages[0] and os.strerror(number) in messages[0]
    assert [path.name for path in file.parent.iterdir()] == ["train.jsonl"]


def test_a_file_system_without_locks_has_indices_too(file, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    RecordFile(file)
    forbid_scanning(monkeypatch)
    assert_same_as_reading(file)


def test_a_file_that_changes_while_it_is_read_is_refused_by_everyone_who_read_it(file, monkeypatch):
    """Otherwise two ranks could have different numbers of records."""
    results = []
    ready = threading.Event()
    search = module._search

    def slow_search(block):
        ready.set()
        threading.Event().wait(0.3)
        return search(block)

    monkeypatch.setattr(module, "_search", slow_search)

    def read():
        try:
            results.append(len(RecordFile(file)))
        except DataError as error:
            results.append(str(error))

    first = threading.Thread(target=read)
    first.start()
    ready.wait(20)
    with file.open("a") as appended:
        appended.write("\n" + record(10, 1))
    first.join()
    assert len(results) == 1 and "was changed while it was read\n" in results[0]
    read()
    assert results[1] == 11


def test_of_several_processes_at_once_only_one_reads_the_file(file, monkeypatch):
    scans, scan = [], module._scan

    def slow_scan(*arguments):
        scans.append(1)
        threading.Event().wait(0.3)
        return scan(*arguments)

    monkeypatch.setattr(module, "_scan", slow_scan)
    results = []
    messages = []
    threads = [
        threading.Thread(target=lambda: results.append(RecordFile(file, messages.append).sha256)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(scans) == 1 and len(set(results)) == 1 and len(results) == 4
    assert messages == [f"waiting for another process, which reads {file} for the first time"] * 3
    assert sorted(path.name for path in file.parent.iterdir()) == ["train.jsonl", "train.jsonl.index"]
