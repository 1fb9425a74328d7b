"""`Detector`: a model that detects objects in images, in a few lines of Python."""

import itertools
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union, overload

import numpy as np
from numpy.typing import NDArray

from coordexp.config.settings import AnswerFormatName
from coordexp.detect.answering import (
    AnswerOptions,
    Backend,
    Generator,
    check_model_folder,
    find_untrained_request,
    make_answer,
    make_record,
    read_questions,
    start_backend,
)
from coordexp.detect.detections import Detections
from coordexp.errors import DataError, UserError, explain, need_packages
from coordexp.files import find_model

if TYPE_CHECKING:
    from PIL.Image import Image

    from coordexp.rollout.backend import ImageRef
    from coordexp.rollout.prompt import PromptBuilder

ImageSource = Union[str, Path, "Image", NDArray[np.uint8]]
QUESTION_TOKENS = 1024  # room for a question in the length of an engine, if the user sets no length
OR_HF = 'or use backend="hf", which needs no engine'


class Detector:
    """Detects objects with a trained model.

    `model` is the folder of a checkpoint, which also says which prompts it was trained with. By default
    transformers loads it; `backend="vllm"` starts a vLLM engine in this process. With `server`, the address of an
    OpenAI-compatible server that serves this checkpoint (`vllm serve`), the folder is only used for its tokenizer,
    its processor and its prompts. `api_key` is sent to that server, and `served_model` is the name of the model
    there, which is only needed if the server has several.

    `batch` images are answered at once. `max_new_tokens`, `stop_bias` and `dedup` are those of `coordexp predict`.
    `answer_format` says how the model writes objects; unset, as it was trained; "native" is for a published
    Qwen3-VL. `device` and `dtype` are as torch names them; unset, the model is on the GPU in the precision of the
    checkpoint, or on a CPU in float32. `max_length` limits the tokens of prompt and answer of an engine; unset,
    the largest image that the processor allows fits."""

    def __init__(
        self,
        model: str | Path,
        *,
        backend: Backend | None = None,
        server: str | None = None,
        api_key: str | None = None,
        served_model: str | None = None,
        batch: int = 16,
        max_new_tokens: int = 1024,
        stop_bias: float = 0.0,
        dedup: float | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        answer_format: AnswerFormatName | None = None,
    ) -> None:
        self.options = AnswerOptions(max_new_tokens, stop_bias, dedup)
        self.options.check()
        _check_arguments(backend, server, api_key, served_model, batch, device, dtype, max_length)
        need_packages("Detector", "torch", "transformers", "PIL", "httpx", extra="train")
        self.model, self.batch = find_model(model), batch
        check_model_folder(self.model)
        self._warned: set[str] = set()

        from coordexp.answers.formats import load_format
        from coordexp.rollout.prompt import PromptBuilder, load_processor

        self._answer_format = load_format(self.model, answer_format)
        self.options.check_format(self._answer_format.name)
        self.questions = read_questions(self.model, None, self._answer_format.name)
        table = self._answer_format.table
        prompts = PromptBuilder(load_processor(self.model), self.questions.of_run)
        self._generator: Generator
        if server is not None:
            from coordexp.detect.chat_server import ChatServerBackend

            self._generator = ChatServerBackend(
                server, prompts, table, batch=batch, api_key=api_key, served_model=served_model
            )
            return
        self._generator = start_backend(
            backend or "hf",
            self.model,
            prompts,
            table,
            batch=batch,
            max_length=max_length or _find_max_length(self.model, prompts, max_new_tokens),
            device=device,
            dtype=dtype,
            fixes=_engine_fixes() if backend == "vllm" else None,
        )

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a str is a sequence too
        self,
        images: ImageSource,
        *,
        classes: Sequence[str] | None = None,
        expression: str | None = None,
        prompt: str | None = None,
    ) -> Detections: ...

    @overload
    def __call__(
        self,
        images: Sequence[ImageSource],
        *,
        classes: Sequence[str] | None = None,
        expression: str | None = None,
        prompt: str | None = None,
    ) -> list[Detections]: ...

    def __call__(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        classes: Sequence[str] | None = None,
        expression: str | None = None,
        prompt: str | None = None,
    ) -> Detections | list[Detections]:
        """Return the objects of an image, or of each image of a list.

        An image is a path, a Pillow image or an RGB array (height x width x 3, uint8). Without further arguments
        the model is asked for all objects, as in its training; with `classes` or `expression` for these only, and
        with `prompt` in other words, which may contain {classes} or {expression}. Raise DataError if an image
        cannot be read."""
        if not isinstance(images, Sequence) or isinstance(images, str):
            return self._detect([images], classes, expression, prompt)[0]
        return self._detect(images, classes, expression, prompt)

    def close(self) -> None:
        """End the engine or the connections. An engine also ends with the process."""
        self._generator.close()

    def __enter__(self) -> "Detector":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _detect(
        self,
        images: Sequence[ImageSource],
        classes: Sequence[str] | None,
        expression: str | None,
        prompt: str | None,
    ) -> list[Detections]:
        from coordexp.rollout.backend import Request

        results: list[Detections] = []
        for start in range(0, len(images), self.batch):
            named = itertools.islice(enumerate(images, start=1), start, start + self.batch)
            refs = [_open(image, number) for number, image in named]
            records = [make_record(ref.path, ref.size, classes, expression, prompt) for ref in refs]
            self._warn(find_untrained_request(self.model, records[0]))
            decode = self.options.greedy()
            requests = [
                Request(ref, decode, question=self.questions.ask(record))
                for ref, record in zip(refs, records, strict=True)
            ]
            for number, (record, rollout) in enumerate(
                zip(records, self._generator.generate(requests), strict=True), start=start + 1
            ):
                answer = make_answer(number, record.image, rollout, self._answer_format, self.options.dedup)
                results.append(Detections.of(answer, record))
        return results

    def _warn(self, message: str | None) -> None:
        """Show a warning once."""
        if message is not None and message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)


