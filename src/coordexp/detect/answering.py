"""How a model is asked about images, and what becomes of its answers: shared by `coordexp predict` and `Detector`.

Heavy imports are inside the functions, so that options can be checked before them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from coordexp.config.settings import AnswerFormatName, Custom
from coordexp.errors import DataError, UserError
from coordexp.files import find_model

if TYPE_CHECKING:
    from coordexp.answers.formats import AnswerFormat
    from coordexp.data import Questions, Record
    from coordexp.evaluate import ImageAnswer
    from coordexp.evaluate.predictions import Truth
    from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
    from coordexp.rollout.prompt import PromptBuilder

Backend = Literal["hf", "vllm"]
API_KEY = "COORDEXP_API_KEY"  # the variable with the key of a server
BATCHES_PER_CALL = 4  # of an engine or a server
# The prompts for a published model, which was not trained on ours: for all objects, for classes, and for an
# expression. In the words of Qwen's own example.
NATIVE_PROMPTS = (
    "Locate every object in the image. Report bbox coordinates in JSON format.",
    'Locate every instance that belongs to the following categories: "{classes}". Report bbox coordinates in JSON '
    "format.",
    "Locate {expression}. Report bbox coordinates in JSON format.",
)


def count_per_call(batch: int, backend: Backend | None, server: str | None) -> int:
    """Return the number of images to ask for in one call, if `batch` sequences are decoded at once. An engine and
    a server go on with the next image as soon as an answer ends. transformers waits for the longest of a batch."""
    return batch if server is None and backend != "vllm" else BATCHES_PER_CALL * batch


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
class AskedModel:
    """The parts of a model's folder that are needed to ask it, without its weights: the format of its answers, the
    questions of its training, and its prompts."""

    folder: Path
    answer_format: "AnswerFormat"
    questions: "Questions"
    prompts: "PromptBuilder"

    @classmethod
    def load(cls, folder: Path, answer_format: AnswerFormatName | None, prompt: str | None = None) -> "AskedModel":
        """Read the folder. `prompt` replaces the question for records without a request of their own."""
        from coordexp.answers.formats import load_format
        from coordexp.rollout.prompt import PromptBuilder, load_processor

        answers = load_format(folder, answer_format)
        questions = read_questions(folder, prompt, answers.name)
        return cls(folder, answers, questions, PromptBuilder(load_processor(folder), questions.of_run))

    def count_longest_prompt(self, records: "Iterable[Record]") -> int:
        """Return the tokens of the longest prompt for these records. Images of a size that no model accepts get no
        answer, whatever the length."""
        from coordexp.data.images import size_problem

        asked = {(record.width, record.height, self.questions.ask(record)) for record in records}
        lengths = [
            self.prompts.count((width, height), question=question)
            for width, height, question in asked
            if size_problem(width, height) is None
        ]
        return max(lengths, default=0)

    def start(
        self, backend: Backend, batch: int, max_length: int, device: str | None = None, dtype: str | None = None
    ) -> Generator:
        """Load the model, or start an engine with it that takes `max_length` tokens of prompt and answer together.
        Unset, `device` is the GPU if there is one, and `dtype` that of the checkpoint, or float32 on a CPU."""
        import torch

        table = self.answer_format.table
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or ("float32" if device == "cpu" else "auto")
        if backend == "vllm":
            from coordexp.rollout.generate import VllmBackend

            return VllmBackend(
                self.folder, self.prompts, table, max_length=max_length, batch=batch, dtype=dtype, gpu_share=0.9
            )
        from coordexp.families import load_model
        from coordexp.rollout.hugging_face import HuggingFaceBackend

        loaded = load_model(self.folder, dtype=dtype).to(device)
        return HuggingFaceBackend(lambda: loaded, self.prompts, table, batch)

    def connect(self, server: str, batch: int, api_key: str | None, served_model: str | None) -> Generator:
        """Return the client of a server that serves this model."""
        from coordexp.detect.chat_server import ChatServerBackend

        table = self.answer_format.table
        return ChatServerBackend(
            server, self.prompts, table, batch=batch, api_key=api_key, served_model=served_model
        )


Asked = tuple[int, "Record", "ImageRef"]  # the number of an image, its record, and the image itself


@dataclass(frozen=True)
class Answering:
    """A model that is running, and the options with which it is asked."""

    model: AskedModel
    generator: Generator
    options: AnswerOptions

    def ask(self, images: Sequence[Asked], sample: int | None = None) -> "list[ImageAnswer]":
        """Return the greedy answer to each image, or the sampled one of this number. Raise DataError if an image
        cannot be read."""
        from coordexp.evaluate.answer import build_answer, drop_duplicates

        if not images:
            return []
        rollouts = self.generator.generate([self.make_request(*asked, sample) for asked in images])
        answers = []
        for (image_id, record, _), rollout in zip(images, rollouts, strict=True):
            answer = build_answer(image_id, record.image, rollout, self.model.answer_format)
            if self.options.dedup is not None:
                answer = drop_duplicates(answer, self.options.dedup)
            answers.append(replace(answer, sample=sample))
        return answers

    def make_request(self, image_id: int, record: "Record", image: "ImageRef", sample: int | None) -> "Request":
        """Return the request for an image. The seed of a sample depends on the image and its own number only."""
        from coordexp.rollout.backend import Request, request_seed

        question = self.model.questions.ask(record)
        if sample is None:
            return Request(image, self.options.greedy(), question=question)
        seed = request_seed(self.options.seed or 0, image_id, 0, 0, sample)
        return Request(image, self.options.sampling(), seed, question)

    def answer_batch(self, images: "Truth", folder: Path, warn: Callable[[str], None]) -> "list[ImageAnswer]":
        """Return the greedy answer of each image, followed by its sampled ones. Addresses are relative to
        `folder`. An image that cannot be read gets answers that say so, and `warn` a message about it; the rest of
        the batch is then asked without it."""
        from coordexp.data.addresses import join_address
        from coordexp.evaluate.answer import NO_IMAGE, ImageAnswer
        from coordexp.rollout.backend import ImageRef

        asked = [
            (image_id, record, ImageRef(join_address(folder, record.image), record.width, record.height))
            for image_id, record in images
        ]
        try:
            greedy = self.ask(asked)
        except DataError:
            problems = [_image_problem(image) for _, _, image in asked]
            if not any(problems):  # the error is not about a file
                raise
            for problem in filter(None, problems):
                warn(problem.problem)
            asked = [entry for entry, problem in zip(asked, problems, strict=True) if problem is None]
            greedy = self.ask(asked)
        numbers = range(1, self.options.samples + 1)
        rounds = zip(greedy, *(self.ask(asked, number) for number in numbers), strict=True)
        by_image = {image_id: of_image for (image_id, _, _), of_image in zip(asked, rounds, strict=True)}
        answers: list[ImageAnswer] = []
        for image_id, record in images:
            unread = ImageAnswer(image_id, record.image, "", NO_IMAGE, 0, ())
            answers += by_image.get(image_id) or [replace(unread, sample=number) for number in (None, *numbers)]
        return answers


def _image_problem(image: "ImageRef") -> DataError | None:
    from coordexp.rollout.prompt import load_image

    try:
        load_image(image)
    except DataError as error:
        return error
    return None


def find_whole_model(name: str | Path) -> Path:
    """Return the folder of a model, as `find_model` finds it. Raise UserError unless it has a whole model."""
    model = find_model(name)
    if (model / "config.json").is_file():
        return model
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
    from coordexp.data.records import Record, check_request

    names = (classes,) if isinstance(classes, str) else None if classes is None else tuple(classes)
    record = Record(image, *size, "pixel", (), classes=names, expression=expression, prompt=prompt)
    try:
        check_request(record)
    except ValueError as error:
        raise UserError(str(error), "give classes or an expression or neither, and each class once") from error
    return record
