"""The cache of images: bounded, shared by processes, and intact when they are killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordexp.data.image_cache import LARGEST, SUBFOLDERS, ImageCache
from coordexp.files import PARTIAL

SIZE = 2**23
pytestmark = pytest.mark.timeout(60)


def content_of(key: str) -> bytes:
    """Return bytes that depend on the key only, about four kilobytes."""
    return random.Random(key).randbytes(3000 + len(key) * 100)


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_an_entry_is_there_until_newer_ones_need_its_place(tmp_path):
    cache = ImageCache(tmp_path / "cache", SIZE)
    assert cache.get("k") is None and not cache.has("k")
    for number in range(6000):
        key = str(number)
        assert cache.put(key, content_of(key)) and cache.get(key) == content_of(key)
        assert cache.get("0") == content_of("0"), "what is used stays"
    total = sum(path.stat().st_size for path in entries(tmp_path / "cache"))
    assert SIZE / 2 < total < SIZE
    assert not cache.has("1") and cache.has("5999")


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
    for number in range(200):
        cache.put(str(number), content_of(str(number)))
    folders = sorted({path.parent for path in entries(tmp_path)})
    for folder in folders:
        for age in (0, 7200):
            partial = folder / f"{age}{PARTIAL}"
            partial.write_bytes(b"x")
            os.utime(partial, (time.time() - age,) * 2)
    for number in range(6000):
        cache.put(f"new {number}", content_of(str(number)))
    left = [path.name for path in entries(tmp_path) if path.name.endswith(PARTIAL)]
    assert left == [f"0{PARTIAL}"] * len(folders)


WRITER = """
import sys
from pathlib import Path
from coordexp.data.image_cache import ImageCache
from tests.unit.data.test_image_cache import SIZE, content_of
cache = ImageCache(Path(sys.argv[1]), SIZE)
print("ready", flush=True)
while True:
    for number in range(3000):
        content = cache.get(str(number))
        assert content in (None, content_of(str(number))), number
        cache.put(str(number), content_of(str(number)))
"""


def test_three_processes_that_are_killed_while_they_write_leave_only_whole_entries(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    rng, most = random.Random(0), 0
    for _ in range(4):
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        assert all(writer.stdout.readline() == b"ready\n" for writer in writers)
        for writer in writers:
            time.sleep(rng.uniform(0.1, 0.5))
            most = max(most, sum(path.stat().st_size for path in entries(tmp_path) if path.exists()))
            assert writer.poll() is None, "it has read other bytes than were written"
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    assert 0 < most < 1.1 * SIZE
    cache = ImageCache(tmp_path, SIZE)
    kept = [number for number in range(3000) if cache.has(str(number))]
    assert len(kept) > 100
    assert all(cache.get(str(number)) == content_of(str(number)) for number in kept)
