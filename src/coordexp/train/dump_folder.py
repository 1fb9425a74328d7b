"""`RUN/dumps` as a run writes it: examples by step, beside them what training said of each, and the tokenizer, so
that the folder can be read without the model. A disk that is full costs the dump, not the run: that is said, once.
"""

import contextlib
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from coordexp.dump_files import FOLLOWED, step_files, trained_file

logger = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"


def forget_from(folder: Path, step: int) -> None:
    """What an interrupted run did after its last checkpoint is done again, and so dumped again."""
    for each in (folder, folder / FOLLOWED):
        for at, file in step_files(each).items():
            if at >= step:
                file.unlink()
                file.with_name(trained_file(file.name)).unlink(missing_ok=True)


@dataclass
class DumpFolder:
    """Files are named by their path inside of it. `model` has the tokenizer."""

    path: Path
    model: Path
    _lines: dict[str, int] = field(default_factory=dict)
    _failed: bool = False

    def lines(self, file: str) -> int:
        """Those that this process has added."""
        return self._lines.get(file, 0)

    def add(self, file: str, line: str) -> str:
        """Where the line stands then, as `step-000099.jsonl:2`; nothing if it could not be written."""
        number = self.lines(file)
        if not self._append(file, line):
            return ""
        self._lines[file] = number + 1
        return f"{file}:{number}"

    def add_trained(self, file: str, line: str) -> None:
        """Of an example that stands in `file`. After a resume, an example that waited at the checkpoint is trained
        again, and has two lines: the last one counts."""
        self._append(trained_file(file), line)

    def _append(self, file: str, line: str) -> bool:
        path = self.path / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._copy_tokenizer()
            _append_whole(path, f"{line}\n".encode())
        except OSError as error:
            if not self._failed:
                logger.warning("dumps are not written: %s; training goes on", error)
            self._failed = True
            return False
        return True

    def _copy_tokenizer(self) -> None:
        if not (self.path / TOKENIZER).is_file():
            partial = self.path / f"{TOKENIZER}.partial"
            shutil.copyfile(self.model / TOKENIZER, partial)
            partial.rename(self.path / TOKENIZER)


def _append_whole(path: Path, line: bytes) -> None:
    """All of it or nothing: half a line would spoil the next one too."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("ab") as file:
            file.write(line)
    except OSError:
        with contextlib.suppress(OSError):  # the file was never made
            os.truncate(path, size)
        raise
