"""`coordexp shards`: how far the shards of a job are, and their results as one. Also `predict --shard`."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.console import bar, err, out, progress, sanitize
from coordexp.errors import UserError

if TYPE_CHECKING:
    from coordexp.data.shards import Shard
    from coordexp.detect.shards import PredictionJob

app = typer.Typer(help="Show and join the results of shards (`predict --shard`).", no_args_is_help=True)
FolderArgument = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="The folder of the shards.", show_default=False)
]


@app.command("status")
def status(folder: FolderArgument) -> None:
    """Say which shards are finished. Exits 1 if some are not."""
    from coordexp.data.shards import SHOWN, survey

    known = survey(folder)
    out.print(f"{len(known.finished):,} of {known.count:,} shards are finished", markup=False)
    for numbers, what in (
        (sorted(known.begun), "begun, by a process that is at work or was interrupted"),
        ([number for number in known.missing if number not in known.begun], "not begun"),
    ):
        if numbers:
            more = f" and {len(numbers) - SHOWN:,} more" if len(numbers) > SHOWN else ""
            out.print(f"{what}: {', '.join(map(str, numbers[:SHOWN]))}{more}", markup=False)
    raise typer.Exit(1 if known.missing else 0)


@app.command("merge")
def merge(
    folder: FolderArgument,
    to: Annotated[
        Path,
        typer.Option("--out", "-o", dir_okay=False, help="preds.json; preds.answers.jsonl is written beside it."),
    ],
) -> None:
    """Join the answers of all shards to the files that one `coordexp predict` would have written."""
    merge_predictions(folder, to)


def merge_predictions(folder: Path, to: Path) -> None:
    """Write the predictions of all shards, and say what is in them. Raise UserError if most images are missing."""
    from coordexp.data.shards import read_finished
    from coordexp.detect.predicting import refuse_leftovers
    from coordexp.detect.shards import merge_answers

    refuse_leftovers(to, samples=bool(read_finished(folder)[0].request.get("samples")), records=True)
    with progress(f"joining {folder}") as show:
        first, counts = merge_answers(folder, to, show)
    out.print(f"{counts['objects']} objects in {counts['images']} images: {to}", markup=False)
    if "dedup" in first.request:
        out.print(f"{counts['dropped']} objects dropped as duplicates")
    if counts["truncated"]:
        err.print(f"{counts['truncated']} answers were cut off at {first.request['max_new_tokens']} tokens")
    report_unreadable(counts["unreadable"], counts["images"])


def report_unreadable(unreadable: int, images: int) -> None:
    """Say how many images could not be read. Raise UserError if these are most of them."""
    if not unreadable:
        return
    fields = "their answers have finish_reason image_unreadable"
    message = f"{unreadable} of {images} images could not be read; {fields}"
    if unreadable * 2 > images:
        fix = "run `coordexp data doctor` on the data: it reports what is wrong with each image"
        raise UserError(message, fix)
    err.print(message, style="yellow")


def predict_shard(job: "PredictionJob", shard: "Shard") -> None:
    """Make one shard of a job, unless it is finished."""
    from coordexp.detect.shards import ShardPredictor

    with progress("loading"):
        predictor = ShardPredictor(job, warn)
    images = len(shard.cut(predictor.images, job.batch))
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with bar(f"answering shard {shard}", images) as advance:
            is_new = predictor(shard.number, advancing(advance))
    except KeyboardInterrupt as interruption:
        err.print("interrupted; the same command goes on with this shard")
        raise typer.Exit(143 if interruption.args else 130) from None
    finally:
        predictor.close()
    done = f"{images} images answered" if is_new else "it was finished before"
    out.print(f"shard {shard} in {job.folder}: {done}", markup=False)


def advancing(advance: Callable[[], None]) -> Callable[[int], None]:
    """Return a function that advances a bar to a number."""
    shown = 0

    def advance_to(number: int) -> None:
        nonlocal shown
        while shown < number:
            advance()
            shown += 1

    return advance_to


def warn(problem: str) -> None:
    err.print(sanitize(problem), markup=False, style="yellow")


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)
