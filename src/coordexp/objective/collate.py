"""Make the tensors of one row from its examples.

Text positions restart with every segment. Multimodal positions are computed for each segment before they are
joined, and images stand in the order of their segments. A row without an image gets one more segment, a
blank image of a single token, on which nothing is supervised. Every row then runs through the whole model, the
vision tower included, whose gradient is 0 instead of missing: DDP and FSDP need that on every rank, and the
optimizer does the same however examples are packed.

Logits are computed only where something is supervised: position t - 1 predicts token t, and `Supervision` holds
the streams of just those tokens.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordexp.answers.segment import Role, TokenKind
from coordexp.config.sections import Channel
from coordexp.data import DataError
from coordexp.objective.carry import Example, ExampleId
from coordexp.rollout.prompt import make_blank_image

CHANNELS: tuple[Channel, ...] = ("A", "B")

# Takes the path of an image and the size it must have. Returns its patches [patches, values] and their grid
# [images, 3], in the form of the model's processor.
Pixels = Callable[[str, tuple[int, int]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Supervision:
    """One value per supervised position, for the token that the position predicts. `channels` indexes CHANNELS."""

    ids: Tensor
    roles: Tensor
    sides: Tensor
    coord_targets: Tensor
    weights: Tensor
    channels: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Supervision":
        return Supervision(**{f.name: change(getattr(self, f.name)) for f in fields(self)})

    def at(self, positions: slice | Tensor) -> "Supervision":
        return Supervision(**{f.name: getattr(self, f.name)[positions] for f in fields(self)})


@dataclass(frozen=True, eq=False)
class ExampleSpan:
    """The part of a row that belongs to one example.

    `positions` is the slice of the row's supervised positions that is this example's. `tokens` are the indices, in
    its segment, of the tokens that are predicted there. `counts` has the number of tokens of its answer by
    kind, and `length` that of all its tokens. `data_set` is the number of its data set."""

    id: ExampleId | None
    positions: slice
    tokens: np.ndarray
    counts: Tensor
    length: int = 0
    data_set: int = 0


@dataclass(frozen=True)
class Row:
    """The tensors of one forward pass. `inputs` are the arguments of the model; `spans` has one entry per
    example."""

    inputs: dict[str, Any]
    supervision: Supervision
    spans: tuple[ExampleSpan, ...]

    def to(self, device: torch.device) -> "Row":
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Row":
        """Return the row in memory that a GPU can read by itself, so that `to` does not wait."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Row":
        inputs = {
            name: change(value) if isinstance(value, Tensor) else value for name, value in self.inputs.items()
        }
        return replace(self, inputs=inputs, supervision=self.supervision.map(change))


