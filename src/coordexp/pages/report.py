"""The run report: groups of runs and their comparison in, one HTML page out, with links to the inspector.

It has curves with seeds as bands, time by phase, what to look at, how the runs were made, and paired intervals for
their differences on the same images.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from coordexp.dumps import FOLDER, step_files
from coordexp.pages import charts
from coordexp.pages.comparison import ComparisonResult
from coordexp.pages.curves import (
    BETWEEN,
    PHASES,
    SMOOTH_FROM,
    Curve,
    Floats,
    PhaseTimes,
    StepRanges,
    build_curve,
    divide_steps,
    measure_phases,
)
from coordexp.pages.document import escape_text, render_document, render_header, render_list, render_table
from coordexp.pages.report_charts import Chart, Family, list_families
from coordexp.pages.report_notes import render_summary
from coordexp.pages.report_servers import ServerSummary, read_servers, render_servers
from coordexp.pages.report_tables import render_badge, render_comparison, render_configuration
from coordexp.pages.run_folder import INSPECTOR, RunGroup, find_differences

TIME = (
    "Phases do not overlap: compute excludes reading images and waiting, and rest is what a step takes besides "
    "all of them. A column is the mean over its steps and over processes. Layers are in the order of the table."
)
MAX_TITLE = 90  # letters
MAX_MARKS = 120  # of a run
MAX_MARK_ROWS = 8
Curves = list[tuple[str, Curve]]  # with the letter of the group
NO_TIME = "no step was timed"
NO_SERVERS = "no rollout servers were used: there is no servers.jsonl"


@dataclass(frozen=True)
class ReportSection:
    """A section of the page. If it has no content, the page says why: `absent`. The reader has to open a `folded`
    one."""

    key: str
    title: str
    content: str
    absent: str = ""
    folded: bool = False

    @property
    def html(self) -> str:
        head, content = f"<h2>{escape_text(self.title)}</h2>", self.content
        if self.folded:
            head, content = "", f"<details><summary>{head}</summary>{content}</details>"
        return f'<section id="{self.key}">{head}{content}</section>'


@dataclass(frozen=True)
class RunExamples:
    """The dumped examples of a run. `steps` count as the log does: the file of the weights after 99 updates is
    that of step 100. `page` is the address of the inspector's page relative to the report; None if there is
    none."""

    name: str
    folder: Path
    letter: str
    steps: tuple[int, ...]
    page: str | None


def find_examples(groups: Sequence[RunGroup], report: Path) -> list[RunExamples]:
    """Return the runs that have dumped examples or an inspector's page. `report` is the file to link from."""
    examples = []
    for group in groups:
        for run in group.runs:
            folder = run.run.folder
            steps = tuple(step + 1 for step in step_files(folder / FOLDER))
            page = folder / INSPECTOR
            if steps or page.is_file():
                relative = Path(os.path.relpath(page.resolve(), report.resolve().parent)).as_posix()
                address = quote(relative) if page.is_file() else None
                examples.append(RunExamples(run.name, folder, group.letter, steps, address))
    return examples


def inspect_command(runs: Sequence[RunExamples]) -> str:
    """Return the shell command that makes the inspector's page of a run."""
    return f"coordexp inspect {shlex.quote(str(runs[0].folder)) if len(runs) == 1 else 'RUN'}"


