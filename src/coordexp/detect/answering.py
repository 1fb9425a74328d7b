"""How a model is asked about images, and what becomes of its answers: shared by `coordexp predict` and `Detector`.

Heavy imports are inside the functions, so that options can be checked before them.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from coordexp.config.settings import AnswerFormatName, Custom
from coordexp.errors import DataError, UserError

if TYPE_CHECKING:
    from coordexp.answers.formats import AnswerFormat
    from coordexp.answers.table import VocabularyTable
    from coordexp.data import Questions, Record
    from coordexp.evaluate import ImageAnswer
    from coordexp.evaluate.predictions import Truth
    from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
    from coordexp.rollout.prompt import PromptBuilder
    from coordexp.rollout.start import EngineFixes

Backend = Literal["hf", "vllm"]
# The prompts for a published model, which was not trained on ours: for all objects, for classes, and for an
# expression. In the words of Qwen's own example.
NATIVE_PROMPTS = (
    "Locate every object in the image. Report bbox coordinates in JSON format.",
    'Locate every instance that belongs to the following categories: "{classes}". Report bbox coordinates in JSON '
    "format.",
    "Locate {expression}. Report bbox coordinates in JSON format.",
)


class Generator(Protocol):
    """Answers requests: a model of transformers, a vLLM engine, or a server."""

    def generate(self, requests: "Sequence[Request]") -> "list[Rollout]":
        """Return one rollout per request, in the order of the requests, which all decode in the same way."""

    def close(self) -> None:
        """End all processes and connections."""


@dataclass(frozen=True)
class AnswerOptions:
    """The options that decide what a model answers. None means that an option was not given."""

    max_new_tokens: int = 1024
    stop_bias: float = 0.0
    dedup: float | None = None
    samples: int = 0
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def check(self, label: Callable[[str], str] = str) -> None:
        """Raise UserError if a value is impossible, or if an option has no effect. `label` returns the name of an
        option as the user writes it."""
        for name in ("temperature", "top_p", "seed"):
            if not self.samples and getattr(self, name) is not None:
                raise UserError(
                    f"{label(name)} has no effect without {label('samples')}",
                    f"add {label('samples')}, or leave it out: the other answers are greedy",
                )
        limits = (  # above the first and up to the second number
            ("max_new_tokens", 0, math.inf, "a number of tokens above 0", "1024"),
            ("stop_bias", -math.inf, math.inf, "a finite number", "1"),
            ("dedup", 0, 1, "an IoU above 0 and at most 1", "0.7"),
            ("temperature", 0, math.inf, "a number above 0", "0.7"),
            ("top_p", 0, 1, "above 0 and at most 1", "0.95"),
        )
        for name, low, high, kind, example in limits:
            value = getattr(self, name)
            if value is not None and not (low < value <= high and math.isfinite(value)):
                problem = f"{label(name)} {value:g} is not {kind}"
                raise UserError(problem, f"give e.g. {label(name)} {example}")

    def check_format(self, answer_format: AnswerFormatName, label: Callable[[str], str] = str) -> None:
        """Raise UserError if an option has no meaning in this format of answers."""
        if answer_format == "native" and self.stop_bias:
            raise UserError(
                f"{label('stop_bias')} {self.stop_bias:g} is for answers with coordinate tokens: they end in }}}}",
                "leave it out: native answers have no such token",
            )

    def identity(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name, and the token limit."""
        options = {"max_new_tokens": self.max_new_tokens, "stop_bias": self.stop_bias or None, "dedup": self.dedup}
        if self.samples:
            sampling = self.sampling()
            options |= {"samples": self.samples, "temperature": sampling.temperature, "top_p": sampling.top_p}
            options |= {"seed": self.seed or 0}
        return {name: value for name, value in options.items() if value is not None}

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


@dataclass(frozen=True)
class Answering:
    """Everything that answering the images of records needs. Their addresses are relative to `folder`. `warn` gets
    a message about every image that cannot be read."""

    folder: Path
    questions: "Questions"
    answer_format: "AnswerFormat"
    generator: Generator
    options: AnswerOptions
    warn: Callable[[str], None]

    def answer_batch(self, images: "Truth") -> "list[ImageAnswer]":
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

    def _ask(self, images: "Truth", sample: int | None) -> "list[ImageAnswer]":
        """Return the greedy answer of each image, or the sampled one of this number."""
        from coordexp.evaluate.answer import NO_IMAGE, ImageAnswer

        requests = [self._make_request(image_id, record, sample) for image_id, record in images]
        answers = []
        for (image_id, record), rollout in zip(images, self._generate(requests), strict=True):
            if rollout is None:
                answer = ImageAnswer(image_id, record.image, "", NO_IMAGE, 0, ())
            else:
                answer = make_answer(image_id, record.image, rollout, self.answer_format, self.options.dedup)
            answers.append(replace(answer, sample=sample))
        return answers

    def _generate(self, requests: "Sequence[Request]") -> "list[Rollout | None]":
        """Return the rollout of each request, or None if its image cannot be read. The rest of the batch is then
        asked without it."""
        try:
            return list(self.generator.generate(requests))
        except DataError:
            problems = [_image_problem(request.image) for request in requests]
            if not any(problems):  # the error is not about a file
                raise
        for problem in filter(None, problems):
            self.warn(problem.problem)
        readable = [request for request, problem in zip(requests, problems, strict=True) if problem is None]
        rollouts = iter(self.generator.generate(readable) if readable else ())
        return [next(rollouts) if problem is None else None for problem in problems]

    def _make_request(self, image_id: int, record: "Record", sample: int | None) -> "Request":
        """Return the request for an image. The seed of a sample depends on the image and its own number only."""
        from coordexp.data.addresses import join_address
        from coordexp.rollout.backend import ImageRef, Request, request_seed

        image = ImageRef(join_address(self.folder, record.image), record.width, record.height)
        question = self.questions.ask(record)
        if sample is None:
            return Request(image, self.options.greedy(), question=question)
        seed = request_seed(self.options.seed or 0, image_id, 0, 0, sample)
        return Request(image, self.options.sampling(), seed, question)


