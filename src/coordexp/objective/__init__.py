"""From logits at supervised positions to a loss: exactly what the declared pipeline says. Imports torch."""

from coordexp.objective.modules import MODULES, Measure
from coordexp.objective.pipeline import Objective, Term
from coordexp.objective.reduction import Tally, reduced_counts
from coordexp.objective.split import VocabularySplit, split_vocabulary

__all__ = [
    "MODULES",
    "Measure",
    "Objective",
    "Tally",
    "Term",
    "VocabularySplit",
    "reduced_counts",
    "split_vocabulary",
]