def _open(source: ImageSource, number: int) -> "ImageRef":
    """Return an image in the form of a request. The file of a path is read later, except for its size."""
    from PIL import Image, ImageOps

    from coordexp.data.images import read_image_size, size_problem, to_rgb
    from coordexp.rollout.backend import ImageRef

    if isinstance(source, str | Path):
        if str(source).startswith(("http:/", "https:/", "s3:/", "gs:/")):
            raise UserError(f"{source}: images are not read from URLs", "download it, and give its path")
        with explain(OSError, f"{source}: not a readable image", "give the path of an image file"):
            return ImageRef(str(source), *read_image_size(str(source)))
    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.shape[2:] == (3,) and source.size:
        source = Image.fromarray(source)
    if not isinstance(source, Image.Image):
        what = f"{type(source).__name__} {getattr(source, 'dtype', '')} {getattr(source, 'shape', '')}".rstrip()
        fix = "give a path, a Pillow image, or RGB as an array of uint8: height x width x 3"
        raise UserError(f"image {number} is a {what}", fix)
    if problem := size_problem(*source.size):
        raise DataError(f"image {number}: {problem}", "cut the image into tiles, or scale it down")
    with explain(
        OSError, f"image {number}: not a readable image", "give a complete image with 8 or 16 bits per channel"
    ):
        upright = to_rgb(ImageOps.exif_transpose(source))  # an image that was only opened is read here
    return ImageRef(f"image {number}", *upright.size, upright)


def _check_arguments(
    backend: Backend | None,
    server: str | None,
    api_key: str | None,
    served_model: str | None,
    batch: int,
    device: str | None,
    dtype: str | None,
    max_length: int | None,
) -> None:
    """Raise UserError for an argument that is impossible or has no effect."""
    if backend not in (None, "hf", "vllm"):
        raise UserError(f"backend {backend!r} is unknown", 'use "hf" or "vllm", or give a server')
    if batch < 1:
        raise UserError(f"batch {batch} is not a number of images above 0")
    asked = "server" if server is not None else (backend or "hf")
    without_effect: dict[str, dict[str, Any]] = {
        "server": {"backend": backend, "device": device, "dtype": dtype, "max_length": max_length},
        "hf": {"api_key": api_key, "served_model": served_model, "max_length": max_length},
        "vllm": {"api_key": api_key, "served_model": served_model, "device": device},
    }
    if names := [name for name, value in without_effect[asked].items() if value is not None]:
        raise UserError(f"{' and '.join(names)}: no effect with {asked}", "leave it out")


def _find_max_length(model: Path, prompts: "PromptBuilder", max_new_tokens: int) -> int:
    """Return how many tokens an engine needs for the largest image that the processor allows, a question and an
    answer, but at most as many as the model has positions for."""
    from coordexp.rollout.prompt import most_image_tokens

    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    needed = most_image_tokens(prompts.processor) + QUESTION_TOKENS + max_new_tokens
    return min(needed, positions) if isinstance(positions, int) else needed


def _engine_fixes() -> Any:
    from coordexp.rollout.start import EngineFixes

    return EngineFixes(
        length=f"give a lower max_length, {OR_HF}",
        cache=f"give a lower max_length or a lower batch, {OR_HF}",
        memory=f"free memory on this device, {OR_HF}",
        parallel=f"use a GPU that this model fits, {OR_HF}",
        unknown=f"what vLLM has printed may say more; if it is memory, give a lower max_length or batch; {OR_HF}",
        failed=f"if it is memory, give a lower batch, {OR_HF}",
    )
