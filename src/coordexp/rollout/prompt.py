"""The prompt of an image: token ids from its size alone, patches when they are needed.

The model's own processor decides both, so training, evaluation and generation cannot disagree on how an image is
resized or how many tokens it has.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from PIL import Image, ImageOps
from torch import Tensor

from coordexp.data import DataError
from coordexp.data.addresses import ImageError
from coordexp.data.images import UNREADABLE, Source, open_image_file, size_problem, to_rgb
from coordexp.errors import UserError, explain
from coordexp.families import PLACE_TOKENS, check_files
from coordexp.rollout.backend import ImageRef

REMEMBERED = 4096  # questions whose tokens are kept
UNUSABLE = "cut the image into tiles, or remove the record; `coordexp data doctor` finds all of them"


class PromptBuilder:
    """Makes the prompts that ask about an image: `question`, unless a request has a question of its own. `locate`
    returns the line of the data that has an image, for errors about it."""

    def __init__(self, processor: Any, question: str, locate: Callable[[str], str] | None = None) -> None:
        self.processor, self.question, self._locate = processor, question, locate
        self.image_token: int = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        self._tokenize = lru_cache(REMEMBERED)(self._tokenize_prompt)
        self._tokenize(question, True)

    def text(self, question: str | None = None, *, has_image: bool = True) -> str:
        """Return the prompt as text, with one token in the place of the image, if it has one."""
        image = [{"type": "image"}] if has_image else []
        content = [*image, {"type": "text", "text": question or self.question}]
        return chat_text(self.processor, [{"role": "user", "content": content}])

    def text_ids(self, question: str) -> list[int]:
        """Return the token ids of the prompt of a question without an image."""
        return list(self._tokenize(question, False))

    def ids(
        self, width: int, height: int, image: str | Path = "the image", question: str | None = None
    ) -> list[int]:
        """Return the token ids of the prompt for an image of this size. `image` names it in an error."""
        ids = self._tokenize(question or self.question, True)
        place = ids.index(self.image_token)
        tokens = [self.image_token] * image_tokens(self.processor, width, height, image)
        return [*ids[:place], *tokens, *ids[place + 1 :]]

    def count(
        self, size: tuple[int, int] | None, image: str | Path = "the image", question: str | None = None
    ) -> int:
        """Return the number of tokens of the prompt for an image of this size, or of one without an image."""
        ids = self._tokenize(question or self.question, size is not None)
        return len(ids) - 1 + image_tokens(self.processor, *size, image) if size else len(ids)

    def _tokenize_prompt(self, question: str, has_image: bool) -> tuple[int, ...]:
        """Return the tokens of a prompt, with one in the place of its image, if it has one."""
        if special := find_special_token(self.processor, question):
            raise DataError(
                f"the question {question!r} contains {special}, which is not text for this model",
                "write it without this token; coordinate tokens are allowed",
            )
        text = self.text(question, has_image=has_image)
        ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        if has_image and (count := ids.count(self.image_token)) != 1:
            raise UserError(
                f"the chat template writes {count} image tokens for one image",
                "use a processor whose template writes one, as those of Qwen do",
            )
        return tuple(ids)

    def pixels(self, address: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the patches of an image and their grid, in the form that the model takes."""
        try:
            image = open_image(address, size)
        except DataError as error:
            if self._locate is None or not (place := self._locate(address)):
                raise
            raise DataError(f"{place}: {error.problem}", error.fix) from error
        return self.patches(image)

    def patches(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        """Return the patches of an image and their grid."""
        inputs = self.processor.image_processor(images=[image], return_tensors="pt")
        return inputs["pixel_values"], inputs["image_grid_thw"]


def make_blank_image(vision_config: Any) -> tuple[Tensor, Tensor]:
    """Return the patches and the grid of the smallest image, which has one token."""
    side = vision_config.spatial_merge_size
    values = vision_config.in_channels * vision_config.temporal_patch_size * vision_config.patch_size**2
    return torch.zeros(side**2, values), torch.tensor([[1, side, side]])


def load_processor(folder: Path, limits: Mapping[str, int] | None = None) -> Any:
    """Load the processor of a model folder. `limits` replace its limits on the pixels of an image
    (`Model.image_limits`); a checkpoint that is saved with this processor then has them too."""
    from transformers import AutoProcessor

    check_files(folder)
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


def find_special_token(processor: Any, text: str) -> str | None:
    """Return a token of the model in the text that ends a turn, stands for an image, or the like. Tokens that mark
    a place in an image are part of a prompt."""
    tokens = [token for token in processor.tokenizer.all_special_tokens if not token.startswith(PLACE_TOKENS)]
    return next((token for token in tokens if token in text), None)


def chat_text(processor: Any, messages: Sequence[Any]) -> str:
    """Return a conversation as the model's own template writes it, up to where the answer begins."""
    options = template_options(processor)
    fix = "use the template of the published model, which knows the roles that your data has"
    with explain(TemplateError, "the chat template of the model cannot be used", fix, to=UserError):
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    return str(text)


def template_options(processor: Any) -> dict[str, Any]:
    """Return the options of the chat template. One that would let the model think first, as that of Qwen3.5, is
    told not to."""
    return {"enable_thinking": False} if "enable_thinking" in str(processor.chat_template) else {}


def image_tokens(processor: Any, width: int, height: int, image: str | Path) -> int:
    """Return how many tokens an image of this size takes in a prompt, after the processor's own resizing. Raise
    DataError if the size is unusable."""
    if problem := size_problem(width, height):
        raise DataError(f"{image}: {problem}", UNUSABLE)
    images = processor.image_processor
    return int(images.get_number_of_image_patches(height, width, {}) // images.merge_size**2)


def most_image_tokens(processor: Any) -> int:
    """Return how many tokens the largest image takes that the processor does not scale down."""
    images = processor.image_processor
    return int(read_image_size(processor)["longest_edge"] // (images.patch_size * images.merge_size) ** 2)


def load_image(image: ImageRef) -> Image.Image:
    """Return the image of a request, upright and in RGB."""
    return open_image(image.path, image.size) if image.pixels is None else image.pixels


def open_image(source: str | Path, size: tuple[int, int]) -> Image.Image:
    """Return the image. Raise DataError if its size is not that of its record: all coordinates would be wrong."""
    image = read_image(source, str(source))
    if image.size != size:
        raise DataError(
            f"{source}: the record says {size[0]} x {size[1]}, the image is {image.width} x {image.height}",
            "correct the record (its size is the one after the EXIF rotation); `coordexp data doctor` finds all "
            "such records",
        )
    return image


def read_image(source: Source, name: str) -> Image.Image:
    """Return the image in RGB, rotated as its EXIF data says. An image of an unusable size is not decoded. Raise
    DataError if it is broken, and StoreError if its storage does not answer."""
    with explain(OSError, f"{name}: not a readable image", UNREADABLE), open_image_file(source) as image:
        if problem := size_problem(*image.size):
            raise ImageError(problem)
        ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image)
