"""The files and shared memory that the processes of a run leave on the machine. Other runs at the same time do not
count: temporary files go to a folder of the run, and shared memory is found through the processes that map it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

SEGMENTS = "/dev/shm/psm_"  # Python's names for shared memory, which vLLM's message queues use


class Leavings:
    """Finds what a run leaves. `variables` must be in the environment of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.variables = folder, {"TMPDIR": str(folder)}
        self.segments: set[str] = set()

    def look(self, pid: int) -> set[str]:
        """Record the shared memory of a process and its descendants. Return all that was recorded so far."""
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            self.segments |= find_segments(process.pid)
        return self.segments

    def files(self) -> list[str]:
        """Return all files in the run's temporary folder, except torchrun's logs and what torch has compiled and
        keeps for later starts."""
        names = (path.relative_to(self.folder).as_posix() for path in self._paths())
        return sorted(name for name in names if not name.startswith(("torchelastic_", "torchinductor_")))

    def sockets(self) -> list[Path]:
        return [path for path in self._paths() if path.is_socket()]

    def _paths(self) -> list[Path]:
        """Return all files and folders. Unlike `rglob`, this passes over folders that are being removed."""
        return [Path(above, name) for above, folders, files in os.walk(self.folder) for name in folders + files]

    def left(self) -> list[str]:
        """Return what is left now. The folder of an engine goes a moment after the engine itself."""
        return self.files() + sorted(name for name in self.segments if Path(name).exists())


def find_segments(pid: int) -> set[str]:
    """Return the files of the shared memory that a process has mapped; nothing if it has ended."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    names = {line.split(maxsplit=5)[-1] for line in lines if SEGMENTS in line}
    return {name for name in names if name.startswith(SEGMENTS) and not name.endswith("(deleted)")}


@contextmanager
def leavings() -> Iterator[Leavings]:
    """Yield the leavings of a run. Its folder has a short name, because sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="left-"))
    try:
        yield Leavings(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
