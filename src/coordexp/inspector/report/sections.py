"""The charts of a report with their numbers: families of curves, time by phase, rollout servers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordexp.document import escape_text
from coordexp.inspector.report.drawing import (
    LARGE,
    SMALL,
    WIDE,
    Frame,
    StepMark,
    draw_lines,
    draw_stack,
    format_duration,
    format_number,
    needs_log_scale,
    render_table,
)
from coordexp.inspector.report.families import Chart, Family
from coordexp.inspector.report.groups import RunGroup
from coordexp.inspector.report.series import Curve, Floats, StepRanges, build_curve
from coordexp.inspector.report.servers import ServerSummary, read_servers
from coordexp.inspector.report.times import BETWEEN, PHASES, PhaseTimes, measure_phases

Curves = list[tuple[str, Curve]]  # with the letter of the group


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


@dataclass(frozen=True)
class DrawnFamily:
    """`html` is None if there is nothing to draw."""

    family: Family
    html: str | None


def draw_family(
    family: Family, groups: Sequence[RunGroup], read_out: ReadOut, marks: Sequence[StepMark] = ()
) -> DrawnFamily:
    charts = [(chart, curves) for chart in family.charts if (curves := _curves(chart, groups, read_out.ranges))]
    if not charts:
        return DrawnFamily(family, None)
    figures = [
        _draw_figure(family, chart, curves, read_out, marks) for chart, curves in charts if not _is_zero(curves)
    ]
    zero = ", ".join(chart.title for chart, curves in charts if _is_zero(curves))
    zero_note = f'<p class="about zero">0 throughout: {escape_text(zero)}.</p>' if zero else ""
    note = f'<p class="about">{escape_text(family.note)}</p>' if family.note else ""
    return DrawnFamily(family, f'{note}<div class="charts">{"".join(figures)}</div>{zero_note}')


def _curves(chart: Chart, groups: Sequence[RunGroup], ranges: StepRanges) -> Curves:
    curves = [
        (group.letter, build_curve([chart.metric.read(run) for run in group.runs], ranges)) for group in groups
    ]
    return [(letter, curve) for letter, curve in curves if curve is not None]


def _is_zero(curves: Curves) -> bool:
    """Return whether every logged value is 0. Such a chart says no more than a word."""
    return all(not len(curve.broken) and not curve.lowest.any() and not curve.highest.any() for _, curve in curves)


def _draw_figure(
    family: Family, chart: Chart, curves: Curves, read_out: ReadOut, marks: Sequence[StepMark]
) -> str:
    key = f"{family.key}:{chart.key}"
    for letter, curve in curves:
        low, high = (curve.low, curve.high) if (curve.runs > 1).any() else (curve.lowest, curve.highest)
        has_band = not np.array_equal(low, high, equal_nan=True)
        read_out.add(key, letter, curve.steps, curve.mean, *((low, high) if has_band else ()))
    frame = Frame(*(LARGE if chart.wide else SMALL), read_out.ranges.first, read_out.ranges.last)
    title, step_marks = f"{family.title}: {chart.title}", marks if chart.wide else ()
    svg = draw_lines(title, curves, frame, share=chart.share, marks=step_marks)
    has_log_scale = not chart.share and needs_log_scale(curves)
    svg += draw_lines(title, curves, frame, log=True, marks=step_marks) if has_log_scale else ""
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
        parts.append(f'<span class="of-{letter}"><i>{letter}</i>{format_number(float(known[-1]))}</span>')
    return f"<output>{''.join(parts)}</output>"


def draw_times(groups: Sequence[RunGroup], read_out: ReadOut) -> str | None:
    """Return the charts of time by phase, or None if no group has times."""
    times = [(group, measure_phases(group, read_out.ranges)) for group in groups]
    figures = [_draw_time(group, phases, read_out) for group, phases in times if phases is not None]
    return "".join(figures) or None


def _draw_time(group: RunGroup, times: PhaseTimes, read_out: ReadOut) -> str:
    frame = Frame(*WIDE, read_out.ranges.first, read_out.ranges.last)
    layers = list(zip(PHASES, times.seconds, strict=True))
    svg = draw_stack(f"seconds per step by phase, {group.name}", times.edges, layers, frame)
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
        f'<b><b class="badge of-{group.letter}">{group.letter}</b> {escape_text(group.name)}</b>'
        f"<small>seconds per step, {format_duration(times.step)} on average</small></figcaption>{svg}</figure>"
        f"{render_table(('phase', 's per step', 'of all time', ''), rows, 'plain phases')}</div>"
    )


def _render_seconds(times: PhaseTimes, name: str) -> str:
    """Render the mean. The script replaces it while the reader points at a step."""
    within = 1 - times.shares["between"]
    text = "" if name == "between" or not within else f"{times.step * times.shares[name] / within:.3f}"
    return f'<span data-phase="{name}">{text}</span>'


def render_servers(groups: Sequence[RunGroup]) -> str | None:
    """Return a table per run that used rollout servers, or None without any."""
    summaries = [(group, run.name, read_servers(run.run.folder)) for group in groups for run in group.runs]
    tables = [_render_summary(group, name, summary) for group, name, summary in summaries if summary is not None]
    return "".join(tables) or None


def _render_summary(group: RunGroup, name: str, summary: ServerSummary) -> str:
    rows = [
        (
            escape_text(server.address),
            f"{server.calls:,}",
            f"{server.answers:,}",
            f"{server.lost}",
            f"{server.synced:,}",
            f"{server.failed}",
        )
        for server in summary.servers
    ]
    heads = ("server", "calls answered", "answers", "calls lost", "syncs", "syncs failed")
    failures = [f"{reason} ({count} times)" if count > 1 else reason for reason, count in summary.failures]
    items = "".join(f"<li>{escape_text(text)}</li>" for text in (*failures, *summary.fallbacks))
    return (
        f'<h3><b class="badge of-{group.letter}">{group.letter}</b> {escape_text(name)}</h3><p class="about">'
        f"Weight syncs of {summary.megabytes:.3g} MB: {_describe_times(summary.syncs, summary.sync_seconds)}. "
        f"Rounds of answers: {_describe_times(summary.rounds, summary.round_seconds)}.</p>"
        + render_table(heads, rows)
        + (f"<ul>{items}</ul>" if items else "")
    )


def _describe_times(count: int, seconds: tuple[float, float]) -> str:
    if not count:
        return "none"
    return f"{count:,}, median {format_duration(seconds[0])}, at most {format_duration(seconds[1])}"


def _shorten(value: float) -> float:
    """Return whole numbers as int, so that JSON has no ".0"."""
    return int(value) if value == int(value) else float(value)
