"""The prompt of an image: token ids from its size alone, patches when they are needed.

The model's own processor decides both, so training, evaluation and generation cannot disagree on how an image is
resized or how many tokens it has.
"""

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
        self.text = str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        self._ids: list[int] = processor.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        image_token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        if self._ids.count(image_token) != 1:
            raise UserError(
                f"the chat template writes {self._ids.count(image_token)} image tokens for one image",
                "use a processor whose template writes one, as Qwen3-VL's does",
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
