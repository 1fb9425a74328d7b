"""`coordexp evaluate`: how good predictions are, as a table, as JSON and as a page to look at, and how certain the
difference between two models is."""

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
    from coordexp.evaluate.incomplete import Estimate, Floats

MAX_CLASSES = 20  # on the terminal; the JSON and the page have all
MIN_WIDTH = 80  # columns that the tables need so that no number is cut


def evaluate(
    data: Annotated[
        Path, typer.Option("--data", "-d", exists=True, dir_okay=False, help="The records.", show_default=False)
    ],
    preds: Annotated[
        list[Path],
        typer.Option(
            "--preds",
            "-p",
            help="preds.json of predict, or any COCO results. Twice: compare the second with the first.",
            show_default=False,
        ),
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
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Of incomplete labels: the folder of `data suggest` on each --preds, with decisions.json.",
        ),
    ] = None,
) -> None:
    """Compare predictions with the ground truth: AP and AR, F1, and behaviour. Exits 1 if the files do not fit.

    If labels are incomplete, --judged or --labelled-share estimate precision, recall and F1 against all objects.
    With two --preds, print the differences of the second from the first, with paired intervals.
    """
    need("hotcoco", "PIL", extra="evaluate")
    if labelled_share is not None and not 0 < labelled_share[0] <= labelled_share[1] <= 1:
        raise UserError("--labelled-share is no interval of a share", "give two numbers, e.g. 0.57 0.67")
    if len(preds) > (1 if page_file else 2) or len(judged or preds) != len(preds):
        raise UserError(
            f"{len(preds)} --preds and {len(judged or ())} --judged",
            "give one or two --preds, and as many --judged or none, in the same order; --page is about one",
        )
    from coordexp.detect.audit import count_judged, find_judged, read_judged
    from coordexp.detect.suggestions import SuggestionFile

    folders = [(folder / SUGGESTIONS, folder / DECISIONS) for folder in judged or ()]
    decided = [read_judged(*files) for files in folders] or [SuggestionFile()] * len(preds)
    reports = [evaluate_file(data, path) for path in preds]
    rows = [count_judged(find_judged(own, report)) for own, report in zip(decided, reports, strict=True)]
    is_incomplete = labelled_share is not None or bool(judged)
    names = list(map(str, preds))
    if len(reports) == 1:
        _print(reports[0])
        content = {"data": str(data), "preds": names[0]} | reports[0].as_dict()
    else:
        out.print(f"A  {names[0]}\nB  {names[1]}", markup=False)
        content = {"data": str(data), "preds": names} | _compare(reports, is_incomplete)
    if is_incomplete:
        content |= _estimate_quality(rows, labelled_share, bool(judged))
    if report_file is not None:
        report_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(report_file, content)
        out.print(f"wrote {report_file}", markup=False)
    if page_file is not None:
        description = f"{preds[0].name} on {data.name}"
        with progress(f"drawing {page_file}"):
            from coordexp.pages.document import save_page
            from coordexp.pages.evaluation import render_evaluation

            save_page(page_file, render_evaluation(reports[0], data.parent, description, images))
        out.print(f"wrote {page_file}", markup=False)


def _compare(reports: "Sequence[EvaluationReport]", is_incomplete: bool) -> dict[str, Any]:
    """Print and return how the second report differs from the first, according to the labels."""
    from coordexp.cli.report import make_difference_table
    from coordexp.evaluate.incomplete import Estimate
    from coordexp.evaluate.report import count_comparisons
    from coordexp.pages.comparison import bootstrap_differences, mark_biased

    counts = [count_comparisons([image.comparison for image in report.images]) for report in reports]
    differences = bootstrap_differences(counts[:1], counts[1:], resamples=2000)
    rows = {row.name: row for row in (mark_biased(differences) if is_incomplete else differences)}
    wide = Console(width=max(out.width, MIN_WIDTH), highlight=False)
    wide.print(make_difference_table(list(rows.values()), len(reports[0].images)))
    if not is_incomplete and (f1 := rows.get("f1_50")) and f1.image_interval:
        _print_verdict("F1 on the labels", Estimate(f1.value, *f1.image_interval), "evaluate more images")
    return {"differences": {name: asdict(row) for name, row in rows.items()}}


def _estimate_quality(
    rows: "Sequence[Floats]", share: tuple[float, float] | None, is_judged: bool
) -> dict[str, Any]:
    """Print and return the quality against all objects, and if there are two models, how they differ."""
    from coordexp.evaluate.incomplete import MEASURES, estimate_quality

    qualities = [estimate_quality(own, share, is_judged) for own in rows]
    out.print(Text("estimated, against all objects, with and without a label", style="bold"))
    result = qualities[0] if len(rows) == 1 else estimate_quality(rows[1], share, is_judged, base=rows[0])
    for name in MEASURES:
        cells = [str(quality.estimates.get(name, "-")) for quality in qualities]
        if len(rows) == 2 and name in result.estimates:
            cells.append(_format_difference(result.estimates[name]))
        out.print(f"  {name:<10} {'   '.join(cells)}", markup=False)
    matched = [estimate_quality(own, None, False).estimates.get("precision") for own in rows]
    if share and not is_judged and any(known and known.low > share[1] for known in matched):
        note = "more predicted objects match a label than the labelled share allows: judge suggestions (--judged)"
        out.print(Text(f"note: {note}", style="yellow"))
    if len(rows) == 1:
        out.print(f"  {_advise('precision', result.more, is_judged)}")
        return asdict(result)
    if f1 := result.estimates.get("f1"):
        _print_verdict("estimated F1", f1, _advise("it", result.more, is_judged))
    return {"estimates": [asdict(quality) for quality in qualities], "difference": asdict(result)}


def _advise(subject: str, more: int | None, is_judged: bool) -> str:
    """Return what makes an interval narrow. `more` is how many more judgements do, or None if they cannot."""
    if more == 0:
        return f"{subject} is known to 3 points"
    enough = "judge more images" if more is None else f"judge {more:,} more suggestions of each model"
    return f"to know {subject} to 3 points, {enough if is_judged else 'judge suggestions (--judged)'}"


def _print_verdict(measure: str, difference: "Estimate", advice: str) -> None:
    better = "B" if difference.low > 0 else "A" if difference.high < 0 else None
    verdict = f"use {better}" if better else f"no clear difference; {advice}"
    out.print(Text(f"B: {measure} {_format_difference(difference)}: {verdict}", style="bold"))


def _format_difference(difference: "Estimate") -> str:
    return f"{difference.value:+.3f} [{difference.low:+.3f} to {difference.high:+.3f}]"


def evaluate_file(data: Path, preds: Path) -> "EvaluationReport":
    """Evaluate predictions, or the results of another detector, which have no answers."""
    from coordexp.data import RecordFile
    from coordexp.evaluate import evaluate, evaluate_results, read_predictions, read_results, read_truth
    from coordexp.evaluate.predictions import answers_path

    with progress(f"reading {preds}"):
        truth = read_truth(RecordFile(data, partial(err.print, markup=False)))
        if preds.is_file() and not answers_path(preds).exists():
            compare = partial(evaluate_results, truth, read_results(preds, truth))
        else:
            compare = partial(evaluate, truth, read_predictions(preds, truth))
        if not truth:
            raise UserError(f"{data} has no records", "give the file that was predicted on")
    with progress(f"evaluating {len(truth)} images"):
        return compare()


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
