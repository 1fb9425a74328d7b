"""`coordexp evaluate`: how good predictions are, as a table, as JSON and as a page to look at."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordexp.cli.console import err, need, out, progress
from coordexp.cli.data_suggest import DECISIONS, SUGGESTIONS
from coordexp.errors import UserError
from coordexp.files import write_json

if TYPE_CHECKING:
    from coordexp.evaluate import EvaluationReport

MAX_CLASSES = 20  # on the terminal; the JSON and the page have all
MIN_WIDTH = 80  # columns that the tables need so that no number is cut


def evaluate(
    data: Annotated[
        Path, typer.Option("--data", "-d", exists=True, dir_okay=False, help="The records.", show_default=False)
    ],
    preds: Annotated[
        Path, typer.Option("--preds", "-p", help="preds.json of predict, or any COCO results.", show_default=False)
    ],
    report_file: Annotated[
        Path | None, typer.Option("--out", "-o", dir_okay=False, help="Write the report here, as JSON.")
    ] = None,
    page_file: Annotated[
        Path | None, typer.Option("--page", dir_okay=False, help="Write a page with the worst images here.")
    ] = None,
    images: Annotated[int, typer.Option(min=0, help="Images on the page, at most.")] = 60,
    labelled_share: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Of incomplete labels: the interval that `data audit` printed, e.g. 0.57 0.67."),
    ] = None,
    judged: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Of incomplete labels: a folder of `data suggest` on these predictions, with decisions.json.",
        ),
    ] = None,
) -> None:
    """Compare predictions with the ground truth: AP and AR, F1, and behaviour. Exits 1 if the files do not fit.

    If labels are incomplete, --judged or --labelled-share estimate precision, recall and F1 against all objects.
    """
    need("hotcoco", "PIL", extra="evaluate")
    if labelled_share is not None and not 0 < labelled_share[0] <= labelled_share[1] <= 1:
        raise UserError("--labelled-share is no interval of a share", "give two numbers, e.g. 0.57 0.67")
    from coordexp.data import RecordFile
    from coordexp.evaluate import evaluate_results, read_results, read_truth
    from coordexp.evaluate.predictions import answers_path

    if preds.is_file() and not answers_path(preds).exists():  # of another detector
        with progress(f"reading {preds}"):
            truth = read_truth(RecordFile(data, partial(err.print, markup=False)))
            results = read_results(preds, truth)
        with progress(f"evaluating {len(truth)} images"):
            report = evaluate_results(truth, results)
    else:
        report = evaluate_answers(data, preds)
    _print(report)
    is_incomplete = labelled_share is not None or judged is not None
    estimates = _estimate_quality(report, labelled_share, judged) if is_incomplete else {}
    if report_file is not None:
        report_file.parent.mkdir(parents=True, exist_ok=True)
        head = {"data": str(data), "preds": str(preds)}
        write_json(report_file, head | report.as_dict() | estimates)
        out.print(f"wrote {report_file}", markup=False)
    if page_file is not None:
        description = f"{preds.name} on {data.name}"
        with progress(f"drawing {page_file}"):
            from coordexp.pages.document import save_page
            from coordexp.pages.evaluation import render_evaluation

            save_page(page_file, render_evaluation(report, data.parent, description, images))
        out.print(f"wrote {page_file}", markup=False)


def _estimate_quality(
    report: "EvaluationReport", share: tuple[float, float] | None, judged: Path | None
) -> dict[str, Any]:
    """Print and return the quality of the predictions against all objects."""
    from coordexp.detect.audit import count_judged, read_judgements
    from coordexp.evaluate.incomplete import estimate_quality

    files = judged and (judged / SUGGESTIONS, judged / DECISIONS)
    judgements = read_judgements(*files, report) if files else [[] for _ in report.images]
    quality = estimate_quality(count_judged(report, judgements), share, judged is not None)
    out.print(Text("estimated, against all objects, with and without a label", style="bold"))
    for name, estimate in quality.estimates.items():
        out.print(f"  {name:<10} {estimate}")
    if judged is not None:
        more = "judge more images" if quality.more is None else f"judge {quality.more:,} more suggestions"
        known = "precision is known to 3 points"
        out.print(f"  {known}" if quality.more == 0 else f"  to know precision to 3 points, {more}")
    return asdict(quality)


def evaluate_answers(data: Path, preds: Path) -> "EvaluationReport":
    from coordexp.data import RecordFile
    from coordexp.evaluate import evaluate, read_predictions, read_truth

    with progress(f"reading {preds}"):
        truth = read_truth(RecordFile(data, partial(err.print, markup=False)))
        answers = read_predictions(preds, truth)
        if not truth:
            raise UserError(f"{data} has no records", "give the file that was predicted on")
    with progress(f"evaluating {len(truth)} images"):
        return evaluate(truth, answers)


def _print(report: "EvaluationReport") -> None:
    tally = report.with_class.at(0.5)
    out.print(f"{len(report.images)} images, {tally.true} true objects, {tally.predicted} valid predictions\n")
    wide = Console(width=max(out.width, MIN_WIDTH), highlight=False)
    for table in _make_tables(report):
        wide.print(table)
        wide.print()
    for title, counts in (("invalid", report.behaviour.reasons), ("unknown", report.behaviour.unknown)):
        if counts:
            listed = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:8])
            out.print(Text(f"{title}: {listed}{', ...' if len(counts) > 8 else ''}", style="dim"))
    for note in report.notes:
        out.print(Text(f"note: {note}", style="yellow"))


def _make_tables(report: "EvaluationReport") -> Iterable[Table]:
    shares = ("f1", "precision", "recall")
    values = report.metrics()
    rows: list[list[Cell]] = []
    for title, suffix in (("IoU 0.50", "_50"), ("IoU 0.95", "_95"), ("mean 0.50:0.95", "")):
        names = [f"{name}{suffix}{mode}" for mode in ("", "_any_class") for name in shares]
        rows.append([title, *map(values.get, names)])
    heads = ("F1", "precision", "recall", "any class: F1", "precision", "recall")
    yield _make_table(rows, "quality", *heads)

    names = ["ap", "ap_50", "ap_75", "ap_small", "ap_medium", "ap_large", "ar_1", "ar_10", "ar_100"]
    kinds = (("boxes", report.boxes), ("masks", report.masks))
    rows = [[kind, *map(coco.values.get, names)] for kind, coco in kinds if coco is not None]
    if rows:
        yield _make_table(rows, "COCO", "AP", "AP50", "AP75", "small", "medium", "large", "AR1", "AR10", "AR100")

    ranked = sorted(report.classes.items(), key=lambda item: -item[1].at(0.5).true)
    rows = []
    for desc, score in ranked[:MAX_CLASSES]:
        counts, average = score.at(0.5), report.boxes.classes[desc] if report.boxes else None
        measures = (counts.f1, counts.precision, counts.recall, score.mean_iou, average)
        rows.append([Text(desc), counts.true, counts.predicted, *measures])
    if len(ranked) > MAX_CLASSES:
        rows.append([Text(f"and {len(ranked) - MAX_CLASSES} more", style="dim")])
    yield _make_table(rows, "class, at IoU 0.50", "true", "predicted", "F1", "prec.", "recall", "IoU", "AP")

    rows = []
    for name, rate in report.behaviour.rates.items():
        share = "-" if rate.value is None else f"{100 * rate.value:.1f} %"
        rows.append([name.replace("_", " "), share, report.describe_count(name)])
    yield _make_table(rows, "behaviour", "rate", "count")

    if report.asked:
        rows = [[str(k), c.true, c.predicted, c.f1, c.precision, c.recall] for k, c in report.asked.items()]
        yield _make_table(rows, "classes asked, IoU 0.50", "true", "predicted", "F1", "precision", "recall")


Cell = str | Text | int | float | None


def _make_table(rows: Iterable[Sequence[Cell]], *heads: str) -> Table:
    """Return a table whose first column is for words and whose others are for numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k else "left", no_wrap=True, max_width=None if k else 24)
    for row in rows:
        table.add_row(*map(_format_cell, row))
    return table


def _format_cell(value: Cell) -> str | Text:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else value if isinstance(value, Text) else str(value)
