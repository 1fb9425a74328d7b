"""The results of the study (`tools/study.py`) as Markdown tables and as curves.

All numbers are computed from the answers that the runs left. Differences are to Stage 1 continued with the same
seeds and steps; their intervals are those of `coordexp report`.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml
from line_chart import Axes, draw
from study_data import find_complete

from coordexp.data import RecordFile
from coordexp.errors import UserError
from coordexp.evaluate import read_predictions, read_truth
from coordexp.evaluate.predictions import Truth
from coordexp.evaluate.report import count_by_image
from coordexp.pages.comparison import RateDifference, RunCounts, bootstrap_differences
from coordexp.pages.curves import EMPTY, Series, read_log

BASE = "continued"
RESAMPLES = 2000
CLASS_ACCURACY = "class accuracy"
COLUMNS = {
    "F1@0.5": "f1_50",
    "recall": "recall_50",
    "precision": "precision_50",
    "recall, any class": "recall_50_any_class",
    "precision, any class": "precision_50_any_class",
    CLASS_ACCURACY: "",  # recall divided by recall of any class: how many of the found objects have the right name
    "duplicates": "duplicates",
    "truncated": "truncated",
    "skipped": "skipped",
    "stopped": "stopped",
    "over count": "over_count",
}
PANELS = {
    "F1@0.5": "eval_f1_50",
    "recall, any class": "eval_recall_50_any_class",
    "precision, any class": "eval_precision_50_any_class",
    "too many objects": "eval_over_count",
}
Counts = dict[int | None, RunCounts]  # by seed; a start has none


@dataclass(frozen=True)
class Row:
    """A variant with the folders of its runs by seed. A start has one folder, without a seed."""

    name: str
    folders: Mapping[int | None, Path] = field(default_factory=dict)


def write_tables(study: Path, regime: str, split: str, steps: Sequence[int] | None) -> str:
    """Return the tables of all runs of a regime, by their number of steps, in Markdown."""
    numbers = steps or find_steps(study / regime)
    if not numbers:
        raise UserError(f"{study / regime} has no runs", "make some with `python tools/study.py run`")
    truth = read_truth(RecordFile(study / regime / "data" / f"{split}.jsonl"))
    parts = []
    for number in numbers:
        rows = [*find_starts(study, regime), *find_rows(study / regime / f"steps-{number}")]
        answered = [(row, counts) for row in rows if (counts := count_row(row, split, truth))]
        objects = sum(len(record.objects) for _, record in truth)
        parts.append(f"{regime}, {number} steps, {split}: {len(truth)} images, {objects} objects")
        parts.append(write_results(answered))
        parts.append(write_differences(answered))
    return "\n\n".join(part for part in parts if part)


def draw_curves(study: Path, regime: str, steps: int) -> str:
    """Return an SVG of the evaluations on val.jsonl over the steps: means over the seeds of each variant."""
    rows = [row for row in find_rows(study / regime / f"steps-{steps}") if row.folders]
    logs = {row.name: [read_log(folder / "metrics.jsonl") for folder in row.folders.values()] for row in rows}
    start = read_log(study / regime / "start" / "metrics.jsonl")
    panels = {}
    for title, metric in PANELS.items():
        first = [(0, value)] if (value := start.get(metric, EMPTY).last) is not None else []
        panels[title] = [
            first + average([log.get(metric, EMPTY) for log in logs_of_row]) for logs_of_row in logs.values()
        ]
    return draw(list(logs), panels, Axes((0, steps / 2, steps)))


def average(series: Sequence[Series]) -> list[tuple[float, float]]:
    """Return the steps that all of these have, with the mean of their values."""
    shared = set.intersection(*(set(one.steps.tolist()) for one in series))
    return [
        (step, statistics.mean(float(part.values[part.steps == step][0]) for part in series))
        for step in sorted(shared)
    ]


def find_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("steps-")) for path in folder.glob("steps-*"))


def find_starts(study: Path, regime: str) -> list[Row]:
    """Return the start of a regime and, for reference, the model before it and the start on complete labels."""
    complete = find_complete(regime)
    starts = [Row(name, {None: study / regime / name.replace(" ", "-")}) for name in ("before start", "start")]
    if complete != regime:
        starts.append(Row("start, complete labels", {None: study / complete / "start"}))
    return starts


def find_rows(folder: Path) -> list[Row]:
    """Return the variants of a folder of runs, Stage 1 continued first."""
    folders: dict[str, dict[int | None, Path]] = {}
    for path in sorted(path for path in folder.glob("*-*") if path.is_dir()):
        name, _, seed = path.name.rpartition("-")
        folders.setdefault(name, {})[int(seed)] = path
    names = sorted(folders, key=BASE.__ne__)
    return [Row(name, dict(sorted(folders[name].items(), key=str))) for name in names]


def count_row(row: Row, split: str, truth: Truth) -> Counts:
    """Return the counts of every run that has answered all images of the split."""
    counts: Counts = {}
    for seed, folder in row.folders.items():
        file = find_answers(folder, split)
        if file is not None:
            counts[seed] = count_by_image(truth, read_predictions(file, truth))
    return counts


def find_answers(folder: Path, split: str) -> Path | None:
    """Return the predictions of a run: those of `coordexp predict`, or for val those of its last evaluation."""
    if (folder / split / "report.json").is_file():
        return folder / split / "preds.json"
    if split != "val":
        return None
    files = {int(path.stem.removeprefix("step-")): path for path in folder.glob("evaluations/step-*.json")}
    return files[max(files)] if files else None


def write_results(rows: Sequence[tuple[Row, Counts]]) -> str:
    """Return a table of means and standard deviations over seeds."""
    lines = [_join("", *COLUMNS, "generated tokens", "seeds"), _join(*["---"] * (len(COLUMNS) + 3))]
    for row, counts in rows:
        runs = [to_rates(run) for run in counts.values()]
        cells = [_spread([run[title] for run in runs]) for title in COLUMNS]
        tokens = statistics.mean(count_tokens(row.folders[seed]) for seed in counts)
        seeds = ", ".join(str(seed) for seed in counts if seed is not None)
        lines.append(_join(row.name, *cells, f"{tokens:,.0f}", seeds))
    return "\n".join(lines)


def write_differences(rows: Sequence[tuple[Row, Counts]]) -> str:
    """Return a table of the differences to Stage 1 continued with the same seeds, or nothing if there is none.

    In brackets are the 95 % intervals over images, and with three seeds or more those over images and seeds."""
    base = next((counts for row, counts in rows if row.name == BASE), None)
    if not base:
        return ""
    columns = {title: name for title, name in COLUMNS.items() if name}
    lines = [_join("difference to continued", *columns), _join(*["---"] * (len(columns) + 1))]
    for row, counts in rows:
        seeds = [seed for seed in base if seed in counts or None in counts]
        if row.name == BASE or not seeds:
            continue
        own = [counts[seed] for seed in seeds if seed in counts] or [counts[None]]
        found = bootstrap_differences([base[seed] for seed in seeds], own, resamples=RESAMPLES)
        by_name = {difference.name: difference for difference in found}
        lines.append(_join(row.name, *(_describe(by_name.get(name)) for name in columns.values())))
    return "\n".join(lines)


def to_rates(counts: RunCounts) -> dict[str, float]:
    """Return the value of every column."""
    rates = {}
    for title, name in COLUMNS.items():
        above, below = counts[name].sum(axis=0) if name else (0, 0)
        rates[title] = above / below if below else float("nan")
    found, named = (counts[name][:, 0].sum() for name in ("recall_50_any_class", "recall_50"))
    return rates | {CLASS_ACCURACY: named / found if found else float("nan")}


def count_tokens(folder: Path) -> int:
    """Return how many tokens a run has generated: all rollouts, also those that were not chosen."""
    log, settings = read_log(folder / "metrics.jsonl"), folder / "resolved.yaml"
    if "generated_tokens" in log:  # the total so far, of tools/grpo.py
        return int(log["generated_tokens"].last or 0)
    if settings.is_file() and yaml.safe_load(settings.read_text())["rollout_matching"]["noise"]["enabled"]:
        return 0  # these answers were made from the labels
    return sum(int(np.nansum(log.get(name, EMPTY).values)) for name in ("rollout/tokens", "rollout/unused_tokens"))


def _describe(difference: RateDifference | None) -> str:
    if difference is None or difference.image_interval is None:
        return "-"
    intervals = [difference.image_interval, difference.seed_interval]
    words = "; ".join(f"{interval[0]:+.3f} to {interval[1]:+.3f}" for interval in intervals if interval)
    return f"{difference.value:+.3f} [{words}]"


def _spread(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {statistics.stdev(values):.3f}"


def _join(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
