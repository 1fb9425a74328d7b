"""`coordexp evaluate`: how good predictions are, as a table, as JSON and as a page to look at."""

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordexp.cli.console import err, need, out, progress
from coordexp.errors import UserError
from coordexp.files import write_json

if TYPE_CHECKING:
    from coordexp.evaluate import EvaluationReport, ImageAnswer
    from coordexp.evaluate.predictions import Truth
    from coordexp.evaluate.samples import SamplesReport

MAX_CLASSES = 20  # on the terminal; the JSON and the page have all
MIN_WIDTH = 80  # columns that the tables need so that no number is cut


class ScoreSource(StrEnum):
    """The scores that predictions are ranked by."""

    own = "own"
    constant = "constant"
    shuffled = "shuffled"


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
    scores: Annotated[
        ScoreSource, typer.Option(help="Rank by own scores; constant or shuffled show what AP is without them.")
    ] = ScoreSource.own,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    answered_only: Annotated[
        bool, typer.Option("--answered-only", help="Leave out images of the data that have no answer.")
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Also evaluate this many sampled answers per image (predict --samples)."),
    ] = None,
) -> None:
    """Compare predictions with the ground truth: AP and AR, F1, and behaviour. Exits 1 if the files do not fit."""
    need("hotcoco", "PIL", extra="evaluate")
    from coordexp.evaluate.predictions import answers_path

    if preds.is_file() and not answers_path(preds).exists():
        report, sampled = _evaluate_results(data, preds, scores, answered_only or samples is not None), None
    else:
        report, sampled = _evaluate_answers(data, preds, scores, seed, answered_only, samples)
    _print(report, scores, sampled)
    if report_file is not None:
        report_file.parent.mkdir(parents=True, exist_ok=True)
        head = {"data": str(data), "preds": str(preds), "scores": scores.value}
        write_json(report_file, head | report.as_dict() | ({"samples": sampled.as_dict()} if sampled else {}))
        out.print(f"wrote {report_file}", markup=False)
    if page_file is not None:
        description = f"{preds.name} on {data.name}"
        description += "" if scores is ScoreSource.own else f", {scores.value} scores"
        with progress(f"drawing {page_file}"):
            from coordexp.pages.document import save_page
            from coordexp.pages.evaluation import render_evaluation

            save_page(page_file, render_evaluation(report, data.parent, description, images))
        out.print(f"wrote {page_file}", markup=False)


def _evaluate_answers(
    data: Path, preds: Path, scores: ScoreSource, seed: int, answered_only: bool, samples: int | None
) -> "tuple[EvaluationReport, SamplesReport | None]":
    with progress(f"reading {preds}"):
        truth, answers = _read(data, preds, answered_only)
    with progress(f"evaluating {len(truth)} images"):
        from coordexp.evaluate import ScoreMode, evaluate, replace_scores

        report = evaluate(truth, replace_scores(answers, ScoreMode(scores.value), seed))
        return report, None if samples is None else _evaluate_samples(truth, answers, preds, samples)


def _evaluate_results(data: Path, preds: Path, scores: ScoreSource, needs_answers: bool) -> "EvaluationReport":
    """Evaluate a COCO results file that has no answers beside it, such as that of another detector."""
    from coordexp.data import RecordFile
    from coordexp.evaluate import evaluate_results, read_results, read_truth
    from coordexp.evaluate.predictions import answers_path

    if needs_answers or scores is not ScoreSource.own:
        raise UserError(
            f"{answers_path(preds)} does not exist, and --samples, --answered-only and --scores need it",
            "leave these options out, or keep both files of `coordexp predict` together",
        )
    with progress(f"reading {preds}"):
        truth = read_truth(RecordFile(data, partial(err.print, markup=False)))
        results = read_results(preds, truth)
    with progress(f"evaluating {len(truth)} images"):
        return evaluate_results(truth, results)


def _read(data: Path, preds: Path, answered_only: bool) -> "tuple[Truth, tuple[ImageAnswer, ...]]":
    from coordexp.data import RecordFile
    from coordexp.evaluate import read_checked_predictions

    truth, answers = read_checked_predictions(preds, RecordFile(data, partial(err.print, markup=False)))
    answered = {answer.image_id for answer in answers}
    evaluated = [(id, record) for id, record in truth if id in answered] if answered_only else truth
    if not evaluated:
        counts = f"{len(truth)} records and {len(answered)} answers"
        raise UserError(f"{data}: no image to evaluate", f"there are {counts}; give files that belong together")
    return evaluated, answers


def _evaluate_samples(
    truth: "Truth", answers: "Sequence[ImageAnswer]", preds: Path, count: int
) -> "SamplesReport":
    from coordexp.evaluate.predictions import read_samples
    from coordexp.evaluate.samples import evaluate_samples

    return evaluate_samples(truth, answers, read_samples(preds, count, [image_id for image_id, _ in truth]))


