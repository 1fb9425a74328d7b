"""What the processes of a run leave on the machine, apart from what others do at the same time: temporary files go
to a folder of the run's own, and shared memory is known by the processes that have mapped it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from coordexp.leftovers import mapped_segments


class Leavings:
    """`variables` are for the environment of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.variables = folder, {"TMPDIR": str(folder)}
        self.segments: set[str] = set()

    def look(self, pid: int) -> set[str]:
        """Note the shared memory of a process and of all below it. Return all that was noted so far."""
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            self.segments |= mapped_segments(process.pid)
        return self.segments

    def files(self) -> list[str]:
        """Return all files in the run's temporary folder, except the log folder that torchrun leaves."""
        names = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        return sorted(name for name in names if not name.startswith("torchelastic_"))

    def sockets(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_socket()]

    def left(self) -> list[str]:
        return self.files() + sorted(name for name in self.segments if Path(name).exists())


@contextmanager
def leavings() -> Iterator[Leavings]:
    """The folder has a short name: sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="left-"))
    try:
        yield Leavings(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
