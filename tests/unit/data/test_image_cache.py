"""The cache of images: bounded, shared by processes, and intact when they are killed."""

import itertools
import multiprocessing
import os
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from coordexp.data.image_cache import LARGEST, SUBFOLDERS, ImageCache
from coordexp.files import PARTIAL

SIZE = 2**21
ENTRIES = 1500  # of about four kilobytes: more than the cache can hold
pytestmark = pytest.mark.timeout(60)


def content_of(key: str) -> bytes:
    """Return bytes that depend on the key only, about four kilobytes."""
    return random.Random(key).randbytes(3000 + len(key) * 100)


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_an_entry_is_there_until_newer_ones_need_its_place(tmp_path):
    cache = ImageCache(tmp_path / "cache", SIZE)
    assert cache.get("k") is None and not cache.has("k")
    for number in range(ENTRIES):
        key = str(number)
        assert cache.put(key, content_of(key)) and cache.get(key) == content_of(key)
        assert cache.get("0") == content_of("0"), "what is used stays"
    total = sum(path.stat().st_size for path in entries(tmp_path / "cache"))
    assert SIZE / 2 < total < SIZE
    assert not cache.has("1") and cache.has(str(ENTRIES - 1))


def test_an_entry_that_is_damaged_or_too_large_is_none(tmp_path):
    cache = ImageCache(tmp_path, SIZE)
    assert cache.put("large", bytes(int(SIZE / SUBFOLDERS * LARGEST) + 1)) and not cache.has("large")
    for damage in (lambda body: body[:-1], lambda body: b"x" + body[1:], lambda body: b"", lambda body: b"abc"):
        cache.put("k", b"content")
        (file,) = entries(tmp_path)
        file.write_bytes(damage(file.read_bytes()))
        assert cache.get("k") is None and not cache.has("k")


def test_what_killed_processes_have_left_is_removed_after_a_while(tmp_path):
    cache = ImageCache(tmp_path, SIZE)
    for number in range(150):
        cache.put(str(number), content_of(str(number)))
    folders = sorted({path.parent for path in entries(tmp_path)})
    for folder in folders:
        for age in (0, 7200):
            partial = folder / f"{age}{PARTIAL}"
            partial.write_bytes(b"x")
            os.utime(partial, (time.time() - age,) * 2)
    for number in range(ENTRIES):
        cache.put(f"new {number}", content_of(str(number)))
    left = [path.name for path in entries(tmp_path) if path.name.endswith(PARTIAL)]
    assert left == [f"0{PARTIAL}"] * len(folders)


def size_of(path: Path) -> int:
    with suppress(FileNotFoundError):  # the writers remove entries while they are listed
        return path.stat().st_size
    return 0


def write_for_ever(folder: Path) -> None:
    cache = ImageCache(folder, SIZE)
    for number in itertools.cycle(range(ENTRIES)):
        content = cache.get(str(number))
        if content not in (None, content_of(str(number))):
            os._exit(1)
        cache.put(str(number), content_of(str(number)))


def test_three_processes_that_are_killed_while_they_write_leave_only_whole_entries(tmp_path):
    context, rng, most = multiprocessing.get_context("fork"), random.Random(0), 0
    for _ in range(3):
        writers = [context.Process(target=write_for_ever, args=(tmp_path,)) for _ in range(3)]
        for writer in writers:
            writer.start()
        for writer in writers:
            time.sleep(rng.uniform(0.05, 0.3))
            most = max(most, sum(map(size_of, entries(tmp_path))))
            assert writer.is_alive(), "it has read other bytes than were written"
            writer.kill()
            writer.join()
    assert 0 < most < 1.1 * SIZE
    cache = ImageCache(tmp_path, SIZE)
    kept = [number for number in range(ENTRIES) if cache.has(str(number))]
    assert len(kept) > 50
    assert all(cache.get(str(number)) == content_of(str(number)) for number in kept)