def _print(report: "EvaluationReport", scores: ScoreSource, sampled: "SamplesReport | None") -> None:
    tally = report.with_class.at(0.5)
    out.print(f"{len(report.images)} images, {tally.true} true objects, {tally.predicted} valid predictions\n")
    tables = [_make_quality_table(report), _make_class_table(report), _make_behaviour_table(report)]
    if report.boxes is not None:
        tables.insert(1, _make_coco_table(report, scores))
    if report.asked:
        tables.append(_make_request_table(report))
    if sampled is not None:
        tables.append(_make_samples_table(sampled))
    wide = Console(width=max(out.width, MIN_WIDTH), highlight=False)
    for table in tables:
        wide.print(table)
        wide.print()
    if sampled is not None:
        out.print(Text(f"{sampled.explanation}\n"))
    for title, counts in (("invalid", report.behaviour.reasons), ("unknown", report.behaviour.unknown)):
        if counts:
            listed = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:8])
            out.print(Text(f"{title}: {listed}{', ...' if len(counts) > 8 else ''}", style="dim"))
    for note in report.notes:
        out.print(Text(f"note: {note}", style="yellow"))


def _make_table(*heads: str) -> Table:
    """Return an empty table whose first column is for words and whose others are for numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k else "left", no_wrap=True, max_width=None if k else 24)
    return table


def _make_quality_table(report: "EvaluationReport") -> Table:
    values = report.metrics()
    table = _make_table("quality", "F1", "precision", "recall", "any class: F1", "precision", "recall")
    for title, suffix in (("IoU 0.50", "_50"), ("IoU 0.95", "_95"), ("mean 0.50:0.95", "")):
        names = [f"{name}{suffix}{mode}" for mode in ("", "_any_class") for name in ("f1", "precision", "recall")]
        table.add_row(title, *(_format_number(values.get(name)) for name in names))
    return table


def _make_coco_table(report: "EvaluationReport", scores: ScoreSource) -> Table:
    title = "COCO" if scores is ScoreSource.own else f"COCO, {scores.value}"
    table = _make_table(title, "AP", "AP50", "AP75", "small", "medium", "large", "AR1", "AR10", "AR100")
    names = ("ap", "ap_50", "ap_75", "ap_small", "ap_medium", "ap_large", "ar_1", "ar_10", "ar_100")
    for kind, coco in (("boxes", report.boxes), ("masks", report.masks)):
        if coco is not None:
            table.add_row(kind, *(_format_number(coco.values[name]) for name in names))
    return table


def _make_class_table(report: "EvaluationReport") -> Table:
    table = _make_table("class, at IoU 0.50", "true", "predicted", "F1", "prec.", "recall", "IoU", "AP")
    ranked = sorted(report.classes.items(), key=lambda item: -item[1].at(0.5).true)
    for desc, scores in ranked[:MAX_CLASSES]:
        tally = scores.at(0.5)
        average = report.boxes.classes[desc] if report.boxes else None
        shares = (tally.f1, tally.precision, tally.recall, scores.mean_iou, average)
        table.add_row(Text(desc), str(tally.true), str(tally.predicted), *map(_format_number, shares))
    if len(ranked) > MAX_CLASSES:
        table.add_row(Text(f"and {len(ranked) - MAX_CLASSES} more", style="dim"))
    return table


def _make_behaviour_table(report: "EvaluationReport") -> Table:
    table = _make_table("behaviour", "rate", "count")
    for name, rate in report.behaviour.rates.items():
        share = "-" if rate.value is None else f"{100 * rate.value:.1f} %"
        table.add_row(name.replace("_", " "), share, report.describe_count(name))
    return table


def _make_request_table(report: "EvaluationReport") -> Table:
    table = _make_table("classes asked, IoU 0.50", "true", "predicted", "F1", "precision", "recall")
    for number, counts in report.asked.items():
        shares = map(_format_number, (counts.f1, counts.precision, counts.recall))
        table.add_row(str(number), str(counts.true), str(counts.predicted), *shares)
    return table


def _make_samples_table(report: "SamplesReport") -> Table:
    table = _make_table("samples, IoU 0.50", "F1", "precision", "recall", "any class: F1", "precision", "recall")
    rows = {"greedy": report.greedy} | {f"best of {k}": counts for k, counts in report.best.items()}
    for title, counts in rows.items():
        sides = (counts.with_class, counts.any_class)
        shares = [share for side in sides for share in (side.f1, side.precision, side.recall)]
        table.add_row(title, *map(_format_number, shares))
    recalls = [_format_number(rate.value) for rate in (report.union, report.union_any_class)]
    table.add_row(f"union of {report.count}", "", "", recalls[0], "", "", recalls[1])
    return table


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