def make_answer(
    image_id: int, image: str, rollout: "Rollout", answer_format: "AnswerFormat", dedup: float | None
) -> "ImageAnswer":
    """Parse and score what a model wrote about an image. With `dedup`, drop objects that overlap an earlier one by
    at least this IoU."""
    from coordexp.evaluate.answer import build_answer, drop_duplicates

    answer = build_answer(image_id, image, rollout, answer_format)
    return answer if dedup is None else drop_duplicates(answer, dedup)


def _image_problem(image: "ImageRef") -> DataError | None:
    from coordexp.rollout.prompt import load_image

    try:
        load_image(image)
    except DataError as error:
        return error
    return None


def check_model_folder(model: Path) -> None:
    """Raise UserError unless the folder has a whole model."""
    if (model / "config.json").is_file():
        return
    checkpoints = sorted(path.name for path in model.glob("checkpoint-*"))
    fix = "give a model folder; merge an adapter first (coordexp model merge)"
    if checkpoints:
        fix = f"it contains {checkpoints[-1]}: give that"
    raise UserError(f"{model} has no config.json", fix)


def read_questions(
    model: Path, prompt: str | None = None, answer_format: AnswerFormatName = "coord_tokens"
) -> "Questions":
    """Return the prompts that training recorded in the checkpoint, or the default ones of the answer format.
    `prompt` replaces the one for records without a request of their own."""
    from coordexp.answers.formats import read_note
    from coordexp.data import Questions

    recorded, questions = read_note(model), Questions.of(Custom())
    if answer_format == "native":
        questions = Questions(*NATIVE_PROMPTS)
    own = {name: recorded[name] for name in asdict(questions) if name in recorded}
    return replace(questions, **own | ({} if prompt is None else {"prompt": prompt}))


def find_untrained_request(model: Path, record: "Record") -> str | None:
    """Return a warning if the training of a checkpoint did not ask as the record does."""
    from coordexp.answers.formats import NOTE_FILE, read_note

    recorded = read_note(model)
    for kind, words in (("classes", "a list of classes"), ("expression", "an expression")):
        is_trained = kind in recorded.get("requests", ())
        if getattr(record, kind) is not None and record.prompt is None and recorded and not is_trained:
            return (
                f"{model / NOTE_FILE}: this model was not trained to be asked for {words}, so its answers may be "
                "wrong"
            )
    return None


def make_record(
    image: str,
    size: tuple[int, int],
    classes: Sequence[str] | str | None = None,
    expression: str | None = None,
    prompt: str | None = None,
) -> "Record":
    """Return a record of an image without labels that asks for classes, for an expression or with a prompt. Raise
    UserError if this request contradicts itself."""
    from coordexp.data.records import Record, read_request

    names = [classes] if isinstance(classes, str) else classes
    given = {"classes": names, "expression": expression, "prompt": prompt}
    try:
        request = read_request({name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise UserError(str(error), "give classes or an expression or neither, and each class once") from error
    return Record(image, *size, "pixel", (), **request)


def count_longest_prompt(prompts: "PromptBuilder", asked: "Iterable[tuple[int, int, str]]") -> int:
    """Return the tokens of the longest prompt for images of these sizes with these questions. Images of a size
    that no model accepts get no answer, whatever the length."""
    from coordexp.data.images import size_problem

    return max(
        (
            prompts.count((width, height), question=question)
            for width, height, question in asked
            if size_problem(width, height) is None
        ),
        default=0,
    )


def start_backend(
    backend: Backend,
    folder: Path,
    prompts: "PromptBuilder",
    table: "VocabularyTable",
    *,
    batch: int,
    max_length: int,
    device: str | None = None,
    dtype: str | None = None,
    fixes: "EngineFixes | None" = None,
) -> Generator:
    """Load the model, or start an engine with it that takes `max_length` tokens of prompt and answer together.
    Unset, `device` is the GPU if there is one, and `dtype` that of the checkpoint, or float32 on a CPU."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    if backend == "vllm":
        from coordexp.rollout.generate import COMMAND_FIXES, VllmBackend

        return VllmBackend(
            folder,
            prompts,
            table,
            max_length=max_length,
            batch=batch,
            dtype=dtype,
            gpu_share=0.9,
            fixes=fixes or COMMAND_FIXES,
        )
    from coordexp.families import load_model
    from coordexp.rollout.hugging_face import HuggingFaceBackend

    loaded = load_model(folder, dtype=dtype).to(device)
    return HuggingFaceBackend(lambda: loaded, prompts, table, batch)
