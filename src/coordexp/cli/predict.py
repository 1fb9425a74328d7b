"""`coordexp predict`: a model's answers to the images of a file of records, as COCO detections and as text."""

import hashlib
import itertools
import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordexp.cli.console import bar, err, need, out, progress, sanitize
from coordexp.cli.demo import Backend
from coordexp.errors import UserError
from coordexp.files import both_ends

if TYPE_CHECKING:
    from coordexp.data import DataError, Record, RecordFile
    from coordexp.engine.generate import VllmBackend
    from coordexp.evaluate import ImageAnswer
    from coordexp.evaluate.predictions import Truth, UnfinishedPredictions
    from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
    from coordexp.rollout.hugging_face import HuggingFaceBackend
    from coordexp.vocab import VocabularyTable

END = 2**20  # bytes at both ends of a file of weights that distinguish it from another
MOST_SAMPLES = 1000


@dataclass(frozen=True)
class AnswerOptions:
    """The options of the command that decide what a model answers. None means that an option was not given."""

    max_new_tokens: int
    stop_bias: float
    dedup: float | None
    samples: int
    temperature: float | None
    top_p: float | None
    seed: int | None

    def check(self) -> None:
        """Raise UserError if a value is impossible, or if an option has no effect."""
        if not math.isfinite(self.stop_bias):
            raise UserError(f"--stop-bias {self.stop_bias:g} is not a finite number", "give e.g. --stop-bias 1")
        if self.dedup is not None and not 0 < self.dedup <= 1:
            raise UserError(f"--dedup {self.dedup:g} is not an IoU above 0 and at most 1", "give e.g. --dedup 0.7")
        for name in ("temperature", "top_p", "seed"):
            if not self.samples and getattr(self, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} has no effect without --samples",
                    "add --samples, or leave it out: the other answers are greedy",
                )
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise UserError(
                f"--temperature {self.temperature:g} is not a number above 0", "give e.g. --temperature 0.7"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p:g} is not above 0 and at most 1", "give e.g. --top-p 0.95")

    def identity(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name, and the token limit."""
        sampling = {
            "samples": self.samples,
            "temperature": self.sampling().temperature,
            "top_p": self.sampling().top_p,
            "seed": self.seed or 0,
        }
        return {
            "max_new_tokens": self.max_new_tokens,
            **({"stop_bias": self.stop_bias} if self.stop_bias else {}),
            **({"dedup": self.dedup} if self.dedup is not None else {}),
            **(sampling if self.samples else {}),
        }

    def greedy(self) -> "Decode":
        from coordexp.rollout.backend import Decode

        return Decode(self.max_new_tokens, stop_bias=self.stop_bias)

    def sampling(self) -> "Decode":
        return replace(
            self.greedy(),
            mode="sampling",
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
        )

    @property
    def answers_per_image(self) -> int:
        return 1 + self.samples


def predict(
    model: Annotated[Path, typer.Option("--model", "-m", help="A model folder.", show_default=False)],
    data: Annotated[Path, typer.Option("--data", "-d", exists=True, dir_okay=False, help="A file of records.")],
    to: Annotated[Path, typer.Option("--out", "-o", help="preds.json; preds.answers.jsonl is written beside it.")],
    backend: Annotated[Backend, typer.Option(help="What answers: transformers or a vLLM engine.")] = "hf",
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer may have.")] = 1024,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first records.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The question. Unset: the one the model was trained with.")
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
    resume: Annotated[bool, typer.Option("--resume", help="Go on after an interruption.")] = False,
) -> None:
    """Answer every image greedily, and with --samples also at random. Scores are token probabilities."""
    options = AnswerOptions(max_new_tokens, stop_bias, dedup, samples, temperature, top_p, seed)
    options.check()
    need("torch", "transformers", extra="train")
    if backend == "vllm":
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
        from coordexp.evaluate.predictions import UnfinishedPredictions, write_samples
        from coordexp.rollout.prompt import PromptBuilder
        from coordexp.vocab import VocabularyTable

        records, table = RecordFile(data, partial(err.print, markup=False)), VocabularyTable.from_folder(model)
        truth = read_truth(records)
        _make_folder(to)
        selected = truth[:limit]
        unfinished = UnfinishedPredictions(to, _identity(model, records, question, options))
        answers = _begin(unfinished, len(selected), batch, options, resume)
        prompts = PromptBuilder(AutoProcessor.from_pretrained(model), question)
        sizes = {(record.width, record.height) for _, record in selected}
        generator = _start_backend(backend, model, prompts, table, batch, sizes, max_new_tokens)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _predict(answers, unfinished, selected, Answering(records, table, generator, options), batch)
    except KeyboardInterrupt as interruption:
        err.print(
            f"interrupted after {len(answers) // options.answers_per_image} of {len(selected)} images; their "
            f"answers are in {unfinished.path}\n  the same command with --resume continues from there",
            markup=False,
        )
        raise typer.Exit(143 if interruption.args else 130) from None
    finally:
        generator.close()
    greedy = [answer for answer in answers if answer.sample is None]
    write_predictions(to, greedy, truth)
    if samples:
        write_samples(to, [answer for answer in answers if answer.sample is not None])
    unfinished.remove()
    _print_summary(to, greedy, options)
    _stop_if_most_are_unread(greedy)


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
    unfinished: "UnfinishedPredictions", images: int, batch: int, options: AnswerOptions, resume: bool
) -> list["ImageAnswer"]:
    """Return the answers of an interrupted run. Only whole batches are kept, so that the other records are asked
    in the same batches as without the interruption."""
    from coordexp.evaluate.predictions import samples_path

    samples = samples_path(unfinished.predictions)
    complete = unfinished.predictions.is_file() and (samples.is_file() or not options.samples)
    if resume and complete and not unfinished.path.is_file():
        out.print(f"{unfinished.predictions} is complete: nothing to do", markup=False)
        raise typer.Exit
    if samples.is_file() and not options.samples:
        raise UserError(
            f"{samples} has samples of earlier predictions, which would not fit the new ones",
            "remove it, give another --out, or add --samples to replace it",
        )
    if not (resume and unfinished.path.is_file()):
        unfinished.begin()
        if resume:
            err.print(f"{unfinished.path} does not exist: starting from the beginning", markup=False)
        return []
    answers = unfinished.resume()
    answered = len(answers) // options.answers_per_image
    if answered > images:
        raise UserError(
            f"{unfinished.path} has answers for {answered} images, and --limit asks for {images}",
            "raise --limit, or give another --out",
        )
    if answered < images:
        answered = answered // batch * batch
    answers = answers[: answered * options.answers_per_image]
    unfinished.keep(answers)
    err.print(f"{answered} of {images} images have been answered already", markup=False)
    return answers


@dataclass(frozen=True)
class Answering:
    """Everything that answering an image needs."""

    records: "RecordFile"
    table: "VocabularyTable"
    generator: "HuggingFaceBackend | VllmBackend"
    options: AnswerOptions

    def answer_batch(self, images: "Truth") -> list["ImageAnswer"]:
        """Return the greedy answer of each image, followed by its sampled ones. An image that cannot be read is
        asked about only once."""
        greedy = self._ask(images, None)
        readable = [image for image, answer in zip(images, greedy, strict=True) if answer.was_asked]
        rounds = [greedy]
        for sample in range(1, self.options.samples + 1):
            sampled = iter(self._ask(readable, sample))
            rounds.append(
                [next(sampled) if answer.was_asked else replace(answer, sample=sample) for answer in greedy]
            )
        return list(itertools.chain.from_iterable(zip(*rounds, strict=True)))

    def _ask(self, images: "Truth", sample: int | None) -> list["ImageAnswer"]:
        """Return the greedy answer of each image, or the sampled one of this number."""
        requests = [self._make_request(image_id, record, sample) for image_id, record in images]
        rollouts = _generate(requests, self.generator)
        return [
            self._make_answer(image_id, record, rollout, sample)
            for (image_id, record), rollout in zip(images, rollouts, strict=True)
        ]

    def _make_request(self, image_id: int, record: "Record", sample: int | None) -> "Request":
        """Return the request for an image. The seed of a sample depends on the image and its own number only."""
        from coordexp.rollout.backend import ImageRef, Request, request_seed

        image = ImageRef.of(self.records, record)
        if sample is None:
            return Request(image, self.options.greedy())
        return Request(
            image, self.options.sampling(), request_seed(self.options.seed or 0, image_id, 0, 0, sample)
        )

    def _make_answer(
        self, image_id: int, record: "Record", rollout: "Rollout | None", sample: int | None
    ) -> "ImageAnswer":
        from coordexp.evaluate.answer import NO_IMAGE, ImageAnswer, build_answer, drop_duplicates

        if rollout is None:
            return ImageAnswer(image_id, record.image, "", NO_IMAGE, 0, (), sample=sample)
        answer = replace(build_answer(image_id, record.image, rollout, self.table), sample=sample)
        return answer if self.options.dedup is None else drop_duplicates(answer, self.options.dedup)


def _predict(
    answers: list["ImageAnswer"],
    unfinished: "UnfinishedPredictions",
    selected: "Truth",
    answering: Answering,
    batch: int,
) -> None:
    """Add the missing answers, batch by batch, in memory and on disk."""
    answered = len(answers) // answering.options.answers_per_image
    with bar("answering", len(selected), answered) as advance:
        for start in range(answered, len(selected), batch):
            images = selected[start : start + batch]
            new = answering.answer_batch(images)
            unfinished.add(new)
            answers += new
            for _ in images:
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


def _print_summary(to: Path, greedy: Sequence["ImageAnswer"], options: AnswerOptions) -> None:
    from coordexp.evaluate.predictions import samples_path

    out.print(f"{sum(len(answer.valid) for answer in greedy)} objects in {len(greedy)} images: {to}", markup=False)
    if options.dedup is not None:
        dropped = sum(len(answer.dropped) for answer in greedy)
        out.print(f"{dropped} objects dropped as duplicates, at IoU {options.dedup:g} with an earlier object")
    if options.samples:
        out.print(f"{options.samples} sampled answers of each image: {samples_path(to)}", markup=False)
    if truncated := sum(answer.is_truncated for answer in greedy):
        limit = options.max_new_tokens
        err.print(f"{truncated} answers were cut off at {limit} tokens; --max-new-tokens allows more")


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


def _identity(model: Path, records: "RecordFile", prompt: str, options: AnswerOptions) -> dict[str, Any]:
    """Return everything that decides the predictions. The names of the parts appear in error messages."""
    from coordexp.train.folder import fingerprint

    return {
        "model": [_file_hash(file) for file in sorted(model.glob("*.safetensors"))],
        "data": fingerprint(records)["sha256"],
        "prompt": prompt,
        **options.identity(),
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
    if backend == "vllm":
        from coordexp.data.images import size_problem
        from coordexp.engine.generate import VllmBackend

        lengths = [len(prompts.ids(*size)) for size in sizes if size_problem(*size) is None]
        longest = max(lengths, default=0) + max_new_tokens
        return VllmBackend(folder, prompts, table, max_length=longest, batch=batch, dtype=dtype, gpu_share=0.9)
    from coordexp.families import load_model
    from coordexp.rollout.hugging_face import HuggingFaceBackend

    loaded = load_model(folder, dtype=dtype).to(device)
    return HuggingFaceBackend(lambda: loaded, prompts, table, batch)
