"""The run report: run folders in, one HTML page out. Imports no torch.

It has curves with seeds as bands, time by phase, what to look at, how the runs were made, and paired intervals for
their differences on the same images.
"""

from coordexp.inspector.report.compare import (
    ComparisonRequest,
    ComparisonResult,
    GroupComparison,
    compare_groups,
    reason_not_to_compare,
)
from coordexp.inspector.report.groups import LoggedRun, RunGroup, group_runs, read_logged_run
from coordexp.inspector.report.page import RunExamples, find_examples, inspect_command, render_report

__all__ = [
    "ComparisonRequest",
    "ComparisonResult",
    "GroupComparison",
    "LoggedRun",
    "RunExamples",
    "RunGroup",
    "compare_groups",
    "find_examples",
    "group_runs",
    "inspect_command",
    "read_logged_run",
    "reason_not_to_compare",
    "render_report",
]
