"""`coordexp predict`: a model's answers to the images of a file of records, as COCO detections and as text."""

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordexp.cli.console import bar, err, need, out, progress, sanitize
from coordexp.cli.demo import Backend
from coordexp.errors import UserError
from coordexp.files import both_ends

if TYPE_CHECKING:
    from coordexp.data import DataError, RecordFile
    from coordexp.evaluate import ImageAnswer
    from coordexp.evaluate.predictions import Truth, UnfinishedPredictions
    from coordexp.rollout.backend import ImageRef, Request, Rollout
    from coordexp.rollout.hugging_face import HuggingFaceBackend
    from coordexp.rollout.vllm import VllmBackend
    from coordexp.vocab import VocabularyTable

END = 2**20  # bytes at both ends of a file of weights that distinguish it from another


def predict(
    model: Annotated[Path, typer.Option("--model", "-m", help="A model folder.", show_default=False)],
    data: Annotated[Path, typer.Option("--data", "-d", exists=True, dir_okay=False, help="A file of records.")],
    to: Annotated[Path, typer.Option("--out", "-o", help="preds.json; preds.answers.jsonl is written beside it.")],
    backend: Annotated[Backend, typer.Option(help="What answers: transformers or a vLLM engine.")] = Backend.hf,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer may have.")] = 1024,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first records.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The question. Unset: the one the model was trained with.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after an interruption.")] = False,
) -> None:
    """Answer every image greedily. Scores are token probabilities."""
    need("torch", "transformers", extra="train")
    if backend is Backend.vllm:
        need("vllm", extra="vllm")
    if not (model / "config.json").is_file():
        checkpoints = sorted(path.name for path in model.glob("checkpoint-*"))
        fix = "give a model folder; merge an adapter first (coordexp model merge)"
        if checkpoints:
            fix = f"it contains {checkpoints[-1]}: give that"
        raise UserError(f"{model} has no config.json", fix)
    question = prompt or _prompt_of_training(model)
    with progress("loading"):
        from transformers import AutoProcessor

        from coordexp.data import RecordFile
        from coordexp.evaluate import read_truth, write_predictions
        from coordexp.evaluate.predictions import UnfinishedPredictions
        from coordexp.rollout.prompt import PromptBuilder
        from coordexp.vocab import VocabularyTable

        records, table = RecordFile(data), VocabularyTable.from_folder(model)
        truth = read_truth(records)
        _make_folder(to)
        selected = truth[:limit]
        unfinished = UnfinishedPredictions(to, _identity(model, records, question, max_new_tokens))
        answers = _begin(unfinished, selected, batch, resume)
        prompts = PromptBuilder(AutoProcessor.from_pretrained(model), question)
        sizes = {(record.width, record.height) for _, record in selected}
        generator = _start_backend(backend, model, prompts, table, batch, sizes, max_new_tokens)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _predict(answers, unfinished, records, selected, table, generator, batch, max_new_tokens)
    except KeyboardInterrupt as interruption:
        err.print(
            f"interrupted after {len(answers)} of {len(selected)} images; their answers are in {unfinished.path}\n"
            "  the same command with --resume continues from there",
            markup=False,
        )
        raise typer.Exit(143 if interruption.args else 130) from None
    finally:
        generator.close()
    write_predictions(to, answers, truth)
    unfinished.remove()
    out.print(f"{sum(len(answer.valid) for answer in answers)} objects in {len(answers)} images: {to}")
    if truncated := sum(answer.is_truncated for answer in answers):
        err.print(f"{truncated} answers were cut off at {max_new_tokens} tokens; --max-new-tokens allows more")
    _stop_if_most_are_unread(answers)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _make_folder(file: Path) -> None:
    """Make the folder of the predictions. Stop if they could not be written."""
    reason = "it is a folder" if file.is_dir() else ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason or not os.access(file.parent, os.W_OK):
        raise UserError(f"{file} cannot be written{f': {reason}' if reason else ''}", "give another --out")


