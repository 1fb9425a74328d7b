"""Compare groups of runs on the same held-out images, with the intervals of `coordexp.intervals`.

Runs are never compared on different data. If labels are incomplete, and the share of the objects that has one is
given, quality against all objects is estimated too.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coordexp.errors import DataError
from coordexp.intervals import Interval, RateDifference, RunCounts, bootstrap_differences, mark_biased
from coordexp.pages.run_folder import MANIFEST, Run, RunGroup

if TYPE_CHECKING:
    from coordexp.evaluate.incomplete import QualityReport

INCOMPLETE = (  # not longer: a terminal shows 160 characters
    "Labels are incomplete (custom.val_labels): F1, precision, AP and some rates of behaviour are called neither "
    "better nor worse. --labelled-share estimates them."
)
StepsByGroup = dict[str, tuple[int, ...]]  # by the letter of the group, one step per run


@dataclass(frozen=True)
class GroupComparison:
    """The rates of two groups, and their quality if the labelled share is given. AP has no interval: it is that of
    both groups as logged."""

    base: RunGroup
    other: RunGroup
    rows: Sequence[RateDifference]
    quality: "QualityReport | None"


@dataclass(frozen=True)
class ComparisonResult:
    """Every group after the first is compared with the first."""

    images: int
    resamples: int
    steps: StepsByGroup
    comparisons: Sequence[GroupComparison]
    notes: Sequence[str]


def compare_groups(
    groups: Sequence[RunGroup],
    step: int | None,
    resamples: int,
    share: Interval | None,
    data: Path | None,
    notify: Callable[[str], None],
) -> ComparisonResult:
    """Compare groups for which `reason_not_to_compare` returned None: at this step, or at the last evaluation of
    each run. `share` is the labelled share of the objects, if quality against all of them is to be estimated.
    `data` says where the held-out records are now. Raise DataError if files are missing or do not fit."""
    from coordexp.data import open_data
    from coordexp.evaluate import count_by_image, read_predictions, read_truth
    from coordexp.evaluate.incomplete import compare_quality

    steps = {group.letter: tuple(choose_step(run, step) for run in group.runs) for group in groups}
    truth = read_truth(open_data([find_held_out_files(groups[0].runs[0], data)]))
    counts: dict[str, list[RunCounts]] = {}
    evaluated: set[int] = set()  # the images that the first run was evaluated on
    for group in groups:
        for run, at in zip(group.runs, steps[group.letter], strict=True):
            notify(f"{run.name}, step {at}")
            answers = read_predictions(run.folder / "evaluations" / f"step-{at}.json", truth)
            answered = {answer.image_id for answer in answers}
            evaluated = evaluated or answered
            if answered != evaluated:
                raise DataError(
                    f"{groups[0].runs[0].name} was evaluated on {len(evaluated)} images and {run.name} on "
                    f"{len(answered)}, which are not the same",
                    "compare runs with the same custom.eval_samples, or leave out the comparison with --at none",
                )
            images = [(image_id, record) for image_id, record in truth if image_id in answered]
            counts.setdefault(group.letter, []).append(count_by_image(images, answers))
    notify(f"{resamples} resamples")
    base, notes, comparisons = groups[0], _note_different_steps(groups, steps), []
    is_complete = share is None and all(run.has_complete_labels for group in groups for run in group.runs)
    notes += [] if is_complete else [INCOMPLETE]
    for other in groups[1:]:
        pair, letters = (counts[base.letter], counts[other.letter]), base.letter + other.letter
        rows = bootstrap_differences(*pair, resamples=resamples) + _read_average_precision(base, other, steps)
        matches = [[np.hstack([run["precision_50"], run["recall_50"][:, 1:]]) for run in runs] for runs in pair]
        quality = compare_quality(matches, share, is_judged=False, letters=letters) if share else None
        comparisons.append(GroupComparison(base, other, rows if is_complete else mark_biased(rows), quality))
    return ComparisonResult(len(evaluated), resamples, steps, comparisons, notes)


def reason_not_to_compare(groups: Sequence[RunGroup]) -> str | None:
    """Return None if there are several groups and all runs were evaluated on the same data."""
    if len(groups) < 2:
        return "there is only one group of runs"
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        if not find_evaluated_steps(run):
            return f"{run.name} has no evaluation in {run.folder / 'evaluations'}"
        if "val" not in run.data:
            return f"{run.folder / MANIFEST} names no held-out data"
    files = {(file := run.data["val"]).sha256: (run.name, file) for run in runs}
    if len(files) > 1:
        words = "; ".join(
            f"{name}: {file.file}, {file.records} records, sha256 {file.sha256[:8]}"
            for name, file in files.values()
        )
        return f"the runs were evaluated on different data ({words})"
    return None


def find_evaluated_steps(run: Run) -> tuple[int, ...]:
    """Return the steps whose evaluations left their predictions."""
    names = (path.stem.removeprefix("step-") for path in (run.folder / "evaluations").glob("step-*.json"))
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def choose_step(run: Run, step: int | None) -> int:
    steps = find_evaluated_steps(run)
    if step is None:
        return steps[-1]
    if step not in steps:
        raise DataError(
            f"{run.folder}: no evaluation at step {step}",
            f"there is one at {', '.join(map(str, steps))}; give one of them with --at, or --at last",
        )
    return step


def find_held_out_files(logged: Run, given: Path | None) -> list[Path]:
    """Return the files that the run was evaluated on: `given`, or those that `run.json` names, relative to here or
    to where the run was started. Raise DataError if the hash of a file differs from that in `run.json`."""
    where = "say where the file of the run is with --data FILE, or leave out the comparison with --at none"
    paths = []
    for expected in logged.data["val"].files or [logged.data["val"]]:
        path = given or Path(expected.file)
        if not path.is_file() and logged.start_folder and not given:
            path = logged.start_folder / expected.file
        if not path.is_file():
            raise DataError(f"{path}: no such file, but {logged.name} was evaluated on it", where)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected.sha256:
            raise DataError(
                f"{path}: its hash is {digest[:12]}, but {logged.name} was evaluated on {expected.sha256[:12]} "
                f"({expected.records} records)",
                f"the file has changed, or is another one; {where}",
            )
        paths.append(path)
    return paths


def _read_average_precision(base: RunGroup, other: RunGroup, steps: StepsByGroup) -> list[RateDifference]:
    """Return the means over seeds as a row without intervals, or nothing if a run did not log it."""
    means = []
    for group in (base, other):
        logged = [
            run.series("eval_ap").at(step) for run, step in zip(group.runs, steps[group.letter], strict=True)
        ]
        means.append(sum(logged) / len(logged))
    return [] if math.isnan(sum(means)) else [RateDifference("ap", means[0], means[1], None, None)]


def _note_different_steps(groups: Sequence[RunGroup], steps: StepsByGroup) -> list[str]:
    if len({step for group_steps in steps.values() for step in group_steps}) == 1:
        return []
    shared = set.intersection(*(set(find_evaluated_steps(run)) for group in groups for run in group.runs))
    words = "; ".join(f"{letter} {', '.join(map(str, group_steps))}" for letter, group_steps in steps.items())
    advice = f"--at {max(shared)} compares all at the last step they share" if shared else "they share no step"
    return [f"The last evaluations are of different steps ({words}); {advice}."]
