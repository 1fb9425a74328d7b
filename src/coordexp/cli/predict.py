"""`coordexp predict`: a model's answers to a file of records, as COCO detections and as they were written."""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordexp.cli.console import bar, err, need, out, progress, stop
from coordexp.cli.demo import Backend

if TYPE_CHECKING:
    from coordexp.data import RecordFile
    from coordexp.evaluate import Answer
    from coordexp.evaluate.predictions import Truth
    from coordexp.rollout.backend import Picture, Rollout
    from coordexp.vocab import VocabularyTable

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
) -> None:
    """Answer every picture greedily. Scores are token probabilities."""
    need("torch", "transformers", extra="train")
    if backend is Backend.vllm:
        need("vllm", extra="vllm")
    if not (model / "config.json").is_file():
        inside = sorted(path.name for path in model.glob("checkpoint-*"))
        way_out = "give a model folder; an adapter is merged first (coordexp model merge)"
        stop(f"{model} has no config.json\n  {f'it holds {inside[-1]}: give that' if inside else way_out}")
    with progress("loading"):
        from coordexp.data import RecordError, RecordFile
        from coordexp.evaluate import write_predictions
        from coordexp.vocab import VocabularyError, VocabularyTable

        try:
            records, table = RecordFile(data), VocabularyTable.from_folder(model)
            truth = [records.numbered(k) for k in range(len(records))]
            to.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, RecordError, VocabularyError) as error:
            stop(str(error))
        if to.is_dir() or not os.access(to.parent, os.W_OK):
            stop(f"{to} cannot be written\n  give another --out")
        wanted = truth[:limit]
        sizes = {(record.width, record.height) for _, record in wanted}
        answer, close = _engine(backend, model, prompt or _prompt_of(model), max_new_tokens, table, batch, sizes)
    answers = _answers(records, wanted, table, answer, batch)
    close()
    write_predictions(to, answers, truth)
    out.print(f"{sum(len(each.valid) for each in answers)} objects in {len(answers)} pictures: {to}")
    if cut := sum(each.truncated for each in answers):
        err.print(f"{cut} answers were cut off at {max_new_tokens} tokens; --max-new-tokens allows more")


def _answers(
    records: "RecordFile", truth: "Truth", table: "VocabularyTable", answer: Answering, batch: int
) -> list["Answer"]:
    from coordexp.data import DataError
    from coordexp.evaluate.tokens import answer_of
    from coordexp.rollout.backend import Picture

    answers = []
    with bar("answering", len(truth)) as advance:
        for start in range(0, len(truth), batch):
            part = truth[start : start + batch]
            pictures = [Picture.of(records, record) for _, record in part]
            try:
                found = answer(pictures)
            except DataError as error:
                stop(str(error))
            for (number, record), rollout in zip(part, found, strict=True):
                answers.append(answer_of(number, record.image, rollout, table))
                advance()
    return answers


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
