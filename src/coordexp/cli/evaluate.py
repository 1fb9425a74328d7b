"""`coordexp evaluate`: how good predictions are, as a table, as JSON and as a page to look at, and how certain the
difference between two models is."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from coordexp.cli.console import err, need, out, progress
from coordexp.cli.data_suggest import DECISIONS, SUGGESTIONS
from coordexp.cli.report import LabelledShareOption, make_table, print_differences, print_quality, print_wide
from coordexp.errors import UserError
from coordexp.files import write_json

if TYPE_CHECKING:
    from coordexp.evaluate import EvaluationReport

MAX_CLASSES = 20  # on the terminal; the JSON and the page have all


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
        Path | None,
        typer.Option("--page", dir_okay=False, help="Write a page here: the worst images, or what changed most."),
    ] = None,
    images: Annotated[int, typer.Option(min=0, help="Images on the page, at most.")] = 60,
    labelled_share: LabelledShareOption = None,
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
    if len(preds) > 2 or len(judged or preds) != len(preds):
        raise UserError(
            f"{len(preds)} --preds and {len(judged or ())} --judged",
            "give one or two --preds, and as many --judged or none, in the same order",
        )
    from coordexp.detect.audit import count_judged, find_judged, read_judged
    from coordexp.detect.suggestions import SuggestionFile
    from coordexp.evaluate.incomplete import compare_quality

    decided = [read_judged(folder / SUGGESTIONS, folder / DECISIONS) for folder in judged or ()]
    reports = [evaluate_file(data, path) for path in preds]
    pairs = zip(reports, decided or [SuggestionFile()] * len(reports), strict=True)
    rows = [[count_judged(find_judged(own, report))] for report, own in pairs]
    quality = compare_quality(rows, labelled_share, bool(judged)) if judged or labelled_share else None
    content: dict[str, Any] = {"data": str(data), "preds": [str(path) for path in preds]}
    if len(reports) == 1:
        _print(reports[0])
        content |= {"preds": str(preds[0])} | reports[0].as_dict()
    else:
        out.print(f"A  {preds[0]}\nB  {preds[1]}", markup=False)
        content |= {"differences": _compare(reports, is_incomplete=quality is not None)}
    if quality:
        print_quality(quality)
        content |= quality.content
    if report_file is not None:
        report_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(report_file, content)
        out.print(f"wrote {report_file}", markup=False)
    if page_file is not None:
        subject = preds[0].name if len(preds) == 1 else f"B {preds[1]} against A {preds[0]}"
        _write_page(page_file, reports, f"{subject} on {data.name}", data.parent, images)


def _compare(reports: "Sequence[EvaluationReport]", is_incomplete: bool) -> dict[str, Any]:
    """Print and return how the second report differs from the first, according to the labels."""
    from coordexp.evaluate.report import count_comparisons
    from coordexp.intervals import Estimate, bootstrap_differences, mark_biased

    base, other = ([count_comparisons([image.comparison for image in report.images])] for report in reports)
    differences = bootstrap_differences(base, other)
    rows = {row.name: row for row in (mark_biased(differences) if is_incomplete else differences)}
    print_differences(list(rows.values()), len(reports[0].images))
    if not is_incomplete and (f1 := rows.get("f1_50")) and f1.image_interval:
        text = Estimate(f1.value, *f1.image_interval).describe_verdict("F1 on the labels", "evaluate more images")
        out.print(Text(text, style="bold"))
    return {name: asdict(row) for name, row in rows.items()}


def _write_page(
    file: Path, reports: "Sequence[EvaluationReport]", description: str, folder: Path, images: int
) -> None:
    from coordexp.pages.document import save_page
    from coordexp.pages.evaluation import render_evaluation

    *base, report = reports
    with progress(f"drawing {file}"):
        save_page(file, render_evaluation(report, folder, description, images, *base))
    out.print(f"wrote {file}", markup=False)


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
    for table in _make_tables(report):
        print_wide(table)
        out.print()
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
    table = make_table(*heads)
    for row in rows:
        cells = ("-" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row)
        table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in cells))
    return table