def render_report(groups: Sequence[RunGroup], result: ComparisonResult | str, runs: Sequence[RunExamples]) -> str:
    """`result` is the comparison, or the reason why there is none."""
    series = [run.series(metric) for metric in ("loss", "eval_f1_50") for group in groups for run in group.runs]
    read_out = ReadOut(divide_steps(series, len(groups)))
    marks = make_step_marks(runs)
    folders = [run.run.folder for group in groups for run in group.runs]
    servers = {folder: summary for folder in folders if (summary := read_servers(folder)) is not None}
    drawn = [draw_family(family, groups, read_out, marks) for family in list_families(groups)]
    sections = [
        ReportSection("comparison", "Compared on the same images", _render_result(result, len(groups))),
        *drawn[:2],
        ReportSection("time", "Where the time goes", draw_times(groups, read_out), NO_TIME),
        *drawn[2:],
        ReportSection("servers", "Rollout servers", render_servers(groups, servers), NO_SERVERS),
    ]
    reasons = [
        f"<b>{escape_text(section.title)}</b>: {escape_text(section.absent)}"
        for section in sections
        if section.absent and not section.content
    ]
    sections.append(ReportSection("absent", "Not available", render_list(reasons)))
    sections.append(ReportSection("settings", "How they were made", render_configuration(groups)))
    shown = [section for section in sections if section.content]
    name = _join_names([group.name for group in groups])
    links = "".join(f'<a href="#{section.key}">{escape_text(section.title)}</a>' for section in shown)
    body = (
        f"{_render_bar(name, groups, read_out.ranges)}"
        f'<main><nav class="contents" aria-label="Sections">{links}</nav>'
        f'<section id="summary">{_render_summaries(groups, servers)}{_render_links(runs)}'
        f'<p class="about">{escape_text(_explain_charts(groups, read_out.ranges))}</p></section>'
        f"{''.join(section.html for section in shown)}</main>"
    )
    curves = {
        "first": read_out.ranges.first,
        "last": read_out.ranges.last,
        "left": charts.LEFT,
        "right": charts.RIGHT,
        "steps": read_out.steps,
        "charts": read_out.charts,
    }
    return render_document(f"Run report: {name}", body, scripts=["report.js"], data={"curves": curves})


def _render_summaries(groups: Sequence[RunGroup], servers: Mapping[Path, ServerSummary]) -> str:
    """Render the first look at each group, with its values of the settings in which the groups differ."""
    if len(groups) == 1:
        return render_summary(groups[0], servers)
    rows = find_differences(groups)
    values = [{path: row[k] for path, row in rows.items()} for k in range(len(groups))]
    return "".join(render_summary(group, servers, own) for group, own in zip(groups, values, strict=True))


