"""The run report: groups of runs and their comparison in, one HTML page out, with links to the inspector.

It has curves with seeds as bands, the time by phase, what to look at, the settings in which groups differ, and
paired intervals for their differences on the same images. Every other number of a run is in `metrics.jsonl` and in
the trackers that it logged to.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coordexp.pages import charts
from coordexp.pages.comparison import ComparisonResult, GroupComparison
from coordexp.pages.curves import (
    BETWEEN,
    PHASES,
    Series,
    StepRanges,
    build_curve,
    divide,
    divide_steps,
    total_by_phase,
)
from coordexp.pages.document import render_page
from coordexp.pages.report_notes import make_notes
from coordexp.pages.run_folder import INSPECTOR, Run, RunGroup, find_differences, format_value

INTERVAL_WIDTH, INTERVAL_MARGIN = 300, 8  # of the drawing of an interval


@dataclass(frozen=True)
class Plot:
    """A logged number over steps, divided by the number `per`, or multiplied by the weight of the loss term
    `weight_of`. `note` explains the number, and a `share` is between 0 and 1."""

    metric: str
    title: str
    note: str = ""
    share: bool = False
    per: str = ""
    weight_of: str = ""
    wide: bool = False

    def read(self, run: Run) -> Series:
        series = run.series(self.metric)
        if self.per:
            return divide(series, run.series(self.per))
        return series.scale(run.term_weight(self.weight_of) or 0.0) if self.weight_of else series


EVALUATED = {
    "f1_50": ("F1", ""),
    "recall_50": ("recall", ""),
    "precision_50": ("precision", ""),
    "ap": ("AP", "boxes, COCO's mean over IoU 0.50:0.95"),
    "mask_ap": ("mask AP", "COCO's mean over IoU 0.50:0.95"),
    "f1_50_any_class": ("F1, any class", ""),
    "recall_50_any_class": ("recall, any class", ""),
    "precision_50_any_class": ("precision, any class", ""),
    "mean_iou": ("mean IoU of pairs", ""),
    "duplicates": ("duplicates", "of valid objects"),
    "invalid": ("invalid", "of all objects"),
    "truncated": ("truncated", "of answers"),
    "skipped": ("skipped", "of true objects: missed, before the last object of the answer"),
    "stopped": ("stopped", "of true objects: missed, behind the last object of the answer"),
    "over_count": ("over-counts", "of answers"),
    "unknown_class": ("unknown class", "of valid objects"),
    "unreadable": ("unreadable", "of answers"),
    "boxes_on_empty": ("boxes on empty images", "of images without an object"),
    "absent_classes": ("absent classes answered", "of asked classes that are not in the image"),
    "unasked": ("unasked objects", "of valid objects in answers to a list of classes"),
}
_ANSWERS = "rollout/answers"
ANSWERS = (
    Plot("match/recall", "recall", "true objects that were matched", share=True),
    Plot("match/precision", "precision", "valid objects that were matched", share=True),
    Plot("match/missed", "missed per answer", "true objects that were appended", per=_ANSWERS),
    Plot("match/extra", "extra per answer", "false positives: valid, but not matched", per=_ANSWERS),
    Plot("parse/repeats", "repeats per answer", "valid objects that were written before", per=_ANSWERS),
    Plot("rollout/mean_tokens", "tokens of an answer", "without the stop token"),
    Plot("rollout/cut_off_rate", "cut off", "at max_new_tokens", share=True),
    Plot("rollout/looped", "looped", "ended by the repeat guard", share=True, per=_ANSWERS),
    Plot("rollout/unreadable", "unreadable", "do not begin with {", share=True, per=_ANSWERS),
    Plot("parse/invalid_rate", "invalid objects", "of all objects", share=True),
)


def find_inspector_pages(groups: Sequence[RunGroup], report: Path) -> dict[Path, str]:
    """Return the addresses of the inspector's pages that are there, by run folder. `report` is the file to link
    from."""
    pages = {}
    for folder in (run.folder for group in groups for run in group.runs):
        if (page := folder / INSPECTOR).is_file():
            relative = Path(os.path.relpath(page.resolve(), report.resolve().parent))
            pages[folder] = quote(relative.as_posix())
    return pages


def render_report(
    groups: Sequence[RunGroup], result: ComparisonResult | str, inspectors: Mapping[Path, str]
) -> str:
    """`result` is the comparison, or the reason why there is none. `inspectors` are addresses of the inspector's
    pages, by run folder."""
    runs = [run for group in groups for run in group.runs]
    ranges = divide_steps([run.series(metric) for metric in ("loss", "eval_f1_50") for run in runs])
    differences = find_differences(groups) if len(groups) > 1 else {}
    described = [_describe_group(group) for group in groups]
    took_time = {name for group in described for name, (_, share) in (group["times"] or {}).items() if share}
    name = format_value(" and ".join(group.name for group in groups))
    return render_page(
        "report.html",
        title=f"Run report: {name}",
        name=name,
        runs=len(runs),
        groups=described,
        seeds=len(runs) > len(groups),
        ranges=ranges,
        inspectors=inspectors,
        result=None if isinstance(result, str) else result,
        tables=[] if isinstance(result, str) else [_lay_out_table(one) for one in result.comparisons],
        titles={name: title for name, (title, _) in EVALUATED.items()},
        reason=result if isinstance(result, str) and len(groups) > 1 else "",
        sections=[
            ("loss", "Loss", _draw(list_loss_plots(groups), groups, ranges)),
            ("eval", "Evaluation on held-out images", _draw(_EVALUATION, groups, ranges)),
            ("answers", "Training answers", _draw(ANSWERS, groups, ranges)),
        ],
        phases={name: words for name, words in (PHASES | {"between": BETWEEN}).items() if name in took_time},
        differences={path: [format_value(value) for value in row] for path, row in differences.items()},
    )


_EVALUATION = tuple(Plot(f"eval_{name}", *words, share=True) for name, words in EVALUATED.items())


def list_loss_plots(groups: Sequence[RunGroup]) -> list[Plot]:
    """Return the plots of the loss and of each of its terms, which add up to it."""
    runs = [run for group in groups for run in group.runs]
    terms = dict.fromkeys(
        name for run in runs for name in run.log if "/" in name and run.term_weight(name) is not None
    )
    plots = [Plot("loss", "loss", "the weighted sum of the terms", wide=True)]
    for name in terms:
        weights = [group.runs[0].term_weight(name) for group in groups]
        shown = ["none" if weight is None else f"{weight:g}" for weight in weights]
        words = [f"{group.letter} {weight}" for group, weight in zip(groups, shown, strict=True)]
        plots.append(
            Plot(name, name, f"weight {shown[0] if len(set(shown)) == 1 else ', '.join(words)}", weight_of=name)
        )
    return [*plots, Plot("time/step", "seconds per step", "from the first rollout to the update")]


def _describe_group(group: RunGroup) -> dict[str, Any]:
    """Return what the page shows of a group: how far it got, notes and times."""
    count, planned = len(group.runs), group.runs[0].planned_steps
    last = [run.last_step for run in group.runs]
    reached = f"{min(last):,}" if min(last) == max(last) else f"{min(last):,} to {max(last):,}"
    words = f"{group.runs[0].variant}, {f'{count} runs, seeds' if count > 1 else 'seed'} {group.seeds}"
    words += f", step {reached}{f' of {planned:,}' if planned else ''}"
    if seconds := [wall for run in group.runs if (wall := run.series("seconds").last) is not None]:
        words += f", {'up to ' if count > 1 else ''}{max(seconds):,.0f} s"
    return {
        "letter": group.letter,
        "name": group.name,
        "mark": charts.MARKS[group.letter],
        "words": words,
        "notes": make_notes(group),
        "times": _measure_times(group),
    }


def _measure_times(group: RunGroup) -> dict[str, tuple[float, float]] | None:
    """Return seconds per step and the share of all time by phase, over the runs of a group. None without times."""
    totals = [total for run in group.runs if (total := total_by_phase(run.log)) is not None]
    everything = sum(sum(total.values()) for total in totals)
    if everything <= 0:
        return None
    steps = max(1, sum(int(run.log["loss"].steps[-1]) for run in group.runs if "loss" in run.log))
    seconds = {phase: sum(total[phase] for total in totals) for phase in totals[0]}
    return {phase: (value / steps, value / everything) for phase, value in seconds.items()}


def _draw(plots: Sequence[Plot], groups: Sequence[RunGroup], ranges: StepRanges) -> dict[str, Any]:
    """Return the figures of the plots that have values, each with the last values of its lines, and the titles of
    the plots that are 0 throughout: such a chart says no more than a word."""
    figures, zero = [], []
    for plot in plots:
        curves = [(group.letter, build_curve([plot.read(run) for run in group.runs], ranges)) for group in groups]
        known = [(letter, curve) for letter, curve in curves if curve is not None]
        if known and all(curve.is_zero for _, curve in known):
            zero.append(plot.title)
        elif known:
            size = charts.LARGE if plot.wide else charts.SMALL
            drawn = charts.lay_out(plot.title, known, size, (ranges.first, ranges.last), share=plot.share)
            last = [(letter, charts.format_number(curve.last)) for letter, curve in known]
            figures.append({"plot": plot, "chart": drawn, "last": last})
    return {"figures": figures, "zero": zero}


def _lay_out_table(comparison: GroupComparison) -> dict[str, Any]:
    """Return the rows of a comparison by what is better, the scale of the drawing of their intervals, and the
    names of the rates that are 0 in both."""
    rows = comparison.rows
    ends = [end for row in rows for pair in (row.image_interval, row.seed_interval) if pair for end in pair]
    reach = 1.05 * (max((abs(end) for end in ends), default=0.01) or 0.01)
    scale = charts.Scale(-reach, reach, INTERVAL_MARGIN, INTERVAL_WIDTH - INTERVAL_MARGIN)
    return {
        "pair": (comparison.base, comparison.other),
        "quality": comparison.quality,
        "seeds": any(row.seed_interval for row in rows),
        "ticks": [
            (min(max(scale.at(value), 16), INTERVAL_WIDTH - 16), "0" if value == 0 else f"{value:+g}")
            for value in charts.choose_ticks(scale.low, scale.high, 4)
        ],
        "scale": scale,
        "parts": {
            "Quality, higher is better": [row for row in rows if row.is_quality],
            "Behaviour, lower is better": [row for row in rows if not row.is_quality and (row.base or row.other)],
        },
        "never": [EVALUATED[row.name][0] for row in rows if not (row.is_quality or row.base or row.other)],
    }