@dataclass(frozen=True)
class Collator:
    """Makes rows. `rope_index` is the model's `get_rope_index`, and `roles` are those that the objective uses, by
    channel. `blank` has the patches and the grid of an image of one token."""

    rope_index: Callable[..., tuple[Tensor, Tensor]]
    image_token: int
    merge: int
    pixels: Pixels
    roles: Mapping[Channel, frozenset[Role]]
    blank: tuple[Tensor, Tensor] | None = None

    @classmethod
    def for_model(cls, model: Any, pixels: Pixels, roles: Mapping[Channel, frozenset[Role]]) -> "Collator":
        """Return the collator of a model. Pass the model itself, not the wrapper of peft or
        accelerate."""
        vision, rope_index = model.config.vision_config, model.model.get_rope_index
        blank = make_blank_image(vision)
        return cls(rope_index, model.config.image_token_id, vision.spatial_merge_size, pixels, roles, blank)

    def __call__(self, examples: Sequence[Example]) -> Row:
        parts = [self._inputs(example) for example in examples]
        if self.blank is not None and all(example.image is None for example in examples):
            parts.append(self._make_inputs(np.array([self.image_token]), self.blank))
        inputs: dict[str, Any] = {
            name: torch.cat([part[name] for part in parts if name in part], dim=0 if name in _BY_IMAGE else -1)
            for name in dict.fromkeys(itertools.chain(*parts))
        }
        starts = np.cumsum((0, *map(len, examples[:-1])))
        supervised = [self._find_supervised(example) for example in examples]
        predicted = np.concatenate([tokens + start for tokens, start in zip(supervised, starts, strict=True)])
        inputs |= _segment_bounds([part["input_ids"].shape[1] for part in parts])
        inputs |= {"logits_to_keep": torch.from_numpy(predicted - 1), "use_cache": False}
        return Row(inputs, _supervision(examples, supervised), _spans(examples, supervised))

    def _inputs(self, example: Example) -> dict[str, Tensor]:
        image = None if example.image is None else self.pixels(example.image, example.size)
        tokens = int((example.segment.ids == self.image_token).sum())
        expected = 0 if image is None else int(image[1].prod(-1).sum()) // self.merge**2
        if expected != tokens:
            raise DataError(
                f"{example.name}: the prompt has {tokens} image tokens, the image makes {expected}",
                "the image has changed since the prompt was made, or was resized differently: restore it, or "
                "start the run again",
            )
        return self._make_inputs(example.segment.ids, image)

    def _make_inputs(self, token_ids: np.ndarray, image: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
        ids = torch.from_numpy(token_ids)[None]
        images = (ids == self.image_token).to(torch.int32)
        grid = None if image is None else image[1]
        positions, _ = self.rope_index(ids, mm_token_type_ids=images, image_grid_thw=grid)
        text = torch.arange(len(token_ids))[None, None]
        inputs = {
            "input_ids": ids,
            "position_ids": torch.cat((text, positions)),
            "mm_token_type_ids": images,
        }
        return inputs if image is None else inputs | dict(zip(_BY_IMAGE, image, strict=True))

    def _find_supervised(self, example: Example) -> np.ndarray:
        """Return the indices of the segment's tokens that the objective uses."""
        segment = example.segment
        is_supervised = np.isin(segment.roles, list(self.roles[example.channel])) & (segment.weights > 0)
        tokens = np.flatnonzero(is_supervised)
        if len(tokens) and tokens[0] < max(1, segment.prompt_length):
            raise ValueError(f"{example.name}: token {tokens[0]} is supervised and lies in the prompt")
        return tokens


_BY_IMAGE = ("pixel_values", "image_grid_thw")


def _segment_bounds(lengths: Sequence[int]) -> dict[str, Any]:
    """Return where the segments of a row begin and end. Flash attention and linear attention read it; otherwise
    flash attention would compute it from the positions in every layer."""
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = max(lengths)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _supervision(examples: Sequence[Example], supervised: Sequence[np.ndarray]) -> Supervision:
    def stream(name: str) -> Tensor:
        parts = [
            getattr(example.segment, name)[tokens] for example, tokens in zip(examples, supervised, strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts))

    channel_indices = np.array([CHANNELS.index(example.channel) for example in examples], dtype=np.int8)
    channels = np.repeat(channel_indices, [len(tokens) for tokens in supervised])
    streams = {f.name: stream(f.name) for f in fields(Supervision) if f.name != "channels"}
    return Supervision(**streams, channels=torch.from_numpy(channels))


def _spans(examples: Sequence[Example], supervised: Sequence[np.ndarray]) -> tuple[ExampleSpan, ...]:
    ends = np.cumsum([len(tokens) for tokens in supervised]).tolist()
    return tuple(
        ExampleSpan(
            example.id,
            slice(end - len(tokens), end),
            tokens,
            kind_counts([example]),
            len(example),
            example.data_set,
        )
        for example, tokens, end in zip(examples, supervised, ends, strict=True)
    )


def kind_counts(examples: Sequence[Example]) -> Tensor:
    """Return how many tokens of each kind the answers have, supervised or masked. This needs no image, so the
    counts of a whole optimizer step are known before its first row is made."""
    return torch.from_numpy(
        sum(np.bincount(example.segment.kinds, minlength=len(TokenKind)) for example in examples)
    )
