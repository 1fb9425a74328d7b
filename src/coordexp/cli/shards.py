"""`coordexp shards`: how far the shards of a job are, and their results as one. Also `--shard` and `--workers`."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordexp.cli.console import (
    JsonOption,
    bar,
    err,
    interruptible,
    need_new,
    need_new_file,
    out,
    progress,
    sanitize,
)
from coordexp.errors import UserError

if TYPE_CHECKING:
    from coordexp.data.importers import ImportJob
    from coordexp.data.pack import ExportJob
    from coordexp.data.shards import Manifest, Shard
    from coordexp.detect.shards import PredictionJob

SHARDS_PER_WORKER = 8  # so that workers of different speed end together

app = typer.Typer(
    help="Show and join what `predict --shard`, `data doctor --shard` and the like made.", no_args_is_help=True
)
PartOption = Annotated[
    str | None,
    typer.Option(help="Of large files: only a part of them, 0/16 to 15/16. Finished ones are skipped anyway."),
]
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
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Of predictions: preds.json, as for `predict`. Of suggestions: a new folder. Of records: JSONL.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the files that one `predict` or `data suggest` would have written, or print the report of one `data
    doctor`, or write the records of an import or export to one file."""
    from coordexp.data.shards import list_finished, read_finished

    command = list_finished(folder)[0].command  # before all results are read
    if command == "export parquet":
        raise UserError("shards of Parquet are not joined", f"read all of them: {folder}/*.parquet")
    is_doctor = command == "doctor"
    if is_doctor and to is not None:
        raise UserError("--out has no effect for shards of `data doctor`", "leave it out, or add --json")
    if not is_doctor and (to is None or as_json):
        file = "preds.json" if command == "predict" else "train.jsonl"
        raise UserError(f"the results of `{command}` are written to files", f"give --out {file}, without --json")
    manifests = read_finished(folder)
    if to is not None:
        suggest = manifests[0].request.get("suggest")
        if command != "predict":
            merge_records(folder, manifests, to)
        elif suggest is None:
            need_file(to)
            merge_predictions(folder, manifests, to)
        else:
            merge_suggestions(folder, manifests, to, suggest)
        return
    from coordexp.cli.data import show_report
    from coordexp.data.doctor.shards import merge_facts

    show_report(merge_facts(folder, manifests), manifests[0].request["max_length"], as_json)


def run_shards(job: "ImportJob | ExportJob", shard: str | None, message: str) -> "list[Manifest]":
    """Make those of the shards of a job, or of a part of them, that are not finished. Return the manifests of all
    of them."""
    from coordexp.data.shards import Shard, has_shards, survey

    if job.folder.suffix in (".json", ".jsonl"):
        folder = job.folder.with_suffix("")
        fix = f"give --out {folder}, and then join its files: coordexp shards merge {folder} --out {job.folder}"
        raise UserError(f"--out {job.folder}: this writes a folder, and the name is that of a file", fix)
    if has_shards(job.folder) and (count := survey(job.folder).count) != job.shards:
        problem = f"{job.folder} has shards of a job with {count} shards, and this one has {job.shards}"
        raise UserError(problem, "give another folder with --out, or remove that one")
    numbers = Shard.parse(shard).cut(job.shards) if shard else range(job.shards)
    for number in numbers:
        with progress(f"{message}, file {number + 1} of {job.shards}") as show:
            job(number, show)
    finished = survey(job.folder).finished if numbers else {}
    return [finished[number] for number in numbers]


def merge_records(folder: Path, manifests: "Sequence[Manifest]", to: Path) -> None:
    """Write the records of all shards of an import or export to one file, and say what is in it."""
    from coordexp.cli.data_import import print_records
    from coordexp.data.shards import join_records

    need_file(to)
    need_new_file(to)
    with progress(f"joining {folder}"):
        join_records(folder, manifests, to)
    print_records(manifests, to)


def merge_suggestions(folder: Path, manifests: "Sequence[Manifest]", to: Path, rules: dict[str, Any]) -> None:
    """Write the predictions of all shards to a new folder, and the suggestions that they give."""
    from coordexp.cli.data_suggest import PREDICTIONS, compare_with_labels

    need_new(to)
    merge_predictions(folder, manifests, to / PREDICTIONS)
    samples = manifests[0].request.get("samples", 0)
    compare_with_labels(Path(manifests[0].data), to / PREDICTIONS, to, samples, **rules)


def need_file(to: Path) -> None:
    """Raise UserError if a file cannot be written because it would be a folder."""
    if to.is_dir():
        raise UserError(f"{to} is a folder", f"give the file to write, e.g. --out {to / 'preds.json'}")


