"""What is wrong, or looks wrong, with a file of records; and what it is made of. Streams; imports no torch."""

from coordexp.data.doctor.checks import Problem, check_image, check_record
from coordexp.data.doctor.examine import Report, examine
from coordexp.data.doctor.kinds import KINDS, Example, Finding, Kind

__all__ = [
    "KINDS",
    "Example",
    "Finding",
    "Kind",
    "Problem",
    "Report",
    "check_image",
    "check_record",
    "examine",
]
