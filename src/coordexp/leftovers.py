"""What killed processes leave behind: sockets and files below a folder, and segments of shared memory.

An engine's processes speak with each other by sockets that have a path, and by shared memory that has a name. Both
stay when all processes are killed. The sockets are therefore put in a folder that belongs to the process that
started the engine, and the segments are found in the memory maps of the engine's processes while they live. They
are removed by whoever notices that the owner is gone: the engine's workers, and the tether of a part of
`coordexp launch`.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from coordexp.errors import EngineError

RUN_FOLDER = "COORDEXP_RUN_FOLDER"  # in the environment of a part below a tether, which removes this folder
ENGINE_FOLDER = "COORDEXP_ENGINE_FOLDER"  # in the environment of an engine's processes: where its sockets are
PREFIX = "coordexp-"
SEGMENTS = "/dev/shm/psm_"  # noqa: S108 - as Python names shared memory, which vLLM's message queues are in
# Bytes of a folder's path. A socket's has at most 107, and vLLM puts 37 after its folder's, which may be 9 below.
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000") - len("/12345678")


@cache
def engine_folder() -> Path:
    """Return the folder for the sockets and temporary files of this process's engines. It is removed when the
    process ends."""
    above = os.environ.get(RUN_FOLDER, "")
    folder = Path(tempfile.mkdtemp(prefix="", dir=above)) if Path(above).is_absolute() else make_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_folder() -> Path:
    """Make a folder for temporary files, with a name that is short enough for sockets below it."""
    places = [os.environ.get("VLLM_RPC_BASE_PATH"), tempfile.gettempdir(), "/tmp"]  # noqa: S108 - mkdtemp makes it safe
    length = len(f"/{PREFIX}12345678")
    place = next((one for one in places if one and len(os.fsencode(one)) + length <= LONGEST), None)
    if place is None:
        raise EngineError("no folder has a path that is short enough for sockets\n  set TMPDIR to a shorter one")
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))


def mapped_segments(pid: int) -> set[str]:
    """Return the names of the shared memory that a process has mapped; nothing if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    names = {line.split(maxsplit=5)[-1] for line in lines if SEGMENTS in line}
    return {name for name in names if name.startswith(SEGMENTS) and not name.endswith("(deleted)")}


def remove_segments(names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):
            Path(name).unlink()


def remove_unused_segments(names: set[str]) -> None:
    """Remove the segments that no living process has mapped: others are not only ours."""
    if names:
        remove_segments(names.difference(*map(mapped_segments, psutil.pids())))


def remove_engine(segments: Iterable[str]) -> None:
    """Remove what an engine would leave whose owner is gone: its segments and its folder. Call it in one of its
    processes."""
    remove_segments(segments)
    if folder := os.environ.get(ENGINE_FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    if above := os.environ.get(RUN_FOLDER):  # a tether that lives removes it itself
        with suppress(OSError):
            Path(above).rmdir()
