"""The run report: run folders in, one HTML page out. Imports no torch.

It has curves with seeds as bands, time by phase, what to look at, how the runs were made, and paired intervals of
their differences on the same images.
"""

from coordexp.inspector.report.compare import Compared, Comparison, Request, compared, why_not
from coordexp.inspector.report.groups import Group, Logged, grouped
from coordexp.inspector.report.links import Examples, dumped, way_to_inspect
from coordexp.inspector.report.page import report_page
from coordexp.inspector.report.reading import read_logged

__all__ = [
    "Compared",
    "Comparison",
    "Examples",
    "Group",
    "Logged",
    "Request",
    "compared",
    "dumped",
    "grouped",
    "read_logged",
    "report_page",
    "way_to_inspect",
    "why_not",
]
