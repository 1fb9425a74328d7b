"""Checks of a data file: what is wrong or looks wrong with it, and what it consists of. Streams; imports no
torch."""

from coordexp.data.doctor.checks import Problem, check_image, check_record
from coordexp.data.doctor.examine import DataReport, examine
from coordexp.data.doctor.kinds import KINDS, DataFinding, FindingExample, ProblemKind

__all__ = [
    "KINDS",
    "DataFinding",
    "DataReport",
    "FindingExample",
    "Problem",
    "ProblemKind",
    "check_image",
    "check_record",
    "examine",
]