def make_step_marks(runs: Sequence[RunExamples]) -> list[charts.StepMark]:
    """Return the triangles under the loss, one row per run, for as many runs and steps as there is room."""
    marks = []
    for row, run in enumerate([run for run in runs if run.steps][:MAX_MARK_ROWS]):
        stride = -(-len(run.steps) // MAX_MARKS)
        for step in run.steps[::stride]:
            href = f"{run.page}#step={step}" if run.page else ""
            words = f"{run.name}, step {step}: dumped examples" + (", in the inspector" if href else "")
            marks.append(charts.StepMark(step, row, run.letter, words, href))
    return marks


def _render_links(runs: Sequence[RunExamples]) -> str:
    """Render links to the inspector's pages, and the command that makes the missing ones."""
    parts = []
    linked = {run.page: run for run in runs if run.page}
    if linked:
        names = [run.name for run in linked.values()]  # if several have the same name, the folder is shown
        shown = {page: run.name if names.count(run.name) == 1 else run.folder for page, run in linked.items()}
        links = ", ".join(
            f'<a href="{escape_text(page)}">{escape_text(str(name))}</a>' for page, name in shown.items()
        )
        parts.append(f"Look at single examples in the inspector: {links}. Triangles under the loss are its steps.")
    missing = [run for run in runs if run.steps and not run.page]
    if missing:
        count = f"{missing[0].name} has" if len(missing) == 1 else f"{len(missing)} runs have"
        folders = shlex.join(str(run.folder) for run in missing)
        parts.append(
            f"{escape_text(count)} dumped examples (triangles under the loss), but no page to look at them: "
            f"<code>{escape_text(inspect_command(missing))}</code> makes it"
            + (f" for {escape_text(folders)}." if len(missing) > 1 else ".")
        )
    return "".join(f'<p class="about">{part}</p>' for part in parts)


def _join_names(names: Sequence[str]) -> str:
    title = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return title if len(title) <= MAX_TITLE else f"{names[0]} and {len(names) - 1} others"


def _render_bar(name: str, groups: Sequence[RunGroup], ranges: StepRanges) -> str:
    """Render the header with the legend of the groups, and the step whose values all charts show. The controls
    need the script, which unhides them."""
    keys = "".join(
        f'<button type="button" class="key of-{group.letter}" data-group="{group.letter}" aria-pressed="true">'
        f"{charts.draw_key(group.letter)}<b>{group.letter}</b> {escape_text(group.name)}</button>"
        for group in groups
    )
    runs = sum(len(group.runs) for group in groups)
    scope = f"{runs} run{'s' if runs > 1 else ''}"
    scope += f" in {len(groups)} groups; runs in a group differ only in seeds and names" if len(groups) > 1 else ""
    controls = (
        f'<div class="keys" role="group" aria-label="Groups">{keys}</div>'
        '<div class="tools" hidden>'
        '<label class="smooth"><input type="checkbox" checked> running mean</label>'
        '<label class="scale"><input type="checkbox"> log scale</label>'
        f'<label>step <input type="range" min="{ranges.first}" max="{ranges.last}" value="{ranges.last}" '
        f'aria-label="Step whose values all charts show"></label><output id="step">last</output></div>'
    )
    return render_header("run report", name, scope, controls)


def _explain_charts(groups: Sequence[RunGroup], ranges: StepRanges) -> str:
    several = max(len(group.runs) for group in groups) > 1
    parts = ["The x axis is optimizer steps."]
    if several:
        counts = ", ".join(f"{group.letter} {len(group.runs)}" for group in groups)
        parts.append(
            f"Lines are means over the runs of a group (seeds: {counts}); the band is from the lowest to the "
            "highest run."
        )
    if ranges.length > 1:
        band = "the wide pale band contains every single value" if several else "the band contains every value"
        parts.append(
            f"A point stands for {ranges.length:.3g} steps. It is the mean of what was logged in them, and {band}."
        )
    if ranges.count > SMOOTH_FROM:
        width = 2 * (ranges.count // 50) + 1
        parts.append(
            f"If a line has more than {SMOOTH_FROM} points, the thick line is a running mean over up to {width} "
            "points, fewer at the ends, and the thin line shows the values as logged."
        )
    parts.append("Steps without a value are skipped. A cross and a gap mark a value that was NaN or infinite.")
    return " ".join(parts)


def _render_result(result: ComparisonResult | str, groups: int) -> str:
    if isinstance(result, ComparisonResult):
        return render_comparison(result)
    return "" if groups < 2 else f'<p class="note">Not compared: {escape_text(result)}.</p>'


@dataclass
class ReadOut:
    """The values that the page's script shows for a step. Charts with the same steps share them."""

    ranges: StepRanges
    steps: list[list[float]] = field(default_factory=list)
    charts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _known: dict[bytes, int] = field(default_factory=dict)

    def add(self, chart: str, letter: str, steps: Floats, *rows: Floats) -> None:
        key = np.round(steps, 1).tobytes()
        if key not in self._known:
            self._known[key] = len(self.steps)
            self.steps.append([_shorten(step) for step in np.round(steps, 1)])
        values = [[_shorten(float(f"{v:.4g}")) if np.isfinite(v) else None for v in row] for row in rows]
        self.charts.setdefault(chart, []).append({"g": letter, "x": self._known[key], "v": values})


def draw_family(
    family: Family, groups: Sequence[RunGroup], read_out: ReadOut, marks: Sequence[charts.StepMark] = ()
) -> ReportSection:
    drawn = [
        (chart, curves) for chart in family.charts if (curves := _read_curves(chart, groups, read_out.ranges))
    ]
    figures = [
        _draw_figure(family, chart, curves, read_out, marks) for chart, curves in drawn if not _is_zero(curves)
    ]
    zero = ", ".join(chart.title for chart, curves in drawn if _is_zero(curves))
    zero_note = f'<p class="about">0 throughout: {escape_text(zero)}.</p>' if zero else ""
    note = f'<p class="about">{escape_text(family.note)}</p>' if family.note else ""
    html = f'{note}<div class="charts">{"".join(figures)}</div>{zero_note}' if drawn else ""
    return ReportSection(family.key, family.title, html, family.absent, family.folded)


def _read_curves(chart: Chart, groups: Sequence[RunGroup], ranges: StepRanges) -> Curves:
    curves = [(group.letter, build_curve([chart.read(run) for run in group.runs], ranges)) for group in groups]
    return [(letter, curve) for letter, curve in curves if curve is not None]


def _is_zero(curves: Curves) -> bool:
    """Return whether every logged value is 0. Such a chart says no more than a word."""
    return all(not len(curve.broken) and not curve.lowest.any() and not curve.highest.any() for _, curve in curves)


def _draw_figure(
    family: Family, chart: Chart, curves: Curves, read_out: ReadOut, marks: Sequence[charts.StepMark]
) -> str:
    key = f"{family.key}:{chart.name}"
    for letter, curve in curves:
        low, high = (curve.low, curve.high) if (curve.runs > 1).any() else (curve.lowest, curve.highest)
        has_band = not np.array_equal(low, high, equal_nan=True)
        read_out.add(key, letter, curve.steps, curve.mean, *((low, high) if has_band else ()))
    size = charts.LARGE if chart.wide else charts.SMALL
    frame = charts.Frame(*size, read_out.ranges.first, read_out.ranges.last)
    title, step_marks = f"{family.title}: {chart.title}", marks if chart.wide else ()
    svg = charts.draw_lines(title, curves, frame, share=chart.share, marks=step_marks)
    has_log_scale = not chart.share and charts.needs_log_scale(curves)
    svg += charts.draw_lines(title, curves, frame, log=True, marks=step_marks) if has_log_scale else ""
    style = " ".join([*(["wide"] if chart.wide else []), *(["both"] if has_log_scale else [])])
    note = f"<small>{escape_text(chart.note)}</small>" if chart.note else ""
    return (
        f'<figure class="{style}" data-chart="{escape_text(key)}"><figcaption>'
        f"<b>{escape_text(chart.title)}</b>{_render_last_values(curves)}{note}</figcaption>{svg}</figure>"
    )


def _render_last_values(curves: Curves) -> str:
    """Render the last point of each line. The script replaces them while the reader points at a step."""
    parts = []
    for letter, curve in curves:
        known = curve.mean[np.isfinite(curve.mean)]
        parts.append(f'<span class="of-{letter}"><i>{letter}</i>{charts.format_number(float(known[-1]))}</span>')
    return f"<output>{''.join(parts)}</output>"


def draw_times(groups: Sequence[RunGroup], read_out: ReadOut) -> str:
    """Return the charts of time by phase, or nothing if no group has times."""
    times = [(group, measure_phases([run.log for run in group.runs], read_out.ranges)) for group in groups]
    figures = [_draw_time(group, phases, read_out) for group, phases in times if phases is not None]
    return f'<p class="about">{TIME}</p>{"".join(figures)}' if figures else ""


def _draw_time(group: RunGroup, times: PhaseTimes, read_out: ReadOut) -> str:
    frame = charts.Frame(*charts.WIDE, read_out.ranges.first, read_out.ranges.last)
    layers = list(zip(PHASES, times.seconds, strict=True))
    svg = charts.draw_stack(f"seconds per step by phase, {group.name}", times.edges, layers, frame)
    key = f"time:{group.letter}"
    for name, values in layers:
        if values.any():
            read_out.add(key, name, times.steps, values)
    rows = [
        (
            f'<i class="swatch at-{name}"></i>{name}',
            _render_seconds(times, name),
            f"{100 * times.shares[name]:.1f} %",
            meaning,
        )
        for name, meaning in [*reversed(PHASES.items()), ("between", BETWEEN)]
        if times.shares[name] > 0
    ]
    return (
        f'<div class="time"><figure class="wide stack" data-chart="{key}"><figcaption>'
        f"<b>{render_badge(group)} {escape_text(group.name)}</b>"
        f"<small>seconds per step, {charts.format_duration(times.step)} on average</small></figcaption>"
        f"{svg}</figure>"
        f"{render_table(('phase', 's per step', 'of all time', ''), rows, 'numbers last-words')}</div>"
    )


def _render_seconds(times: PhaseTimes, name: str) -> str:
    """Render the mean. The script replaces it while the reader points at a step."""
    within = 1 - times.shares["between"]
    text = "" if name == "between" or not within else f"{times.step * times.shares[name] / within:.3f}"
    return f'<span data-phase="{name}">{text}</span>'


def _shorten(value: float) -> float:
    """Return whole numbers as int, so that JSON has no ".0"."""
    return int(value) if value == int(value) else float(value)
