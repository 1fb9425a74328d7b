"""The prompt of a picture: token ids from its size alone, patches when they are needed.

The model's own processor decides both, so training, evaluation and generation cannot disagree on how a picture is
resized or how many tokens it has.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from PIL import Image, ImageOps
from torch import Tensor

from coordexp.data import DataError
from coordexp.data.images import ImageError, opened_image, size_problem

UNUSABLE = "cut the image into tiles, or remove the record; `coordexp data doctor` finds all of them"


class PromptBuilder:
    def __init__(self, processor: Any, question: str) -> None:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        self.processor, self.question = processor, question
        self.text = str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        self._ids: list[int] = processor.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        image_token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        if self._ids.count(image_token) != 1:
            raise ValueError(
                f"the chat template writes {self._ids.count(image_token)} image tokens for one picture\n"
                "  use a processor whose template writes one, as Qwen3-VL's does"
            )
        self.image_token = image_token
        self._at = self._ids.index(image_token)

    def ids(self, width: int, height: int, image: str | Path = "the image") -> list[int]:
        """Return the token ids of the prompt with an image of this size; `image` is its name in an error."""
        room = [self.image_token] * image_tokens(self.processor, width, height, image)
        return [*self._ids[: self._at], *room, *self._ids[self._at + 1 :]]

    def pixels(self, path: str | Path, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Patches and their grid, as the model takes them."""
        found = self.processor.image_processor(images=[open_image(path, size)], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"]


def image_tokens(processor: Any, width: int, height: int, image: str | Path) -> int:
    """Return how many tokens an image of this size has in a prompt, by the processor's own rule of resizing. Raise
    DataError if no model can be given it."""
    if problem := size_problem(width, height):
        raise DataError(f"{image}: {problem}\n  {UNUSABLE}")
    images = processor.image_processor
    return int(images.get_number_of_image_patches(height, width, {}) // images.merge_size**2)


def check_prompt(image: str, engine: Sequence[int], ours: Sequence[int]) -> None:
    """An engine has to read a prompt as training does, token by token (R30)."""
    if tuple(engine) == tuple(ours):
        return
    at = next(
        (k for k, (a, b) in enumerate(zip(engine, ours, strict=False)) if a != b), min(len(engine), len(ours))
    )
    theirs, wanted = (list(ids[at : at + 4]) or "the end" for ids in (engine, ours))
    raise DataError(
        f"{image}: the engine's prompt ({len(engine)} tokens) is not the one that is trained on ({len(ours)})\n"
        f"  they differ from token {at} on: {theirs} where {wanted} should be\n"
        "  the record's width and height must be those of the picture (run `coordexp data doctor`), and the "
        "engine must use the same processor"
    )


def open_image(path: str | Path, size: tuple[int, int]) -> Image.Image:
    """A picture of another size than its record has would move every coordinate."""
    found = read_image(path, str(path))
    if found.size != size:
        raise DataError(
            f"{path}: the record says {size[0]} x {size[1]}, the picture is {found.width} x {found.height}\n"
            "  correct the record (its size is that after EXIF turning); `coordexp data doctor` finds all of them"
        )
    return found


def read_image(source: str | Path | IO[bytes], name: str) -> Image.Image:
    """Return the image in RGB, turned as its EXIF data says. What cannot be used is not decoded."""
    try:
        with opened_image(Path(source) if isinstance(source, str) else source) as image:
            if problem := size_problem(*image.size):
                raise ImageError(problem)
            ImageOps.exif_transpose(image, in_place=True)
            return image.convert("RGB")
    except OSError as error:
        raise DataError(
            f"{name}: not a readable picture ({error.strerror or error})\n  run `coordexp data doctor`"
        ) from error
