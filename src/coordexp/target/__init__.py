"""Builds the corrected answer and says what each of its tokens is for. Imports no torch."""

from coordexp.target.correct import Correction, correct
from coordexp.target.segment import Kind, Role, Segment, build_segment
from coordexp.target.serialise import FieldOrder, Fragment, serialise

__all__ = [
    "Correction",
    "FieldOrder",
    "Fragment",
    "Kind",
    "Role",
    "Segment",
    "build_segment",
    "correct",
    "serialise",
]
