"""`coordexp evaluate`: how good are these predictions, in a table, as JSON and as a page to look at?"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordexp.cli.console import need, out, progress, stop
from coordexp.files import write_json

if TYPE_CHECKING:
    from coordexp.evaluate import Answer, Report
    from coordexp.evaluate.predictions import Truth

CLASSES = 20  # shown on a terminal; the JSON and the page have all
NARROWEST = 80  # columns that the tables need; narrower, numbers would lose their digits


class Scores(StrEnum):
    own = "own"
    constant = "constant"
    shuffled = "shuffled"


def evaluate(
    data: Annotated[
        Path, typer.Option("--data", "-d", exists=True, dir_okay=False, help="The records.", show_default=False)
    ],
    preds: Annotated[
        Path, typer.Option("--preds", "-p", help="preds.json, with its answers beside it.", show_default=False)
    ],
    report_file: Annotated[
        Path | None, typer.Option("--out", "-o", dir_okay=False, help="Write the report here, as JSON.")
    ] = None,
    page_file: Annotated[
        Path | None, typer.Option("--page", dir_okay=False, help="Write a page with the worst images here.")
    ] = None,
    images: Annotated[int, typer.Option(min=0, help="Images on the page, at most.")] = 60,
    scores: Annotated[
        Scores, typer.Option(help="Rank by own scores; constant or shuffled show what AP is without them.")
    ] = Scores.own,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    answered_only: Annotated[
        bool, typer.Option("--answered-only", help="Leave out images of the data that have no answer.")
    ] = False,
) -> None:
    """Compare predictions with the truth: AP and AR, F1, and behaviour. Exits 1 where the files do not fit."""
    need("hotcoco", "PIL", extra="evaluate")
    with progress(f"reading {preds}"):
        truth, answers = _read(data, preds, answered_only)
    with progress(f"evaluating {len(truth)} images"):
        from coordexp.evaluate import PredictionError, ScoreMode, rescored
        from coordexp.evaluate import evaluate as run

        try:
            report = run(truth, rescored(answers, ScoreMode(scores.value), seed))
        except PredictionError as error:
            stop(str(error))
    _print(report, scores)
    if report_file is not None:
        report_file.parent.mkdir(parents=True, exist_ok=True)
        head = {"data": str(data), "preds": str(preds), "scores": scores.value}
        write_json(report_file, head | report.as_dict())
        out.print(f"wrote {report_file}", markup=False)
    if page_file is not None:
        words = f"{preds.name} on {data.name}" + ("" if scores is Scores.own else f", {scores.value} scores")
        _write_page(page_file, report, data.parent, words, images)


def _write_page(path: Path, report: "Report", folder: Path, words: str, most: int) -> None:
    with progress(f"drawing {path}"):
        from coordexp.evaluate.page import Origin, write_page

        write_page(path, report, Origin(folder, words), most)
    out.print(f"wrote {path}", markup=False)


def _read(data: Path, preds: Path, answered_only: bool) -> "tuple[Truth, tuple[Answer, ...]]":
    from coordexp.data import RecordError, RecordFile
    from coordexp.evaluate import PredictionError, check_predictions, read_predictions, read_truth

    try:
        predictions = read_predictions(preds)
        truth = read_truth(RecordFile(data))
        check_predictions(predictions, truth)
    except (RecordError, PredictionError) as error:
        stop(str(error))
    answered = {answer.image_id for answer in predictions.answers}
    kept = [each for each in truth if each[0] in answered] if answered_only else truth
    if not kept:
        counts = f"{len(truth)} records and {len(answered)} answers"
        stop(f"{data}: no image to evaluate\n  there are {counts}; give files that belong together")
    return kept, predictions.answers


def _print(report: "Report", scores: Scores) -> None:
    tally = report.with_class.at(0.5)
    out.print(f"{len(report.images)} images, {tally.true} true objects, {tally.found} valid predicted ones\n")
    tables = [_found(report), _classes(report), _behaviour(report)]
    if report.boxes is not None:
        tables.insert(1, _average(report, scores))
    wide = Console(width=max(out.width, NARROWEST), highlight=False)
    for table in tables:
        wide.print(table)
        wide.print()
    for title, counts in (("invalid", report.behaviour.reasons), ("unknown", report.behaviour.unknown)):
        if counts:
            listed = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:8])
            out.print(Text(f"{title}: {listed}{', ...' if len(counts) > 8 else ''}", style="dim"))
    for note in report.notes:
        out.print(Text(f"note: {note}", style="yellow"))


def _table(*heads: str) -> Table:
    """Words to the left, numbers to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k else "left", no_wrap=True, max_width=None if k else 24)
    return table


def _found(report: "Report") -> Table:
    values = report.flat()
    table = _table("found", "F1", "precision", "recall", "any class: F1", "precision", "recall")
    for title, suffix in (("IoU 0.50", "_50"), ("IoU 0.95", "_95"), ("mean 0.50:0.95", "")):
        names = [f"{name}{suffix}{mode}" for mode in ("", "_any_class") for name in ("f1", "precision", "recall")]
        table.add_row(title, *(_number(values.get(name)) for name in names))
    return table


def _average(report: "Report", scores: Scores) -> Table:
    title = "COCO" if scores is Scores.own else f"COCO, {scores.value}"
    table = _table(title, "AP", "AP50", "AP75", "small", "medium", "large", "AR1", "AR10", "AR100")
    names = ("ap", "ap_50", "ap_75", "ap_small", "ap_medium", "ap_large", "ar_1", "ar_10", "ar_100")
    for kind, coco in (("boxes", report.boxes), ("masks", report.masks)):
        if coco is not None:
            table.add_row(kind, *(_number(coco.values[name]) for name in names))
    return table


def _classes(report: "Report") -> Table:
    table = _table("class, at IoU 0.50", "true", "found", "F1", "prec.", "recall", "IoU", "AP")
    ranked = sorted(report.classes.items(), key=lambda each: -each[1].at(0.5).true)
    for desc, scores in ranked[:CLASSES]:
        tally = scores.at(0.5)
        average = report.boxes.classes[desc] if report.boxes else None
        shares = (tally.f1, tally.precision, tally.recall, scores.mean_iou, average)
        table.add_row(Text(desc), str(tally.true), str(tally.found), *map(_number, shares))
    if len(ranked) > CLASSES:
        table.add_row(Text(f"and {len(ranked) - CLASSES} more", style="dim"))
    return table


def _behaviour(report: "Report") -> Table:
    table = _table("behaviour", "rate", "count")
    for name, rate in report.behaviour.rates.items():
        share = "-" if rate.value is None else f"{100 * rate.value:.1f} %"
        table.add_row(name.replace("_", " "), share, f"{rate.count} of {rate.of}")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
