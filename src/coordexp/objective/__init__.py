"""Compute the loss from the logits at supervised positions, exactly as the pipeline declares it. Imports torch."""

from coordexp.objective.modules import MODULES
from coordexp.objective.pipeline import LossTally, Objective, SetTally, reduce_counts
from coordexp.objective.split import Split, SplittingHead, split_vocabulary

__all__ = [
    "MODULES",
    "LossTally",
    "Objective",
    "SetTally",
    "Split",
    "SplittingHead",
    "reduce_counts",
    "split_vocabulary",
]
