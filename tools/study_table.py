"""The results of the study (`tools/study.py`) as Markdown tables.

All numbers are computed from the answers that the arms left. Seeds are paired: arms of one seed have the same
start and the same labels. Costs are those after the start: generated tokens of rollouts and of labelling, and
processor time of labelling and training, also of the arms that an arm builds on.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from study_arms import ARMS, BUILDS_ON, OPTIONAL_ARMS
from study_data import REGIMES
from study_jobs import read_seconds

from coordexp.data import RecordFile
from coordexp.errors import UserError
from coordexp.evaluate import read_predictions, read_truth
from coordexp.evaluate.answer import drop_duplicates
from coordexp.evaluate.predictions import Truth
from coordexp.evaluate.report import count_by_image
from coordexp.files import read_json_lines
from coordexp.intervals import Estimate, RateDifference, RunCounts, bootstrap_differences
from coordexp.pages.curves import EMPTY, read_log

DEDUP_IOU = 0.5
CLASS_ACCURACY, DEDUP = "class accuracy", "F1, dedup"
COLUMNS = {
    "F1@0.5": "f1_50",
    DEDUP: DEDUP,  # after `--dedup 0.5`
    "recall": "recall_50",
    "precision": "precision_50",
    "recall, any class": "recall_50_any_class",
    "precision, any class": "precision_50_any_class",
    CLASS_ACCURACY: "",  # recall divided by recall of any class: how many of the found objects have the right name
    "duplicates": "duplicates",
    "truncated": "truncated",
    "skipped": "skipped",
    "stopped": "stopped",
}
COUNTED = ("skipped", "stopped")  # shown as numbers of objects
COSTS = ("generated tokens", "processor seconds", "seeds")
COMPLETE = "complete labels: "  # before the names of arms of that regime


@dataclass(frozen=True)
class Row:
    """An arm with the folders and the counts of its seeds."""

    name: str
    folders: dict[int, Path] = field(default_factory=dict)
    counts: dict[int, RunCounts] = field(default_factory=dict)


def write_tables(study: Path, regimes: Sequence[str] | None, split: str, against: str) -> str:
    """Return the tables of regimes, or of all that were made, in Markdown."""
    found = regimes or [name for name in REGIMES if (study / name).is_dir()]
    if not found:
        raise UserError(f"{study} has no arms", "make some with `python tools/study.py run`")
    truth = read_truth(RecordFile(study / f"scenes/{split}.jsonl"))
    objects = sum(len(record.objects) for _, record in truth)
    parts = []
    for regime in found:
        rows = read_rows(study, regime, split, truth)
        parts += [f"{regime}, {split}: {len(truth)} images, {objects} objects", write_results(rows)]
        parts.append(write_differences(rows, against))
    return "\n\n".join(part for part in parts if part)


def read_rows(study: Path, regime: str, split: str, truth: Truth) -> list[Row]:
    """Return the rows that have answers: the model before the start, the arms of the regime, and the ceiling."""
    rows = [*find_rows(study / regime)]
    if regime != "complete":
        rows += [replace(row, name=f"{COMPLETE}{row.name}") for row in find_rows(study / "complete")]
    seeds = sorted({seed for row in rows for seed in row.folders})
    rows.insert(0, Row("before the start", dict.fromkeys(seeds, study / "before")))
    for row in rows:
        for seed, folder in row.folders.items():
            preds = folder / split / "preds.json"
            if preds.with_suffix(".answers.jsonl").is_file():
                row.counts[seed] = count(preds, truth)
    return [row for row in rows if row.counts]


def find_rows(folder: Path) -> list[Row]:
    """Return the arms of a regime: those that have a name of their own in their order, then the others."""
    rows: dict[str, Row] = {}
    for path in sorted(folder.glob("[0-9]*/*/")):
        rows.setdefault(path.name, Row(path.name)).folders[int(path.parent.name)] = path
    known = [*ARMS, *OPTIONAL_ARMS]
    return sorted(rows.values(), key=lambda row: known.index(row.name) if row.name in known else len(known))


def count(preds: Path, truth: Truth) -> RunCounts:
    """Return the counts of every image, with those of F1 after duplicates were dropped."""
    answers = read_predictions(preds, truth)
    unique = [drop_duplicates(answer, DEDUP_IOU) for answer in answers]
    return {**count_by_image(truth, answers), DEDUP: count_by_image(truth, unique)["f1_50"]}


def write_results(rows: Sequence[Row]) -> str:
    """Return a table of means and standard deviations over seeds."""
    lines = [_join("", *COLUMNS, *COSTS), _join(*["---"] * (1 + len(COLUMNS) + len(COSTS)))]
    for row in rows:
        values = [to_values(counts) for counts in row.counts.values()]
        cells = [_spread([value[title] for value in values], title in COUNTED) for title in COLUMNS]
        tokens, seconds = (
            statistics.mean(measure(row.folders[seed]) for seed in row.counts)
            for measure in (count_tokens, sum_seconds)
        )
        seeds = ", ".join(map(str, row.counts))
        lines.append(_join(row.name, *cells, f"{tokens:,.0f}", f"{seconds:,.0f}", seeds))
    return "\n".join(lines)


def write_differences(rows: Sequence[Row], against: str) -> str:
    """Return a table of the differences to an arm with the same seeds, with 95 % intervals over images, and with
    several seeds over images and seeds. It is empty without that arm."""
    base = next((row for row in rows if row.name == against), None)
    if base is None:
        return ""
    columns = {title: name for title, name in COLUMNS.items() if name and title not in COUNTED}
    lines = [_join(f"difference to {against}", *columns), _join(*["---"] * (len(columns) + 1))]
    for row in rows:
        seeds = [seed for seed in base.counts if seed in row.counts]
        if row is base or not seeds:
            continue
        sides = ([arm.counts[seed] for seed in seeds] for arm in (base, row))
        rates = {rate.name: rate for rate in bootstrap_differences(*sides, paired=True)}
        lines.append(_join(row.name, *(_describe(rates.get(name)) for name in columns.values())))
    return "\n".join(lines)


def to_values(counts: RunCounts) -> dict[str, float]:
    """Return the value of every column."""
    values = {title: _rate(counts, name) for title, name in COLUMNS.items() if name}
    values |= {title: float(counts[COLUMNS[title]][:, 0].sum()) for title in COUNTED}
    found, named = (counts[name][:, 0].sum() for name in ("recall_50_any_class", "recall_50"))
    return values | {CLASS_ACCURACY: named / found if found else math.nan}


def count_tokens(folder: Path) -> int:
    """Return how many tokens an arm has generated: all rollouts, also those that were not chosen, and the answers
    that labelled images."""
    log = read_log(folder / "run/metrics.jsonl") if (folder / "run/metrics.jsonl").is_file() else {}
    if "generated_tokens" in log:  # the total so far, of tools/grpo.py
        return int(log["generated_tokens"].last or 0)
    rollouts = (log.get(name, EMPTY).values for name in ("rollout/tokens", "rollout/unused_tokens"))
    labelling = (line["tokens"] for file in folder.glob("found.*.jsonl") for line in read_json_lines(file))
    return sum(int(np.nansum(values)) for values in rollouts) + sum(labelling) + _of_base(folder, count_tokens)


def sum_seconds(folder: Path) -> float:
    """Return the processor time of an arm without that of its answers to held-out images."""
    own = [seconds for made, seconds in read_seconds(folder) if not made.startswith(("test/", "val/"))]
    return sum(own) + _of_base(folder, sum_seconds)


def _of_base(folder: Path, measure) -> float:
    """Return what is measured of the arm that this one builds on."""
    return measure(folder.with_name(BUILDS_ON[folder.name])) if folder.name in BUILDS_ON else 0


def _rate(counts: RunCounts, name: str) -> float:
    above, below = counts[name].sum(axis=0)
    return above / below if below else math.nan


def _describe(rate: RateDifference | None) -> str:
    """Return a difference with its interval over images and seeds, or over images of one seed."""
    interval = rate and (rate.seed_interval or rate.image_interval)
    return Estimate(rate.value, *interval).describe_difference() if interval else "-"


def _spread(values: Sequence[float], is_count: bool) -> str:
    style = ".0f" if is_count else ".3f"
    mean = f"{statistics.mean(values):{style}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{style}}"


def _join(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
