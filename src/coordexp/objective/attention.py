"""Block-diagonal attention for packed rows: each segment attends only to itself.

The SDPA path of transformers builds a dense mask for a packed row, so time and memory grow with the square of
its length. This one cuts the row at the bounds of its segments (`cu_seq_lens_q`) and calls the same SDPA for each
piece, as flash attention does with variable lengths. Everything that is not a packed row (padded batches,
generation with a cache) takes the ordinary SDPA path. Only the language model uses it: the vision tower already
separates images.

Linear attention has no mask at all: it carries a state from token to token, and its convolution reads the last few
tokens. A packed row runs through such a layer segment by segment.
"""

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

SEGMENTED_SDPA = "coordexp_segmented_sdpa"


def attention_for(device: torch.device, precision: str) -> str | dict[str, str]:
    """Return a value for `attn_implementation`: variable-length flash attention where it can run, else segmented
    SDPA. `precision` is the one that forward passes compute in; flash attention computes with 16 bits only."""
    if device.type == "cuda" and precision != "float32" and is_flash_attn_2_available():
        return "flash_attention_2"
    return {"text_config": SEGMENTED_SDPA, "vision_config": "sdpa"}


def segment_lengths(bounds: torch.Tensor) -> list[int]:
    """Return the lengths of the segments of a row, from the bounds between them.

    All layers of a forward pass share one tensor of bounds, so only the first layer waits for the device."""
    if bounds not in _known_lengths:
        _known_lengths[bounds] = bounds.diff().tolist()
    return _known_lengths[bounds]


_known_lengths: MutableMapping[torch.Tensor, list[int]] = WeakTensorKeyDictionary()


class SegmentedLayer:
    """Mixed into the class of a linear attention layer: runs each segment of a packed row by itself.

    Without special kernels, transformers ignores `cu_seq_lens_q` here, and its convolution always does."""

    def forward(
        self, hidden_states: torch.Tensor, cu_seq_lens_q: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        run: Callable[..., torch.Tensor] = super().forward  # type: ignore[misc]
        if cu_seq_lens_q is None:
            return run(hidden_states, **options)
        lengths = segment_lengths(cu_seq_lens_q)
        return torch.cat([run(piece, **options) for piece in hidden_states.split(lengths, dim=1)], dim=1)


def separate_linear_attention(model: torch.nn.Module) -> None:
    """Make every linear attention layer of a model treat the segments of a packed row separately."""
    for name, module in model.named_modules():
        if name.endswith(".linear_attn"):
            parent = type(module)
            module.__class__ = type(parent.__name__, (SegmentedLayer, parent), {})


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    lengths = segment_lengths(cu_seq_lens_q)
    pieces = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *piece, None, **options)[0] for piece in pieces], dim=1), None


def _mask(*, attention_mask: torch.Tensor | None, q_length: int, kv_length: int, **kwargs: Any) -> Any:
    """Return no mask for rows without padding: `_attention` separates their segments."""
    if attention_mask is None and q_length == kv_length > 1:
        return None
    return sdpa_mask(attention_mask=attention_mask, q_length=q_length, kv_length=kv_length, **kwargs)


AttentionInterface.register(SEGMENTED_SDPA, _attention)
AttentionMaskInterface.register(SEGMENTED_SDPA, _mask)
