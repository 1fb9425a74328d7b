"""An evaluation report as one HTML file with its worst images. `page.css` and `page.js` are its style and
script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from coordexp.document import read_resource, render_document, save_page
from coordexp.evaluate.behaviour import DEFINITIONS
from coordexp.evaluate.matching import THRESHOLDS
from coordexp.evaluate.page.cards import choose_worst_images, render_card
from coordexp.evaluate.page.charts import draw_precision_recall, draw_thresholds
from coordexp.evaluate.report import MEASURES, EvaluationReport

HEADLINE = {
    "f1_50": "F1 at IoU 0.5",
    "f1_50_any_class": "F1 without class",
    "f1": "F1, mean 0.50:0.95",
    "ap": "AP",
    "ap_50": "AP at IoU 0.5",
    "ar_100": "AR, 100 per image",
    "mask_ap": "mask AP",
    "mean_iou": "mean IoU of matches",
}
FILTERS = {
    "": "all",
    "misses": "with misses",
    "extras": "with extras",
    "invalid": "with invalid objects",
    "truncated": "truncated",
}
KINDS = {
    "matched": "matched",
    "true": "true shape of a match",
    "missed": "missed: true, but not predicted",
    "extra": "extra: predicted, but not true",
}
MAX_COUNTS = 12  # names listed with their counts


@dataclass(frozen=True, slots=True)
class PageSource:
    """Image paths are relative to `folder`. `description` is shown under the title."""

    folder: Path
    description: str


def write_page(path: Path, report: EvaluationReport, source: PageSource, most: int) -> None:
    """Write the page with at most `most` images."""
    save_page(path, render_page(report, source, most))


def render_page(report: EvaluationReport, source: PageSource, most: int) -> str:
    tally = report.with_class.at(0.5)
    counts = f"{len(report.images)} images, {tally.true} true objects, {tally.predicted} valid predictions"
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    body = f"""<h1>Evaluation</h1><p class="origin">{escape(source.description)}<br>{counts}</p>{notes}
{_render_tiles(report)}
{_render_curves(report)}
<h2>Behaviour</h2>{_render_behaviour(report)}
<h2>By IoU</h2><p>Best assignment in each image, regardless of scores. Left: with class; right: without.</p>
{_render_thresholds(report)}
<h2>By class</h2><p>Click a column to sort by it.</p>{_render_classes(report)}
{_render_images(report, source.folder, most)}"""
    return render_document(
        f"Evaluation: {source.description}",
        body,
        styles=[read_resource(__name__, "page.css")],
        scripts=[read_resource(__name__, "page.js")],
    )


def _render_curves(report: EvaluationReport) -> str:
    if not report.curve:
        return '<h2>Curves</h2><p class="note">No curve: it needs objects, and a score for each of them.</p>'
    charts = draw_precision_recall(report.curve) + draw_thresholds(report.curve)
    return f'<h2>Curves</h2><p>At IoU 0.5, all classes together.</p><div class="charts">{charts}</div>'


def _render_images(report: EvaluationReport, folder: Path, most: int) -> str:
    worst = choose_worst_images(report.images, most)
    if not worst:
        return "<h2>Worst images</h2><p>No image has an error.</p>"
    cards = "\n".join(render_card(image, folder) for image in worst)
    return f"""<h2>Worst images</h2>
<p>{len(worst)} of {len(report.images)} images: lowest F1 at IoU 0.5, or most errors. Hover over a shape for its
class and score.</p>
<div class="controls"><span id="filters" role="group" aria-label="Filter">{_render_filters()}</span>
<label>Order <select id="order"><option value="f1">lowest F1 first</option><option value="errors">most errors
first</option></select></label><output id="count"></output></div>
<div class="legend">{_render_legend()}</div>
<div class="cards" id="cards">{cards}</div>"""


def _render_filters() -> str:
    return "".join(
        f'<button type="button" data-filter="{flag}" aria-pressed="{"false" if flag else "true"}">{name}</button>'
        for flag, name in FILTERS.items()
    )


def _render_legend() -> str:
    """Render each kind of outline, with a checkbox to hide it."""
    sample = '<polygon class="halo" points="2,3 38,3 38,17 2,17"/><polygon points="2,3 38,3 38,17 2,17"/>'
    return "".join(
        f'<label><input type="checkbox" checked data-kind="{kind}"><svg class="sample" viewBox="0 0 40 20">'
        f'<g class="{kind}">{sample}</g></svg>{words}</label>'
        for kind, words in KINDS.items()
    )


def _render_tiles(report: EvaluationReport) -> str:
    values = report.metrics()
    shown = [(title, values[name]) for name, title in HEADLINE.items() if name in values]
    cells = [f'<div class="tile"><b>{value:.3f}</b><span>{title}</span></div>' for title, value in shown]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _render_thresholds(report: EvaluationReport) -> str:
    names = ["F1", "precision", "recall", "any class: F1", "precision", "recall"]
    rows: list[list[str]] = []
    for k, threshold in enumerate(THRESHOLDS):
        tallies = (report.with_class.per_threshold[k], report.any_class.per_threshold[k])
        shares = [_format_share(getattr(tally, name)) for tally in tallies for name in MEASURES]
        rows.append([f"{threshold:.2f}", *shares])
    both = (report.with_class, report.any_class)
    means = [_format_share(scores.mean(name)) for scores in both for name in MEASURES]
    return _render_table(["IoU", *names], [*rows, ["mean", *means]])


def _render_classes(report: EvaluationReport) -> str:
    """Render the classes, most frequent first. The script sorts by other columns."""
    rows = []
    for desc, scores in sorted(report.classes.items(), key=lambda item: -item[1].at(0.5).true):
        tally = scores.at(0.5)
        average = report.boxes.classes[desc] if report.boxes else None
        shares = [*(getattr(tally, name) for name in MEASURES), scores.at(0.95).f1, average, scores.mean_iou]
        rows.append([escape(desc), str(tally.true), str(tally.predicted), *map(_format_share, shares)])
    heads = ["class", "true", "predicted", "F1 at 0.5", "precision", "recall", "F1 at 0.95", "AP", "mean IoU"]
    return _render_table(heads, rows, style="sortable")


def _render_behaviour(report: EvaluationReport) -> str:
    rows = []
    for name, rate in report.behaviour.rates.items():
        share = "&ndash;" if rate.value is None else f"{100 * rate.value:.1f} %"
        bar = f'<span class="bar"><i style="width:{100 * (rate.value or 0.0):.1f}%"></i></span>'
        rows.append([name.replace("_", " "), share, bar, f"{rate.count} of {rate.of}", escape(DEFINITIONS[name])])
    lists = _render_counts("Why objects were invalid", report.behaviour.reasons)
    lists += _render_counts("Classes that the data does not have", report.behaviour.unknown)
    return _render_table(["", "rate", "", "count", "what is counted"], rows, style="wordy") + lists


def _render_table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """`heads` and cells are HTML."""
    head = "".join(f"<th>{title}</th>" for title in heads)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    content = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{style}">{content}</table></div>'


def _render_counts(title: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    items = [f"<li>{escape(name)} <b>{count}</b></li>" for name, count in list(counts.items())[:MAX_COUNTS]]
    more = f"<li>and {len(counts) - MAX_COUNTS} more</li>" if len(counts) > MAX_COUNTS else ""
    return f'<h3>{title}</h3><ul class="counts">{"".join(items)}{more}</ul>'


def _format_share(value: float | None) -> str:
    return "&ndash;" if value is None else f"{value:.3f}"
