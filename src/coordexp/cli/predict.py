"""`coordexp predict`: a model's answers to images, with or without labels, as COCO detections and as text."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.console import bar, err, interruptible, need, need_page, out, progress
from coordexp.cli.shards import (
    need_file,
    predict_shard,
    predict_with_workers,
    report_answers,
    report_unreadable,
    warn,
)
from coordexp.config.settings import AnswerFormatName
from coordexp.detect.answering import (
    API_KEY,
    Answering,
    AnswerOptions,
    AskedModel,
    Backend,
    count_per_call,
    find_untrained_request,
    find_whole_model,
)
from coordexp.errors import UserError

if TYPE_CHECKING:
    from coordexp.detect.predicting import Source, UnfinishedPredictions
    from coordexp.evaluate import ImageAnswer
    from coordexp.evaluate.predictions import Truth

MOST_SAMPLES = 1000
SHOWN_FILES = 10  # skipped files that are listed


def predict(
    model: Annotated[Path, typer.Option("--model", "-m", help="A model folder or hub name.", show_default=False)],
    to: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="preds.json; preds.answers.jsonl is written beside it. With --shard, a folder."
        ),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", "-d", exists=True, dir_okay=False, help="A file of records.")
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option("--images", "-i", help="Images without labels, or folders of them, instead of --data."),
    ] = None,
    more_images: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[IMAGES]...", help="More images or folders, after --images.", show_default=False),
    ] = None,
    backend: Annotated[
        Backend | None, typer.Option(help="What answers: transformers (hf, the default) or a vLLM engine.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help=f"Ask a `vllm serve` of this model instead. {API_KEY} is its key.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="The name of the model on the server, if it has several.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer may have.")] = 1024,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first records or images.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The question. Unset: the one the model was trained with.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="With --images: ask for these classes only, e.g. 'red cup,fork'.")
    ] = None,
    expression: Annotated[
        str | None, typer.Option(help="With --images: ask for what this describes, e.g. 'the cup on the left'.")
    ] = None,
    stop_bias: Annotated[
        float, typer.Option(help="Subtract this from the logits of tokens that close the answer. Below 0: add.")
    ] = 0.0,
    dedup: Annotated[
        float | None,
        typer.Option(help="Drop objects that overlap an earlier one of the same answer by at least this IoU."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, max=MOST_SAMPLES, help="Sampled answers per image, in preds.samples.jsonl.")
    ] = 0,
    temperature: Annotated[float | None, typer.Option(help="Of the samples. Unset: 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Of the samples: nucleus sampling. Unset: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the samples. Unset: 0.")] = None,
    answer_format: Annotated[
        AnswerFormatName | None,
        typer.Option(
            help="How the model writes objects. Unset: as it was trained; native: as published Qwen3-VL."
        ),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(file_okay=False, help="A folder for one picture per image, with its objects.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(dir_okay=False, help="An .html file with the images and their objects.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after an interruption.")] = False,
    shard: Annotated[
        str | None,
        typer.Option(help="Answer only a part of the records, 0/16 to 15/16, unless that is finished."),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(help="So many processes that share the records; auto is one per GPU of the machine."),
    ] = None,
) -> None:
    """Answer every image greedily, and with --samples also at random. Scores are token probabilities."""
    options = AnswerOptions(max_new_tokens, stop_bias, dedup, samples, temperature, top_p, seed)
    options.check(_to_option)
    names = None if classes is None else tuple(name for part in classes.split(",") if (name := part.strip()))
    _check_sources(data, images, more_images, names, expression)
    if server is not None and backend is not None:
        raise UserError("--backend has no effect with --server", "leave one of them out")
    if server is None and served_model is not None:
        raise UserError("--served-model has no effect without --server", "leave it out")
    if page is not None:
        need_page(page, "--page")
    need_backend(backend, server)
    model = find_whole_model(model)
    if shard is not None or workers is not None:
        from coordexp.data.shards import Shard
        from coordexp.detect.shards import PredictionJob

        name = "--workers" if shard is None else "--shard"
        given = {"--images": images, "--draw": draw, "--page": page, "--resume": resume and shard is not None}
        given["--workers"] = workers is not None and shard is not None
        if unused := [option for option, value in given.items() if value]:
            raise UserError(f"{unused[0]} has no effect with {name}", "leave it out")
        assert data is not None
        part = Shard(0, 1) if shard is None else Shard.parse(shard)
        folder = to if shard is not None else to.with_suffix(".shards")
        settings = (batch, limit, prompt, answer_format, backend or "hf", server, served_model)
        job = PredictionJob(model, data, folder, part.count, options, *settings)
    if shard is not None:
        predict_shard(job, part)
        return
    need_file(to)
    if workers is not None:
        predict_with_workers(job, to, workers, resume)
        return
    sources = [*(images or ()), *(more_images or ())]
    source = _read_records(data) if data else _read_images(sources, names, expression, prompt)
    selected = source.images[:limit]
    if warning := find_untrained_request(model, selected[0][1]):
        err.print(warning, markup=False, style="yellow")
    with progress("loading"):
        from transformers.utils import logging

        from coordexp.detect.predicting import UnfinishedPredictions, count_answers, identify
        from coordexp.evaluate.predictions import images_path

        if not err.is_terminal:
            logging.disable_progress_bar()
        asked = AskedModel.load(model, answer_format, prompt)
        options.check_format(asked.answer_format.name, _to_option)
        unfinished = UnfinishedPredictions(to, identify(asked, source, options, server))
        per_call = count_per_call(batch, backend, server)
        answers = _begin(unfinished, source, len(selected), per_call, options, resume)
        if server is None:
            longest = asked.count_longest_prompt(record for _, record in selected) + max_new_tokens
            generator = asked.start(backend or "hf", batch, longest)
        else:
            generator = asked.connect(server, batch, os.environ.get(API_KEY), served_model)
    answering = Answering(asked, generator, options)
    answered = len(answers) // options.answers_per_image

    def describe_interruption() -> str:
        return (
            f"interrupted after {answered} of {len(selected)} images; their answers are in {unfinished.path}\n"
            "  the same command with --resume continues from there"
        )

    try:
        with interruptible(describe_interruption), bar("answering", len(selected), answered) as advance:
            for count in unfinished.answer(answers, selected, answering, source.folder, per_call, warn):
                answered += count
                advance(answered)
    finally:
        generator.close()
    greedy = _write(to, source, selected, answers)
    unfinished.path.unlink()
    counts = count_answers(answers)
    report_answers(to, counts, options.identity())
    if source.classes is not None:
        out.print(f"the numbers of images and classes: {images_path(to)}", markup=False)
    if draw is not None:
        _draw(draw, source.folder, selected, greedy)
    if page is not None:
        with progress(f"drawing {page}"):
            from coordexp.pages.document import save_page
            from coordexp.pages.predictions import render_predictions

            description = f"{model} on {data or sources[0]}"
            save_page(page, render_predictions(selected, greedy, source.folder, description))
        out.print(f"wrote {page}", markup=False)
    report_unreadable(counts)


def need_backend(backend: Backend | None, server: str | None = None) -> None:
    """Raise unless everything is installed that answers with this backend or server."""
    need("torch", "transformers", *(("httpx",) if server else ()), extra="train")
    if backend == "vllm":
        need("vllm", extra="vllm")


def _to_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_sources(
    data: Path | None,
    images: Sequence[Path] | None,
    more_images: Sequence[Path] | None,
    classes: Sequence[str] | None,
    expression: str | None,
) -> None:
    """Raise UserError unless the options name either records or images, with a request that fits."""
    if more_images and not images:
        raise UserError(f"{more_images[0]}: an image without --images", "write --images before the first image")
    if (data is None) == (not images):
        problem = "--data and --images exclude each other" if data else "there is nothing to predict on"
        raise UserError(problem, "give --data for records, or --images for images without labels")
    if data is not None and (classes is not None or expression is not None):
        name = "--classes" if classes is not None else "--expression"
        raise UserError(
            f"{name} has no effect with --data: each record says what it asks for",
            "write classes or expression into the records, or give --images",
        )
    if classes is not None and expression is not None:
        raise UserError("--classes and --expression exclude each other", "leave one of them out")
    if classes == ():
        raise UserError("--classes names no class", "give e.g. --classes 'red cup,fork'")


def _read_records(data: Path) -> "Source":
    from coordexp.data import RecordFile
    from coordexp.detect.predicting import read_records

    with progress(f"reading {data}"):
        return read_records(RecordFile(data, partial(err.print, markup=False)))


def _read_images(
    sources: Sequence[Path], classes: tuple[str, ...] | None, expression: str | None, prompt: str | None
) -> "Source":
    """Read the sizes of all images, and list the files that are none."""
    from coordexp.detect.predicting import read_images

    with progress("reading images") as show:
        source = read_images(sources, classes, expression, prompt, lambda number: show(f"{number:,} files"))
    for path, reason in source.skipped[:SHOWN_FILES]:
        warn(f"skipped {path}: {reason}")
    if len(source.skipped) > SHOWN_FILES:
        warn(f"and {len(source.skipped) - SHOWN_FILES:,} more files that are not images")
    return source


def _begin(
    unfinished: "UnfinishedPredictions",
    source: "Source",
    images: int,
    per_call: int,
    options: AnswerOptions,
    resume: bool,
) -> list["ImageAnswer"]:
    """Return the answers of an interrupted run, or none after checking that nothing is in the way of new ones."""
    from coordexp.detect.predicting import refuse_leftovers
    from coordexp.evaluate.predictions import samples_path

    has_samples = samples_path(unfinished.predictions).is_file() or not options.samples
    complete = unfinished.predictions.is_file() and has_samples
    if resume and complete and not unfinished.path.is_file():
        out.print(f"{unfinished.predictions} is complete: nothing to do", markup=False)
        raise typer.Exit
    refuse_leftovers(unfinished.predictions, samples=bool(options.samples), records=source.classes is None)
    if resume and unfinished.path.is_file():
        answers = unfinished.resume_batches(images, per_call, options)
        answered = len(answers) // options.answers_per_image
        err.print(f"{answered} of {images} images have been answered already", markup=False)
        return answers
    unfinished.begin()
    if resume:
        err.print(f"{unfinished.path} does not exist: starting from the beginning", markup=False)
    return []


def _write(to: Path, source: "Source", selected: "Truth", answers: Sequence["ImageAnswer"]) -> list["ImageAnswer"]:
    """Write all files, and return the greedy answers."""
    from coordexp.evaluate import write_predictions
    from coordexp.evaluate.predictions import number_answered_classes, write_images, write_samples

    greedy = [answer for answer in answers if answer.sample is None]
    categories = None if source.classes is None else number_answered_classes(source.classes, greedy)
    write_predictions(to, greedy, source.images, categories)
    if categories is not None:
        write_images(to, selected, categories)
    if sampled := [answer for answer in answers if answer.sample is not None]:
        write_samples(to, sampled)
    return greedy


def _draw(folder: Path, images: Path, selected: "Truth", greedy: Sequence["ImageAnswer"]) -> None:
    """Write one picture per image, named by its number and its file. Small images become PNG files."""
    from coordexp.data.addresses import join_address
    from coordexp.detect.detections import Detections
    from coordexp.detect.drawing import draw_detections
    from coordexp.rollout.prompt import open_image

    folder.mkdir(parents=True, exist_ok=True)
    with bar("drawing", len(greedy)) as advance:
        for (image_id, record), answer in zip(selected, greedy, strict=True):
            if answer.was_asked:
                size = (record.width, record.height)
                image = open_image(join_address(images, record.image), size)
                picture = draw_detections(image, Detections.of(answer, record))
                suffix = "jpg" if picture.size == size else "png"
                picture.save(folder / f"{image_id}-{Path(record.image).stem}.{suffix}", quality=92)
            advance()
    out.print(f"wrote pictures to {folder}", markup=False)
