"""Ways from the report into the inspector: which steps of which runs can be looked at, and under which address."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from coordexp.document import written
from coordexp.dump_files import FOLDER, step_files
from coordexp.inspector.report.drawing import StepMark
from coordexp.inspector.report.groups import Group
from coordexp.inspector.run import INSPECTOR, Run

MOST_MARKS = 120  # of a run
MOST_ROWS = 8


@dataclass(frozen=True)
class Examples:
    """`steps` as the log counts: the file of the weights after 99 updates is of step 100. `page` is where the
    inspector's page is, as seen from the report; None when there is none."""

    name: str
    folder: Path
    letter: str
    steps: tuple[int, ...]
    page: str | None


def dumped(groups: Sequence[Group], report: Path) -> list[Examples]:
    found = []
    for group in groups:
        for one in group.runs:
            steps = dumped_steps(one.run)
            page = one.run.folder / INSPECTOR
            if steps or page.is_file():
                address = _address(page, report) if page.is_file() else None
                found.append(Examples(one.run.name, one.run.folder, group.letter, steps, address))
    return found


def dumped_steps(run: Run) -> tuple[int, ...]:
    return tuple(step + 1 for step in step_files(run.folder / FOLDER))


def step_marks(runs: Sequence[Examples]) -> list[StepMark]:
    """For under the loss: a row a run, of so many as there is room for."""
    marks = []
    for row, one in enumerate([one for one in runs if one.steps][:MOST_ROWS]):
        apart = -(-len(one.steps) // MOST_MARKS)
        for step in one.steps[::apart]:
            href = f"{one.page}#step={step}" if one.page else ""
            words = f"{one.name}, step {step}: whole examples" + (", in the inspector" if href else "")
            marks.append(StepMark(step, row, one.letter, words, href))
    return marks


def links(runs: Sequence[Examples]) -> str:
    """One line for the page: to each inspector there is, and how to make those there are not."""
    parts = []
    there = [one for one in runs if one.page]
    if there:
        each = ", ".join(f'<a href="{written(one.page or "")}">{written(_told(one, there))}</a>' for one in there)
        parts.append(f"Look at whole examples in the inspector: {each}. Triangles under the loss are its steps.")
    without = [one for one in runs if one.steps and not one.page]
    if without:
        names = shlex.join(str(one.folder) for one in without)
        parts.append(
            f"{_count(without)} dumped examples and no page to look at them (triangles under the loss): "
            f"<code>{written(way_to_inspect(without))}</code> makes it"
            + (f" of {written(names)}." if len(without) > 1 else ".")
        )
    return "".join(f'<p class="about">{part}</p>' for part in parts)


def _told(one: Examples, among: Sequence[Examples]) -> str:
    """The name, or the folder where several have the same name."""
    return one.name if sum(other.name == one.name for other in among) == 1 else str(one.folder)


def way_to_inspect(without: Sequence[Examples]) -> str:
    """As a line for a shell."""
    return f"coordexp inspect {shlex.quote(str(without[0].folder)) if len(without) == 1 else 'RUN'}"


def _count(runs: Sequence[Examples]) -> str:
    return f"{runs[0].name} has" if len(runs) == 1 else f"{len(runs)} runs have"


def _address(page: Path, report: Path) -> str:
    return quote(Path(os.path.relpath(page.resolve(), report.resolve().parent)).as_posix())
