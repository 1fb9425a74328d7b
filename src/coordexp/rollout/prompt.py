"""The prompt of an image: token ids from its size alone, patches when they are needed.

The model's own processor decides both, so training, evaluation and generation cannot disagree on how an image is
resized or how many tokens it has.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from PIL import Image, ImageOps
from torch import Tensor

from coordexp.data import DataError
from coordexp.data.images import ImageError, open_image_file, size_problem
from coordexp.errors import UserError, explain

UNUSABLE = "cut the image into tiles, or remove the record; `coordexp data doctor` finds all of them"


class PromptBuilder:
    """Makes the prompt that asks `question` about an image."""

    def __init__(self, processor: Any, question: str) -> None:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        self.processor, self.question = processor, question
        self.text = chat_text(processor, messages)
        self._ids: list[int] = processor.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        image_token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        if self._ids.count(image_token) != 1:
            raise UserError(
                f"the chat template writes {self._ids.count(image_token)} image tokens for one image",
                "use a processor whose template writes one, as those of Qwen do",
            )
        self.image_token = image_token
        self._image_at = self._ids.index(image_token)

    def ids(self, width: int, height: int, image: str | Path = "the image") -> list[int]:
        """Return the token ids of the prompt for an image of this size. `image` names it in an error."""
        tokens = [self.image_token] * image_tokens(self.processor, width, height, image)
        return [*self._ids[: self._image_at], *tokens, *self._ids[self._image_at + 1 :]]

    def pixels(self, path: str | Path, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the patches of an image and their grid, in the form that the model takes."""
        inputs = self.processor.image_processor(images=[open_image(path, size)], return_tensors="pt")
        return inputs["pixel_values"], inputs["image_grid_thw"]


def load_processor(folder: Path, limits: Mapping[str, int] | None = None) -> Any:
    """Load the processor of a model folder. `limits` replace its limits on the pixels of an image
    (`Model.image_limits`); a checkpoint that is saved with this processor then has them too."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    if not limits:
        return processor
    images = processor.image_processor
    size = read_image_size(processor)
    if unknown := sorted(limits.keys() - size.keys()):
        raise UserError(
            f"{folder}: its image processor has no {unknown[0]}, so the pixels of an image cannot be limited",
            "leave model.max_pixels and model.min_pixels out",
        )
    size |= limits
    least, most = size["shortest_edge"], size["longest_edge"]
    unit = (images.patch_size * images.merge_size) ** 2
    if most < max(unit, least):
        other = f"model.min_pixels {least}" if least > unit else f"the {unit} pixels of one image token"
        fix = "raise model.max_pixels" + (", or set a lower model.min_pixels" if least > unit else "")
        raise UserError(f"{folder}: model.max_pixels {most} is less than {other}", fix)
    images.size = type(images.size)(**size)
    return processor


def read_image_size(processor: Any) -> dict[str, int]:
    """Return a processor's limits on the pixels of an image: `shortest_edge` and `longest_edge`, as it calls the
    smallest and the largest number."""
    return dict(processor.image_processor.size)


def chat_text(processor: Any, messages: Sequence[Any]) -> str:
    """Return a conversation as the model's own template writes it, up to where the answer begins. A template that
    would let the model think first, as that of Qwen3.5, is told not to."""
    options = {"enable_thinking": False} if "enable_thinking" in str(processor.chat_template) else {}
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    return str(text)


def image_tokens(processor: Any, width: int, height: int, image: str | Path) -> int:
    """Return how many tokens an image of this size takes in a prompt, after the processor's own resizing. Raise
    DataError if the size is unusable."""
    if problem := size_problem(width, height):
        raise DataError(f"{image}: {problem}", UNUSABLE)
    images = processor.image_processor
    return int(images.get_number_of_image_patches(height, width, {}) // images.merge_size**2)


def open_image(path: str | Path, size: tuple[int, int]) -> Image.Image:
    """Return the image. Raise DataError if its size is not that of its record: all coordinates would be wrong."""
    image = read_image(path, str(path))
    if image.size != size:
        raise DataError(
            f"{path}: the record says {size[0]} x {size[1]}, the image is {image.width} x {image.height}",
            "correct the record (its size is the one after the EXIF rotation); `coordexp data doctor` finds all "
            "such records",
        )
    return image


def read_image(source: str | Path | IO[bytes], name: str) -> Image.Image:
    """Return the image in RGB, rotated as its EXIF data says. An image of an unusable size is not decoded."""
    file = Path(source) if isinstance(source, str) else source
    with (
        explain(OSError, f"{name}: not a readable image", "run `coordexp data doctor`"),
        open_image_file(file) as image,
    ):
        if problem := size_problem(*image.size):
            raise ImageError(problem)
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGB")
