"""Compute the loss from the logits at supervised positions, exactly as the pipeline declares it. Imports torch."""

from coordexp.objective.modules import MODULES, Measure
from coordexp.objective.pipeline import Objective, Term
from coordexp.objective.reduction import LossTally, reduce_counts
from coordexp.objective.split import VocabularySplit, split_vocabulary

__all__ = [
    "MODULES",
    "LossTally",
    "Measure",
    "Objective",
    "Term",
    "VocabularySplit",
    "reduce_counts",
    "split_vocabulary",
]
