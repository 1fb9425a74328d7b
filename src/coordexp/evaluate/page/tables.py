"""The numbers of a report as HTML: headline, scores by IoU, classes, behaviour. Text of users is escaped."""

from collections.abc import Mapping, Sequence
from html import escape

from coordexp.evaluate.behaviour import DEFINITIONS
from coordexp.evaluate.matching import THRESHOLDS
from coordexp.evaluate.report import MEASURES, Report

HEADLINE = {
    "f1_50": "F1 at IoU 0.5",
    "f1_50_any_class": "F1 without class",
    "f1": "F1, mean 0.50:0.95",
    "ap": "AP",
    "ap_50": "AP at IoU 0.5",
    "ar_100": "AR, 100 an image",
    "mask_ap": "mask AP",
    "mean_iou": "mean IoU of matches",
}
RATES = {name: name.replace("_", " ") for name in DEFINITIONS}


def number(value: float | None) -> str:
    return "&ndash;" if value is None else f"{value:.3f}"


def tiles(report: Report) -> str:
    values = report.flat()
    shown = [(title, values[name]) for name, title in HEADLINE.items() if name in values]
    cells = [f'<div class="tile"><b>{value:.3f}</b><span>{title}</span></div>' for title, value in shown]
    return f'<div class="tiles">{"".join(cells)}</div>'


def by_threshold(report: Report) -> str:
    names = ["F1", "precision", "recall", "any class: F1", "precision", "recall"]
    rows: list[list[str]] = []
    for k, threshold in enumerate(THRESHOLDS):
        tallies = (report.with_class.tallies[k], report.any_class.tallies[k])
        shares = [number(getattr(tally, name)) for tally in tallies for name in MEASURES]
        rows.append([f"{threshold:.2f}", *shares])
    means = [number(scores.mean(name)) for scores in (report.with_class, report.any_class) for name in MEASURES]
    return table(["IoU", *names], [*rows, ["mean", *means]])


def by_class(report: Report) -> str:
    """Most frequent first; the columns can be clicked."""
    rows = []
    for desc, scores in sorted(report.classes.items(), key=lambda each: -each[1].at(0.5).true):
        tally = scores.at(0.5)
        average = report.boxes.classes[desc] if report.boxes else None
        shares = [number(getattr(tally, name)) for name in MEASURES]
        strict = number(scores.at(0.95).f1)
        rows.append(
            [
                escape(desc),
                str(tally.true),
                str(tally.found),
                *shares,
                strict,
                number(average),
                number(scores.mean_iou),
            ]
        )
    heads = ["class", "true", "found", "F1 at 0.5", "precision", "recall", "F1 at 0.95", "AP", "mean IoU"]
    return table(heads, rows, style="sortable")


def behaviour(report: Report) -> str:
    rows = []
    for name, rate in report.behaviour.rates.items():
        share = "&ndash;" if rate.value is None else f"{100 * rate.value:.1f} %"
        bar = f'<span class="bar"><i style="width:{100 * (rate.value or 0.0):.1f}%"></i></span>'
        rows.append([RATES[name], share, bar, f"{rate.count} of {rate.of}", escape(DEFINITIONS[name])])
    lists = _counts("Why objects were invalid", report.behaviour.reasons)
    lists += _counts("Classes that the data does not have", report.behaviour.unknown)
    return table(["", "rate", "", "count", "what is counted"], rows, style="wordy") + lists


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{title}</th>" for title in heads)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{style}">{inner}</table></div>'


def _counts(title: str, counts: Mapping[str, int], most: int = 12) -> str:
    if not counts:
        return ""
    shown = [f"<li>{escape(name)} <b>{count}</b></li>" for name, count in list(counts.items())[:most]]
    more = f"<li>and {len(counts) - most} more</li>" if len(counts) > most else ""
    return f'<h3>{title}</h3><ul class="counts">{"".join(shown)}{more}</ul>'
