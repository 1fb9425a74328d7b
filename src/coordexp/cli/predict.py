"""`coordexp predict`: a model's answers to a file of records, as COCO detections and as they were written."""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordexp.cli.console import bar, err, need, out, printable, progress, stop
from coordexp.cli.demo import Backend
from coordexp.files import both_ends

if TYPE_CHECKING:
    from coordexp.data import RecordFile
    from coordexp.evaluate import Answer
    from coordexp.evaluate.predictions import Truth, Unfinished
    from coordexp.rollout.backend import Picture, Rollout
    from coordexp.vocab import VocabularyTable

END = 2**20  # bytes from both ends of a file of weights that tell it from another

Answering = Callable[[Sequence["Picture"]], list["Rollout"]]


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
    """Answer every picture greedily. Scores are token probabilities."""
    need("torch", "transformers", extra="train")
    if backend is Backend.vllm:
        need("vllm", extra="vllm")
    if not (model / "config.json").is_file():
        inside = sorted(path.name for path in model.glob("checkpoint-*"))
        way_out = "give a model folder; an adapter is merged first (coordexp model merge)"
        stop(f"{model} has no config.json\n  {f'it holds {inside[-1]}: give that' if inside else way_out}")
    question = prompt or _prompt_of(model)
    with progress("loading"):
        from coordexp.data import RecordError, RecordFile
        from coordexp.evaluate import PredictionError, read_truth, write_predictions
        from coordexp.evaluate.predictions import Unfinished
        from coordexp.vocab import VocabularyError, VocabularyTable

        try:
            records, table = RecordFile(data), VocabularyTable.from_folder(model)
            truth = read_truth(records)
            to.parent.mkdir(parents=True, exist_ok=True)
            if to.is_dir() or not os.access(to.parent, os.W_OK):
                stop(f"{to} cannot be written\n  give another --out")
            wanted = truth[:limit]
            unfinished = Unfinished(to, _asked(model, records, question, max_new_tokens))
            answers = _begin(unfinished, wanted, batch, resume)
        except (OSError, RecordError, PredictionError, VocabularyError) as error:
            stop(str(error))
        sizes = {(record.width, record.height) for _, record in wanted}
        answer, close = _engine(backend, model, question, max_new_tokens, table, batch, sizes)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _predict(answers, unfinished, records, wanted, table, answer, batch)
    except KeyboardInterrupt as interruption:
        err.print(
            f"interrupted after {len(answers)} of {len(wanted)} pictures; their answers are in {unfinished.path}\n"
            "  the same command with --resume goes on from there",
            markup=False,
        )
        raise typer.Exit(143 if interruption.args else 130) from None
    finally:
        close()
    write_predictions(to, answers, truth)
    unfinished.remove()
    out.print(f"{sum(len(each.valid) for each in answers)} objects in {len(answers)} pictures: {to}")
    if cut := sum(each.truncated for each in answers):
        err.print(f"{cut} answers were cut off at {max_new_tokens} tokens; --max-new-tokens allows more")
    _stop_if_most_are_unread(answers)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _begin(unfinished: "Unfinished", wanted: "Truth", batch: int, resume: bool) -> list["Answer"]:
    """Return the answers of an interrupted run, in whole batches, so that the others are asked in the batches that
    they would have been asked in."""
    if resume and unfinished.predictions.is_file() and not unfinished.path.is_file():
        out.print(f"{unfinished.predictions} is complete: nothing to do", markup=False)
        raise typer.Exit
    if not (resume and unfinished.path.is_file()):
        unfinished.begin()
        if resume:
            err.print(f"{unfinished.path} is not there: from the beginning", markup=False)
        return []
    found = unfinished.resume()
    if len(found) > len(wanted):
        stop(
            f"{unfinished.path} has {len(found)} answers, and --limit asks for {len(wanted)}\n"
            "  raise --limit, or give another --out"
        )
    kept = found if len(found) == len(wanted) else found[: len(found) // batch * batch]
    unfinished.keep(kept)
    err.print(f"{len(kept)} of {len(wanted)} pictures have been answered already", markup=False)
    return kept


def _predict(
    answers: list["Answer"],
    unfinished: "Unfinished",
    records: "RecordFile",
    wanted: "Truth",
    table: "VocabularyTable",
    answer: Answering,
    batch: int,
) -> None:
    """Add the missing answers, batch by batch, in memory and on disk."""
    from coordexp.evaluate.answer import NO_IMAGE, Answer
    from coordexp.evaluate.tokens import answer_of
    from coordexp.rollout.backend import Picture

    with bar("answering", len(wanted), len(answers)) as advance:
        for start in range(len(answers), len(wanted), batch):
            part = wanted[start : start + batch]
            rollouts = _rollouts([Picture.of(records, record) for _, record in part], answer)
            found = [
                Answer(number, record.image, "", NO_IMAGE, 0, ())
                if rollout is None
                else answer_of(number, record.image, rollout, table)
                for (number, record), rollout in zip(part, rollouts, strict=True)
            ]
            unfinished.add(found)
            answers += found
            for _ in found:
                advance()


def _rollouts(pictures: Sequence["Picture"], answer: Answering) -> list["Rollout | None"]:
    """Return the answer to each picture, or None for one that cannot be read: its batch is asked without it."""
    from coordexp.data import DataError
    from coordexp.rollout.prompt import open_image

    try:
        return list(answer(pictures))
    except DataError as error:
        first = error
    faults: dict[int, DataError] = {}
    for k, picture in enumerate(pictures):
        try:
            open_image(picture.path, (picture.width, picture.height))
        except DataError as error:
            faults[k] = error
    if not faults:  # the fault is not in a file
        stop(str(first))
    for fault in faults.values():
        err.print(printable(str(fault).partition("\n")[0]), markup=False, style="yellow")
    readable = [picture for k, picture in enumerate(pictures) if k not in faults]
    found = iter(answer(readable) if readable else ())
    return [None if k in faults else next(found) for k in range(len(pictures))]


def _stop_if_most_are_unread(answers: Sequence["Answer"]) -> None:
    unread = sum(not each.was_asked for each in answers)
    if not unread:
        return
    message = (
        f"{unread} of {len(answers)} pictures could not be read; their answers say finish_reason image_unreadable"
    )
    if unread * 2 > len(answers):
        stop(f"{message}\n  run `coordexp data doctor` on the data: it says what is wrong with each picture")
    err.print(message, style="yellow")


def _mark(file: Path) -> str:
    """Return a hash of the size and of both ends of a file. A copy has the same one, and other weights another."""
    head, tail, size = both_ends(file, END)
    return hashlib.sha256(head + tail + size.to_bytes(8, "big")).hexdigest()


def _asked(model: Path, records: "RecordFile", prompt: str, max_new_tokens: int) -> dict[str, Any]:
    """Return what makes predictions the same ones, with a name for each part that an error can show."""
    from coordexp.train.folder import fingerprint

    return {
        "model": [_mark(file) for file in sorted(model.glob("*.safetensors"))],
        "data": fingerprint(records)["sha256"],
        "prompt": prompt,
        "max_new_tokens": max_new_tokens,
    }


def _prompt_of(model: Path) -> str:
    """What training asked, as it noted in the checkpoint; else what it asks by default."""
    from coordexp.config.settings import Custom

    note = model / "coordexp.json"
    return str(json.loads(note.read_text())["prompt"] if note.is_file() else Custom.model_fields["prompt"].default)


def _engine(
    backend: Backend,
    model: Path,
    prompt: str,
    max_new_tokens: int,
    table: "VocabularyTable",
    batch: int,
    sizes: set[tuple[int, int]],
) -> tuple[Answering, Callable[[], None]]:
    import torch
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    from coordexp.rollout.backend import Decode, Request
    from coordexp.rollout.hugging_face import HuggingFaceBackend
    from coordexp.rollout.prompt import PromptBuilder

    prompts = PromptBuilder(AutoProcessor.from_pretrained(model), prompt)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = "float32" if device == "cpu" else "auto"
    greedy = Decode.greedy(max_new_tokens)
    if backend is Backend.vllm:
        from coordexp.demo.generate import start_vllm, stop_vllm
        from coordexp.rollout.vllm import answers

        longest = max(len(prompts.ids(*size)) for size in sizes) + max_new_tokens
        share = 0.2 if device == "cpu" else 0.9
        engine = start_vllm(
            model, max_model_len=longest, max_num_seqs=batch, dtype=dtype, gpu_memory_utilization=share
        )
        return (
            lambda p: answers(engine, prompts, table, [Request(picture, greedy) for picture in p]),
            partial(stop_vllm, engine),
        )
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=dtype).to(device)
    answering = HuggingFaceBackend(lambda: loaded, prompts, table, batch)
    return (lambda p: answering.generate([Request(picture, greedy) for picture in p])), answering.close
