"""Pairs predicted objects with true ones by their shapes. Imports no torch."""

from coordexp.match.assignment import MatchResult, match_objects
from coordexp.match.transport import coord_targets

__all__ = ["MatchResult", "coord_targets", "match_objects"]
