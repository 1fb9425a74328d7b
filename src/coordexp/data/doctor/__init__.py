"""Checks of a data file: what is wrong or looks wrong with it, and what it consists of. Streams; imports no
torch."""

from coordexp.data.doctor.checks import KINDS, Problem, check_record
from coordexp.data.doctor.examine import DataReport, check_lines, examine, look_at_image

__all__ = ["KINDS", "DataReport", "Problem", "check_lines", "check_record", "examine", "look_at_image"]
