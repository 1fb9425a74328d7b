"""`RUN/dumps` as a run writes it: examples by step, beside them what training said of each, and the tokenizer, so
that the folder can be read without the model. A disk that is full costs the dump, not the run: that is said, once.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from coordexp.dump_files import FOLLOWED, step_files, trained_file
from coordexp.files import BestEffort, append_line, copy_whole, drop_torn_line

logger = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"


def forget_from(folder: Path, step: int) -> None:
    """Remove what an interrupted run dumped after its last checkpoint: it is done again, and so dumped again. Of
    what stays, drop last lines that a crash left torn: traces of earlier examples may still be added."""
    for each in (folder, folder / FOLLOWED):
        for at, file in step_files(each).items():
            for one in (file, file.with_name(trained_file(file.name))):
                if at >= step:
                    one.unlink(missing_ok=True)
                elif drop_torn_line(one):
                    logger.warning("%s: its last line was torn by a crash and is dropped", one)


@dataclass
class DumpFolder:
    """Files are named by their path inside of it. `model` has the tokenizer."""

    path: Path
    model: Path
    _lines: dict[str, int] = field(default_factory=dict)
    _writes: BestEffort = field(default_factory=lambda: BestEffort("dumps", logger.warning))

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
        return self._writes.attempt(lambda: self._write(self.path / file, line))

    def _write(self, path: Path, line: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (self.path / TOKENIZER).is_file():
            copy_whole(self.model / TOKENIZER, self.path / TOKENIZER)
        append_line(path, line)
