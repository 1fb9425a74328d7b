"""Makes the tensors of one row from its segments.

Text positions restart with every segment and multimodal positions are computed for each segment before they are
joined; images stand in the order of their segments. The vocabulary projection is asked for only where something
is supervised: position t - 1 predicts token t, and `Supervision` holds the streams of just those tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordexp.config.pipeline import Channel
from coordexp.correction import Kind, Role
from coordexp.data import DataError
from coordexp.pack.example import Example

CHANNELS: tuple[Channel, ...] = ("A", "B")

# From an image reference and the size it must have: patches [patches, values] and their grid [images, 3], as
# Qwen3-VL's processor has them.
Pixels = Callable[[str, tuple[int, int]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Supervision:
    """One value for each kept position, of the token that it predicts. `channels` indexes CHANNELS."""

    ids: Tensor
    roles: Tensor
    sides: Tensor
    coord_targets: Tensor
    weights: Tensor
    channels: Tensor

    def to(self, device: torch.device) -> "Supervision":
        return Supervision(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})

    def at(self, kept: slice) -> "Supervision":
        return Supervision(**{f.name: getattr(self, f.name)[kept] for f in fields(self)})


@dataclass(frozen=True, eq=False)
class Watched:
    """An example of the row that was dumped. `kept` are its own among the supervised positions of the row, `where`
    the tokens of its segment that they predict, and `counts` those of its answer alone."""

    dumped: str
    kept: slice
    where: np.ndarray
    counts: Tensor


@dataclass(frozen=True)
class Row:
    """`inputs` go to the model as they are; `counts` has the tokens of the answers by kind (D19). `watched` are
    those of its examples that were dumped: seldom any."""

    inputs: dict[str, Any]
    supervision: Supervision
    counts: Tensor
    lengths: tuple[int, ...]
    watched: tuple[Watched, ...] = ()

    def to(self, device: torch.device) -> "Row":
        inputs = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in self.inputs.items()
        }
        return replace(self, inputs=inputs, supervision=self.supervision.to(device))


@dataclass(frozen=True)
class Collator:
    """`rope_index` is the model's `get_rope_index`; `roles` says which tokens the objective looks at."""

    rope_index: Callable[..., tuple[Tensor, Tensor]]
    image_token: int
    merge: int
    pixels: Pixels
    roles: Mapping[Channel, frozenset[Role]]

    @classmethod
    def for_model(cls, model: Any, pixels: Pixels, roles: Mapping[Channel, frozenset[Role]]) -> "Collator":
        """For a Qwen3-VL, before it is wrapped for adapters or distribution."""
        merge = model.config.vision_config.spatial_merge_size
        return cls(model.model.get_rope_index, model.config.image_token_id, merge, pixels, roles)

    def __call__(self, examples: Sequence[Example]) -> Row:
        parts = [self._inputs(example) for example in examples]
        inputs: dict[str, Any] = {
            name: torch.cat([part[name] for part in parts], dim=0 if name in _BY_IMAGE else -1)
            for name in parts[0]
        }
        lengths = tuple(map(len, examples))
        starts = np.cumsum((0, *lengths[:-1]))
        kept = [self._kept(example) for example in examples]
        predicted = np.concatenate([where + start for where, start in zip(kept, starts, strict=True)])
        inputs |= {"logits_to_keep": torch.from_numpy(predicted - 1), "use_cache": False}
        watched = _watched(examples, kept) if any(example.dumped for example in examples) else ()
        return Row(inputs, _supervision(examples, kept), kind_counts(examples), lengths, watched)

    def _inputs(self, example: Example) -> dict[str, Tensor]:
        ids = torch.from_numpy(example.segment.ids)[None]
        images = (ids == self.image_token).to(torch.int32)
        patches, grid = self.pixels(example.image, example.size)
        expected = int(grid.prod(-1).sum()) // self.merge**2
        if expected != int(images.sum()):
            raise DataError(
                f"{example.image}: the prompt has {int(images.sum())} image tokens, its picture makes {expected}\n"
                "  it was resized otherwise when the prompt was made, or has changed since"
            )
        positions, _ = self.rope_index(ids, mm_token_type_ids=images, image_grid_thw=grid)
        text = torch.arange(len(example))[None, None]
        return {
            "input_ids": ids,
            "position_ids": torch.cat((text, positions)),
            "mm_token_type_ids": images,
            "pixel_values": patches,
            "image_grid_thw": grid,
        }

    def _kept(self, example: Example) -> np.ndarray:
        segment = example.segment
        wanted = np.isin(segment.roles, list(self.roles[example.channel])) & (segment.weights > 0)
        where = np.flatnonzero(wanted)
        if len(where) and where[0] < max(1, segment.prompt_length):
            raise ValueError(f"{example.image}: token {where[0]} is supervised and lies in the prompt")
        return where


_BY_IMAGE = ("pixel_values", "image_grid_thw")


def _supervision(examples: Sequence[Example], kept: Sequence[np.ndarray]) -> Supervision:
    def stream(name: str) -> Tensor:
        parts = [getattr(example.segment, name)[where] for example, where in zip(examples, kept, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    of_channel = [CHANNELS.index(example.channel) for example in examples]
    channels = np.repeat(np.array(of_channel, dtype=np.int8), [len(where) for where in kept])
    streams = {f.name: stream(f.name) for f in fields(Supervision) if f.name != "channels"}
    return Supervision(**streams, channels=torch.from_numpy(channels))


def _watched(examples: Sequence[Example], kept: Sequence[np.ndarray]) -> tuple[Watched, ...]:
    ends = np.cumsum([len(where) for where in kept]).tolist()
    return tuple(
        Watched(example.dumped, slice(end - len(where), end), where, kind_counts([example]))
        for example, where, end in zip(examples, kept, ends, strict=True)
        if example.dumped
    )


def kind_counts(examples: Sequence[Example]) -> Tensor:
    """How many tokens of each kind the answers have, supervised or masked. Needs no picture: the counts of a
    whole optimizer step can be known before its first row is made."""
    return torch.from_numpy(sum(np.bincount(one.segment.kinds, minlength=len(Kind)) for one in examples))