def merge_predictions(
    folder: Path, manifests: "Sequence[Manifest]", to: Path, categories: dict[str, int] | None = None
) -> None:
    """Write the predictions of all shards, and say what is in them. Raise UserError if most images are missing."""
    from coordexp.detect.predicting import refuse_leftovers
    from coordexp.detect.shards import merge_shards

    request = manifests[0].request
    refuse_leftovers(to, samples=bool(request.get("samples")), records=True)
    with progress(f"joining {folder}") as show:
        counts = merge_shards(folder, manifests, to, categories, show)
    report_answers(to, counts, request)
    report_unreadable(counts)


def report_answers(to: Path, counts: Mapping[str, int], options: Mapping[str, Any]) -> None:
    """Say what is in predictions, by the counts of `count_answers` and the options of `AnswerOptions.identity`."""
    from coordexp.evaluate.predictions import samples_path

    out.print(f"{counts['objects']} objects in {counts['images']} images: {to}", markup=False)
    if "dedup" in options:
        rule = f"at IoU {options['dedup']:g} with an earlier object"
        out.print(f"{counts['dropped']} objects dropped as duplicates, {rule}")
    if "samples" in options:
        out.print(f"{options['samples']} sampled answers of each image: {samples_path(to)}", markup=False)
    if counts["truncated"]:
        limit = f"{options['max_new_tokens']} tokens; --max-new-tokens allows more"
        err.print(f"{counts['truncated']} answers were cut off at {limit}")


def report_unreadable(counts: Mapping[str, int]) -> None:
    """Say how many images could not be read. Raise UserError if these are most of them."""
    unreadable, images = counts["unreadable"], counts["images"]
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
    images = len(shard.cut(predictor.images, job.per_call))
    interrupted = "interrupted; the same command goes on with this shard"
    try:
        with interruptible(lambda: interrupted), bar(f"answering shard {shard}", images) as advance:
            is_new = predictor(shard.number, advance)
    finally:
        predictor.close()
    done = f"{images} images answered" if is_new else "it was finished before"
    out.print(f"shard {shard} in {job.folder}: {done}", markup=False)


def predict_with_workers(job: "PredictionJob", to: Path, workers: str, resume: bool) -> None:
    """Make all shards of a job with several processes, and join them. The folder of the shards stands beside the
    predictions, and is removed when they are complete."""
    from coordexp.data import RecordFile
    from coordexp.data.shards import Shard, check_same_request, has_shards, manifest_path, read_finished, survey
    from coordexp.detect.predicting import refuse_leftovers
    from coordexp.detect.shards import ShardPredictor
    from coordexp.detect.workers import run_workers
    from coordexp.evaluate.predictions import number_all_classes

    places = _find_places(workers)
    begun = survey(job.folder) if has_shards(job.folder) else None
    if resume and begun is None and to.is_file():
        out.print(f"{to} is complete: nothing to do", markup=False)
        return
    if begun is not None and not resume:
        raise UserError(
            f"{job.folder} has the answers of predictions that were interrupted",
            "add --resume to continue, or remove the folder to start again",
        )
    refuse_leftovers(to, samples=bool(job.options.samples), records=True)
    with progress("loading"):
        categories = number_all_classes(RecordFile(job.data))
        predictor = ShardPredictor(job, warn)
    batches = -(-predictor.images // job.per_call)
    count = min(batches, SHARDS_PER_WORKER * len(places)) if begun is None else begun.count
    finished = {} if begun is None else begun.finished
    for number, manifest in finished.items():
        check_same_request(manifest_path(job.folder, Shard(number, count)), manifest.request, predictor.request)
    numbers = [number for number in range(count) if number not in finished]
    before = sum(manifest.counts["images"] for manifest in finished.values())
    go_on = "the same command with --resume continues from there"
    interrupted = f"interrupted; the answers so far are in {job.folder}\n  {go_on}"
    message = f"answering with {len(places)} workers"
    with interruptible(lambda: interrupted), bar(message, predictor.images, before) as advance:
        run_workers(replace(job, shards=count), numbers, places, lambda number: advance(before + number), warn)
    merge_predictions(job.folder, read_finished(job.folder), to, categories)
    shutil.rmtree(job.folder)


def _find_places(workers: str) -> list[dict[str, str]]:
    """Return the environment of each worker: one GPU for each, or its share of the processors."""
    import torch

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = shown.split(",") if shown else [str(number) for number in range(torch.cuda.device_count())]
    gpus = gpus[: torch.cuda.device_count()]
    if workers == "auto" and not gpus:
        raise UserError(
            "--workers auto is one worker per GPU, and there is none", "give a number, e.g. --workers 2"
        )
    if workers != "auto" and not (workers.isdecimal() and int(workers)):
        raise UserError(f"--workers {workers} is neither auto nor a number above 0", "give e.g. --workers 2")
    count = len(gpus) if workers == "auto" else int(workers)
    if gpus and count > len(gpus):
        raise UserError(f"--workers {count}, but there are {len(gpus)} GPUs", "give --workers auto")
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:count]]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // count))
    return [{"OMP_NUM_THREADS": threads}] * count


def warn(problem: str) -> None:
    err.print(sanitize(problem), markup=False, style="yellow")
