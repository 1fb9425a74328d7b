"""The cache of keys and values while a model generates with transformers."""

from itertools import pairwise

import torch
from transformers.cache_utils import DynamicLayer

from coordexp.rollout.hugging_face import GrowingLayer


def append_tokens(layer: DynamicLayer, counts: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Append random tokens, so many at a time, and return copies of what the layer returned."""
    torch.manual_seed(0)
    returned = []
    for count in counts:
        keys, values = layer.update(torch.randn(2, 3, count, 4), torch.randn(2, 3, count, 4))
        returned.append((keys.clone(), values.clone()))
    return returned


def test_a_growing_layer_returns_what_the_layer_of_transformers_returns():
    counts = [90, *[1] * 200, 5, 1]
    for ours, theirs in zip(
        append_tokens(GrowingLayer(), counts), append_tokens(DynamicLayer(), counts), strict=True
    ):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_a_growing_layer_copies_its_tokens_only_when_it_has_no_room_left():
    layer = GrowingLayer()
    places = []
    for _ in range(1000):
        keys, _ = layer.update(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))
        places.append(keys.data_ptr())
    assert layer.get_seq_length() == 1000
    assert sum(before != after for before, after in pairwise(places)) < 10
