"""Files survive a crash: they are written whole or not at all, grow by whole lines, and may end in a torn line."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from coordexp.errors import DataError
from coordexp.files import (
    BestEffort,
    WriteError,
    append_line,
    drop_torn_line,
    read_json_lines,
    write_json,
    write_whole,
)

pytestmark = pytest.mark.timeout(60)


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "run.json"
    for content in ("a" * 10_000, "b"):
        write_whole(file, content)
        assert file.read_text() == content
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_content_and_names_the_file(tmp_path, monkeypatch, call):
    file = tmp_path / "run.json"
    write_json(file, [1])
    monkeypatch.setattr(*(os, "fsync") if call == "fsync" else (Path, "replace"), full)
    with pytest.raises(WriteError) as raised:
        write_json(file, [1, 2])
    assert str(raised.value).splitlines() == [
        f"{file} cannot be written: No space left on device",
        "  make room on that disk, or raise the quota or limit",
    ]
    assert raised.value.errno == errno.ENOSPC
    assert json.loads(file.read_text()) == [1]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_mode_of_a_file_follows_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "whole", "")
        append_line(tmp_path / "lines", "")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [mode, mode]


def test_a_link_stays_and_the_file_it_points_to_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, file = tmp_path / "link", tmp_path / "elsewhere/file"
    link.symlink_to(file)
    write_whole(link, "content")
    assert link.is_symlink()
    assert file.read_text() == "content"


def test_a_path_that_is_not_a_regular_file_is_written_to_and_not_replaced():
    write_whole(Path("/dev/null"), "content")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(WriteError, match="/dev/full cannot be written: No space left on device"):
        write_whole(Path("/dev/full"), "content")


def test_an_append_to_a_full_disk_names_the_file():
    with pytest.raises(WriteError, match="/dev/full cannot be written: No space left on device") as raised:
        append_line(Path("/dev/full"), "line")
    assert raised.value.errno == errno.ENOSPC


def test_lines_of_several_threads_stay_whole(tmp_path):
    file = tmp_path / "servers.jsonl"
    threads = [
        threading.Thread(
            target=lambda k=k: [append_line(file, json.dumps({"k": k, "x": "y" * 5000})) for _ in range(50)]
        )
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["k"] for line in read_json_lines(file)) == sorted([0, 1, 2, 3] * 50)


LINE = b'{"step": 1}\n'
LONG = b'{"x": "' + b"y" * 200_000 + b'"}\n'


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b"", b""),
        (LINE, LINE),
        (LINE + LINE[:5], LINE),
        (LINE[:5], b""),
        (LINE + b"\0" * 300, LINE),
        (LINE + LINE[:5] + b"\0" * 70_000, LINE),
        (LINE + b"\0\0\0\n", LINE),
        (LONG + LONG[:-1], LONG),
        (LONG + LONG, LONG + LONG),
        (LINE + b"not JSON\n", LINE + b"not JSON\n"),
    ],
    ids=[
        "empty",
        "whole",
        "cut",
        "only",
        "zeroed",
        "cut and zeroed",
        "zeroed with its end",
        "long",
        "longs",
        "broken",
    ],
)
def test_a_torn_last_line_is_dropped_and_a_broken_one_is_not(tmp_path, content, left):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(content)
    assert drop_torn_line(file) == (content != left)
    assert file.read_bytes() == left
    assert not drop_torn_line(file)


@pytest.mark.parametrize("tail", [b"", b'{"step"', b"\0" * 500, b"\0\n"])
def test_a_reader_skips_a_torn_last_line(tmp_path, tail):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(LINE + LINE + tail)
    assert list(read_json_lines(file)) == [{"step": 1}] * 2
    assert list(read_json_lines(tmp_path / "nothing.jsonl")) == []


@pytest.mark.parametrize("line", [b"{broken\n", b"\0\0\0\n", b"7\n"])
def test_a_broken_line_that_is_not_the_last_is_an_error_with_its_number(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(LINE + line + LINE)
    with pytest.raises(DataError, match=f"{file}, line 2: not "):
        list(read_json_lines(file))


def test_a_failure_gives_one_warning_and_another_when_the_reason_changes():
    messages: list[str] = []
    writes = BestEffort("metrics", messages.append)

    def read_only():
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    done = [writes.attempt(write) for write in (full, full, read_only, read_only, list, list, full)]
    assert done == [False, False, False, False, True, True, False]
    assert [line.partition(";")[0] for line in messages] == [
        "warning: metrics are not written: [Errno 28] No space left on device",
        "warning: metrics are not written: [Errno 30] Read-only file system",
        "note: metrics are written again",
        "warning: metrics are not written: [Errno 28] No space left on device",
    ]
