"""`Detector`: a model that detects objects in images, in a few lines of Python."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union, overload

import numpy as np
from numpy.typing import NDArray

from coordexp.config.settings import AnswerFormatName
from coordexp.detect.answering import (
    Answering,
    AnswerOptions,
    AskedModel,
    Backend,
    find_untrained_request,
    find_whole_model,
    make_record,
)
from coordexp.detect.detections import Detections
from coordexp.errors import DataError, UserError, explain, need_packages

if TYPE_CHECKING:
    from PIL.Image import Image

    from coordexp.rollout.backend import ImageRef
    from coordexp.rollout.prompt import PromptBuilder

ImageSource = Union[str, Path, "Image", NDArray[np.uint8]]
QUESTION_TOKENS = 1024  # room for a question in the length of an engine, if the user sets no length
# The arguments that have no effect with a server, and with each backend.
WITHOUT_EFFECT = {
    "server": ("backend", "device", "dtype", "max_length"),
    "hf": ("api_key", "served_model", "max_length"),
    "vllm": ("api_key", "served_model", "device"),
}


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
        given = {"backend": backend, "device": device, "dtype": dtype, "max_length": max_length}
        _check_arguments(server, batch, given | {"api_key": api_key, "served_model": served_model})
        need_packages("Detector", "torch", "transformers", "PIL", "httpx", extra="train")
        self.model, self.batch = find_whole_model(model), batch
        self._warned: set[str] = set()
        asked = AskedModel.load(self.model, answer_format)
        self.options.check_format(asked.answer_format.name)
        generator = (
            asked.connect(server, batch, api_key, served_model)
            if server is not None
            else asked.start(
                backend or "hf",
                batch,
                max_length or _find_max_length(self.model, asked.prompts, max_new_tokens),
                device,
                dtype,
            )
        )
        self._answering = Answering(asked, generator, self.options)

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

        An image is a path or another address, a Pillow image or an RGB array (height x width x 3, uint8). Without
        further arguments the model is asked for all objects, as in its training; with `classes` or `expression`
        for these only, and with `prompt` in other words, which may contain {classes} or {expression}. Raise
        DataError if an image cannot be read."""
        is_one = not isinstance(images, Sequence) or isinstance(images, str)
        given: Sequence[Any] = [images] if is_one else images  # type: ignore[assignment]
        results: list[Detections] = []
        for start in range(0, len(given), self.batch):
            asked = []
            for number, image in enumerate(given[start : start + self.batch], start=start + 1):
                ref = _open(image, number)
                asked.append((number, make_record(ref.path, ref.size, classes, expression, prompt), ref))
            self._warn(find_untrained_request(self.model, asked[0][1]))
            answers = self._answering.ask(asked)
            results += [
                Detections.of(answer, record) for answer, (_, record, _) in zip(answers, asked, strict=True)
            ]
        return results[0] if is_one else results

    def close(self) -> None:
        """End the engine or the connections. An engine also ends with the process."""
        self._answering.generator.close()

    def __enter__(self) -> "Detector":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _warn(self, message: str | None) -> None:
        """Show a warning once."""
        if message is not None and message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)


def _open(source: ImageSource, number: int) -> "ImageRef":
    """Return an image in the form of a request. The file of a path is read later, except for its size."""
    from PIL import Image, ImageOps

    from coordexp.data.images import read_image_size, size_problem, to_rgb
    from coordexp.rollout.backend import ImageRef

    if isinstance(source, str | Path):
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


def _check_arguments(server: str | None, batch: int, given: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that is impossible or has no effect."""
    if given["backend"] not in (None, "hf", "vllm"):
        raise UserError(f"backend {given['backend']!r} is unknown", 'use "hf" or "vllm", or give a server')
    if batch < 1:
        raise UserError(f"batch {batch} is not a number of images above 0")
    asked = "server" if server is not None else (given["backend"] or "hf")
    if names := [name for name in WITHOUT_EFFECT[asked] if given[name] is not None]:
        raise UserError(f"{' and '.join(names)}: no effect with {asked}", "leave it out")


def _find_max_length(model: Path, prompts: "PromptBuilder", max_new_tokens: int) -> int:
    """Return how many tokens an engine needs for the largest image that the processor allows, a question and an
    answer, but at most as many as the model has positions for."""
    from coordexp.rollout.prompt import most_image_tokens

    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    needed = most_image_tokens(prompts.processor) + QUESTION_TOKENS + max_new_tokens
    return min(needed, positions) if isinstance(positions, int) else needed