def _begin(
    unfinished: "UnfinishedPredictions", selected: "Truth", batch: int, resume: bool
) -> list["ImageAnswer"]:
    """Return the answers of an interrupted run. Only whole batches are kept, so that the other records are asked
    in the same batches as without the interruption."""
    if resume and unfinished.predictions.is_file() and not unfinished.path.is_file():
        out.print(f"{unfinished.predictions} is complete: nothing to do", markup=False)
        raise typer.Exit
    if not (resume and unfinished.path.is_file()):
        unfinished.begin()
        if resume:
            err.print(f"{unfinished.path} does not exist: starting from the beginning", markup=False)
        return []
    answers = unfinished.resume()
    if len(answers) > len(selected):
        raise UserError(
            f"{unfinished.path} has {len(answers)} answers, and --limit asks for {len(selected)}",
            "raise --limit, or give another --out",
        )
    if len(answers) < len(selected):
        answers = answers[: len(answers) // batch * batch]
    unfinished.keep(answers)
    err.print(f"{len(answers)} of {len(selected)} images have been answered already", markup=False)
    return answers


def _predict(
    answers: list["ImageAnswer"],
    unfinished: "UnfinishedPredictions",
    records: "RecordFile",
    selected: "Truth",
    table: "VocabularyTable",
    generator: "HuggingFaceBackend | VllmBackend",
    batch: int,
    max_new_tokens: int,
) -> None:
    """Add the missing answers, batch by batch, in memory and on disk."""
    from coordexp.evaluate.answer import NO_IMAGE, ImageAnswer, build_answer
    from coordexp.rollout.backend import Decode, ImageRef, Request

    greedy = Decode.greedy(max_new_tokens)
    with bar("answering", len(selected), len(answers)) as advance:
        for start in range(len(answers), len(selected), batch):
            part = selected[start : start + batch]
            requests = [Request(ImageRef.of(records, record), greedy) for _, record in part]
            rollouts = _generate(requests, generator)
            new = [
                ImageAnswer(number, record.image, "", NO_IMAGE, 0, ())
                if rollout is None
                else build_answer(number, record.image, rollout, table)
                for (number, record), rollout in zip(part, rollouts, strict=True)
            ]
            unfinished.add(new)
            answers += new
            for _ in new:
                advance()


def _generate(
    requests: Sequence["Request"], generator: "HuggingFaceBackend | VllmBackend"
) -> list["Rollout | None"]:
    """Return the rollout of each request, or None if its image cannot be read. The rest of the batch is then asked
    without it."""
    from coordexp.data import DataError

    try:
        return list(generator.generate(requests))
    except DataError:
        problems = [_image_problem(request.image) for request in requests]
        if not any(problems):  # the error is not about a file
            raise
    for problem in filter(None, problems):
        err.print(sanitize(problem.problem), markup=False, style="yellow")
    readable = [request for request, problem in zip(requests, problems, strict=True) if problem is None]
    rollouts = iter(generator.generate(readable) if readable else ())
    return [next(rollouts) if problem is None else None for problem in problems]


def _image_problem(image: "ImageRef") -> "DataError | None":
    from coordexp.data import DataError
    from coordexp.rollout.prompt import open_image

    try:
        open_image(image.path, image.size)
    except DataError as error:
        return error
    return None


def _stop_if_most_are_unread(answers: Sequence["ImageAnswer"]) -> None:
    unread = sum(not answer.was_asked for answer in answers)
    if not unread:
        return
    message = (
        f"{unread} of {len(answers)} images could not be read; their answers have finish_reason image_unreadable"
    )
    if unread * 2 > len(answers):
        raise UserError(
            message, "run `coordexp data doctor` on the data: it reports what is wrong with each image"
        )
    err.print(message, style="yellow")


def _file_hash(file: Path) -> str:
    """Return a hash of the size and of both ends of a file. A copy has the same hash; other weights have
    another."""
    head, tail, size = both_ends(file, END)
    return hashlib.sha256(head + tail + size.to_bytes(8, "big")).hexdigest()


def _identity(model: Path, records: "RecordFile", prompt: str, max_new_tokens: int) -> dict[str, Any]:
    """Return everything that decides the predictions. The names of the parts appear in error messages."""
    from coordexp.train.folder import fingerprint

    return {
        "model": [_file_hash(file) for file in sorted(model.glob("*.safetensors"))],
        "data": fingerprint(records)["sha256"],
        "prompt": prompt,
        "max_new_tokens": max_new_tokens,
    }


def _prompt_of_training(model: Path) -> str:
    """Return the prompt that training recorded in the checkpoint, or the default prompt."""
    from coordexp.config.settings import Custom

    note = model / "coordexp.json"
    return str(json.loads(note.read_text())["prompt"] if note.is_file() else Custom.model_fields["prompt"].default)


def _start_backend(
    backend: Backend,
    folder: Path,
    prompts: Any,
    table: "VocabularyTable",
    batch: int,
    sizes: set[tuple[int, int]],
    max_new_tokens: int,
) -> "HuggingFaceBackend | VllmBackend":
    """Load the model, or start an engine with it that is long enough for images of these sizes. Images of a size
    that no model accepts get no answer, whatever the length."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = "float32" if device == "cpu" else "auto"
    if backend is Backend.vllm:
        from coordexp.data.images import size_problem
        from coordexp.rollout.vllm import VllmBackend

        lengths = [len(prompts.ids(*size)) for size in sizes if size_problem(*size) is None]
        longest = max(lengths, default=0) + max_new_tokens
        return VllmBackend(folder, prompts, table, max_length=longest, batch=batch, dtype=dtype, gpu_share=0.9)
    from transformers import Qwen3VLForConditionalGeneration

    from coordexp.rollout.hugging_face import HuggingFaceBackend

    loaded = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).to(device)
    return HuggingFaceBackend(lambda: loaded, prompts, table, batch)
