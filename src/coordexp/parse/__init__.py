"""Reads a rollout's token ids strictly: its objects, and the prefix that an answer can be continued from.

A pure function of ids and a vocabulary table; imports neither torch nor a trainer.
"""

from coordexp.parse.entries import PredictedObject, Reason
from coordexp.parse.rollout import ParsedRollout, parse_rollout

__all__ = ["ParsedRollout", "PredictedObject", "Reason", "parse_rollout"]
