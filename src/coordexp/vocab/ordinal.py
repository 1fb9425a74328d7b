"""Rows for the coordinate tokens in which neighbouring bins are alike and far ones are not."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coordexp.data import BINS

# Periods of a picture's side, from four sides to a thirty-second of one: what tells bins apart at every scale.
_FREQUENCIES = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def ordinal_rows(width: int, seed: int) -> Tensor:
    """[1000, width], mean 0 and standard deviation 1: sines and cosines of the bin, in random directions. High
    frequencies weigh less, so that similarity falls with distance."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(BINS) / BINS * 2 * math.pi
    frequencies = torch.tensor(_FREQUENCIES)
    waves = torch.cat((torch.sin(place[:, None] * frequencies), torch.cos(place[:, None] * frequencies)), dim=1)
    waves = waves / (1 + frequencies.repeat(2)).sqrt()
    rows = waves @ torch.randn(waves.shape[1], width, generator=generator)
    return (rows - rows.mean(0)) / rows.std()


def start_ordinal(model: Any, ids: Sequence[int], seed: int, deviation: float) -> None:
    """Gives the coordinate tokens of a model ordinal rows of this standard deviation around the mean of its other
    rows; input and output embedding alike, tied or not."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    with torch.no_grad():
        for layer in {id(layer.weight): layer for layer in layers}.values():
            others = torch.ones(len(layer.weight), dtype=torch.bool)
            others[list(ids)] = False
            rows = ordinal_rows(layer.weight.shape[1], seed) * deviation + layer.weight[others].float().mean(0)
            layer.weight[list(ids)] = rows.to(layer.weight)
