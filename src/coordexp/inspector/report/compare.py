"""Two groups of runs on the same held-out images: which evaluations are compared, and whether they may be.

Run folders and the held-out data come in; a `Comparison` for each group after the first goes out, or in words why
there is none. Data that is not the same in all runs is never compared.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.errors import DataError
from coordexp.inspector.report.bootstrap import Difference, RunCounts, compare
from coordexp.inspector.report.groups import Group, Logged
from coordexp.inspector.run import Run

CLOSE = 1e-9  # between what a run logged and what its predictions come to
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """`at` is a step, or None for the last evaluation of each run."""

    at: int | None
    resamples: int
    data: Path | None


@dataclass(frozen=True)
class Comparison:
    base: Group
    other: Group
    rows: tuple[Difference, ...]
    average_precision: tuple[float, float] | None


@dataclass(frozen=True)
class Compared:
    """`steps` are those of the evaluations, by the letter of the group."""

    images: int
    resamples: int
    steps: dict[str, tuple[int, ...]]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]


def compared(groups: Sequence[Group], request: Request, tell: Tell) -> Compared:
    """Of groups that `why_not` has nothing against. DataError where files are missing or do not fit."""
    from coordexp.data import read_records
    from coordexp.evaluate import PredictionError, check_predictions, read_predictions
    from coordexp.evaluate.by_image import count_by_image

    steps = {group.letter: tuple(chosen_step(one.run, request.at) for one in group.runs) for group in groups}
    truth = list(read_records(held_out(groups[0].runs[0], request.data)))
    counts: dict[str, list[RunCounts]] = {}
    for group in groups:
        for one, step in zip(group.runs, steps[group.letter], strict=True):
            tell(f"{one.run.name}, step {step}")
            try:
                predictions = read_predictions(_predictions(one.run, step))
                check_predictions(predictions, truth)
                counts.setdefault(group.letter, []).append(count_by_image(truth, predictions.answers))
            except PredictionError as error:
                raise DataError(f"{_predictions(one.run, step)}: {error}") from error
    tell(f"{request.resamples} resamples")
    first = groups[0]
    found = tuple(
        Comparison(
            first,
            other,
            tuple(compare(counts[first.letter], counts[other.letter], resamples=request.resamples)),
            _average_precision(first, other, steps),
        )
        for other in groups[1:]
    )
    notes = (*_other_steps(groups, steps), *_unlike_the_log(groups, steps, counts))
    return Compared(len(truth), request.resamples, steps, found, notes)


def why_not(groups: Sequence[Group]) -> str | None:
    """None when the runs were evaluated on the same data, as their manifests say."""
    if len(groups) < 2:
        return "one group of runs: there is nothing to compare it with"
    for group in groups:
        for one in group.runs:
            if not evaluated_steps(one.run):
                return f"{one.run.name} has no evaluation in {one.run.folder / 'evaluations'}"
    found = {(about := _held_out(one))["sha256"]: (one.run.name, about) for g in groups for one in g.runs}
    if len(found) > 1:
        told = "; ".join(f"{name}: {_data_words(about)}" for name, about in found.values())
        return f"the runs were evaluated on different data ({told})"
    return None


def _data_words(about: dict[str, Any]) -> str:
    return f"{about['file']}, {about['records']} records, sha256 {about['sha256'][:8]}"


def evaluated_steps(run: Run) -> tuple[int, ...]:
    """That left their predictions."""
    names = (path.stem.removeprefix("step-") for path in (run.folder / "evaluations").glob("step-*.json"))
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def chosen_step(run: Run, at: int | None) -> int:
    steps = evaluated_steps(run)
    if at is None:
        return steps[-1]
    if at not in steps:
        raise DataError(
            f"{run.folder}: no evaluation at step {at}\n"
            f"  there is one at {', '.join(map(str, steps))}; give one of them with --at, or --at last"
        )
    return at


def held_out(logged: Logged, given: Path | None) -> Path:
    """The file that was evaluated on: where the run was started, or where `given` says. Its hash must be the
    run's."""
    about = _held_out(logged)
    named = Path(about["file"])
    root = logged.run.started_in
    places = [given] if given else [named, *([root / named] if root else [])]
    there = next((place for place in places if place.is_file()), None)
    if there is None:
        raise DataError(
            f"{places[0]}: no such file\n"
            f"  it is what {logged.run.name} was evaluated on, as seen from where that was started; "
            "say where it is with --data FILE, or leave out the comparison with --at none"
        )
    with there.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != about["sha256"]:
        raise DataError(
            f"{there}: its hash is {digest[:12]}, and {logged.run.name} was evaluated on {about['sha256'][:12]} "
            f"({about['records']} records)\n"
            "  the file has changed, or is another one; give the one of the run with --data FILE, or leave out "
            "the comparison with --at none"
        )
    return there


def _held_out(logged: Logged) -> dict[str, Any]:
    about = logged.data.get("val")
    if about is None:
        raise DataError(
            f"{logged.run.folder / 'run.json'}: names no held-out data, and there are evaluations\n"
            "  leave out the comparison with --at none"
        )
    return dict(about)


def _predictions(run: Run, step: int) -> Path:
    return run.folder / "evaluations" / f"step-{step}.json"


def _logged_at(one: Logged, name: str, step: int) -> float | None:
    series = one.log.get(f"eval_{name}")
    if series is None:
        return None
    at = series.values[series.steps == step]
    return float(at[0]) if len(at) else None


def _average_precision(base: Group, other: Group, steps: dict[str, tuple[int, ...]]) -> tuple[float, float] | None:
    means = []
    for group in (base, other):
        both = zip(group.runs, steps[group.letter], strict=True)
        found = [value for one, step in both if (value := _logged_at(one, "ap", step)) is not None]
        if len(found) < len(group.runs):
            return None
        means.append(sum(found) / len(found))
    return means[0], means[1]


def _other_steps(groups: Sequence[Group], steps: dict[str, tuple[int, ...]]) -> list[str]:
    if len({step for each in steps.values() for step in each}) == 1:
        return []
    shared = set.intersection(*(set(evaluated_steps(one.run)) for group in groups for one in group.runs))
    each = "; ".join(f"{letter} {', '.join(map(str, found))}" for letter, found in steps.items())
    way_out = (
        f"--at {max(shared)} compares all at the last step that they share" if shared else "they share no step"
    )
    return [f"The last evaluations are of different steps ({each}); {way_out}."]


def _unlike_the_log(
    groups: Sequence[Group], steps: dict[str, tuple[int, ...]], counts: dict[str, list[RunCounts]]
) -> list[str]:
    """Predictions must come to what the run logged: where not, they were measured by other code."""
    found = []
    for group in groups:
        for one, step, own in zip(group.runs, steps[group.letter], counts[group.letter], strict=True):
            said = _logged_at(one, "f1_50", step)
            above, below = own["f1_50"].sum(axis=0)
            if said is not None and below and abs(above / below - said) > CLOSE:
                now = f"{above / below:.4f}"
                found.append(
                    f"{one.run.name} logged F1 {said:.4f} at step {step}, and its predictions come to {now} now: "
                    "they were measured by another version, or changed."
                )
    return found
