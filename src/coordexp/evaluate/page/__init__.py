"""A report as one HTML file with pictures inside of it. `page.css` and `page.js` are its parts."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from coordexp.document import document, part, save
from coordexp.evaluate.page.charts import precision_recall_chart, threshold_chart
from coordexp.evaluate.page.pictures import card, worst_images
from coordexp.evaluate.page.tables import behaviour, by_class, by_threshold, tiles
from coordexp.evaluate.report import Report

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
    "missed": "missed: true, and not found",
    "extra": "extra: found, and not true",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a report comes from: image paths are relative to `folder`, `words` go under the title."""

    folder: Path
    words: str


def write_page(path: Path, report: Report, origin: Origin, most: int) -> None:
    """With at most `most` images."""
    save(path, page(report, origin, most))


def page(report: Report, origin: Origin, most: int) -> str:
    tally = report.with_class.at(0.5)
    counts = f"{len(report.images)} images, {tally.true} true objects, {tally.found} valid predicted ones"
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    body = f"""<h1>Evaluation</h1><p class="origin">{escape(origin.words)}<br>{counts}</p>{notes}
{tiles(report)}
{_curves(report)}
<h2>Behaviour</h2>{behaviour(report)}
<h2>By IoU</h2><p>Best assignment in each image, whatever the scores. Left with class, right without.</p>
{by_threshold(report)}
<h2>By class</h2><p>Click a column to sort by it.</p>{by_class(report)}
{_images(report, origin.folder, most)}"""
    return document(
        f"Evaluation: {origin.words}",
        body,
        styles=[part(__name__, "page.css")],
        scripts=[part(__name__, "page.js")],
    )


def _curves(report: Report) -> str:
    if not report.curve:
        return '<h2>Curves</h2><p class="note">No curve: it takes objects, and a score for each of them.</p>'
    charts = precision_recall_chart(report.curve) + threshold_chart(report.curve)
    return f'<h2>Curves</h2><p>At IoU 0.5, all classes together.</p><div class="charts">{charts}</div>'


def _images(report: Report, folder: Path, most: int) -> str:
    shown = worst_images(report.images, most)
    if not shown:
        return "<h2>Worst images</h2><p>No image has an error.</p>"
    cards = "\n".join(card(image, folder) for image in shown)
    return f"""<h2>Worst images</h2>
<p>{len(shown)} of {len(report.images)} images: lowest F1 at IoU 0.5, or most errors. Hover over a shape for its
class and score.</p>
<div class="controls"><span id="filters" role="group" aria-label="Filter">{_filters()}</span>
<label>Order <select id="order"><option value="f1">lowest F1 first</option><option value="errors">most errors
first</option></select></label><output id="count"></output></div>
<div class="legend">{_legend()}</div>
<div class="cards" id="cards">{cards}</div>"""


def _filters() -> str:
    return "".join(
        f'<button type="button" data-filter="{flag}" aria-pressed="{"false" if flag else "true"}">{name}</button>'
        for flag, name in FILTERS.items()
    )


def _legend() -> str:
    """Each kind of outline as it is drawn, with a box to hide it."""
    sample = '<polygon class="halo" points="2,3 38,3 38,17 2,17"/><polygon points="2,3 38,3 38,17 2,17"/>'
    return "".join(
        f'<label><input type="checkbox" checked data-kind="{kind}"><svg class="sample" viewBox="0 0 40 20">'
        f'<g class="{kind}">{sample}</g></svg>{words}</label>'
        for kind, words in KINDS.items()
    )
