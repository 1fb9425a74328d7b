"""The charts of a page with their numbers: families of curves, time by phase, servers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordexp.document import written
from coordexp.inspector.report.axes import duration, number
from coordexp.inspector.report.curves import Curve, Stretches, curve
from coordexp.inspector.report.drawing import (
    LARGE,
    SMALL,
    WIDE,
    Frame,
    StepMark,
    line_chart,
    spread,
    stacked_chart,
)
from coordexp.inspector.report.families import Chart, Family
from coordexp.inspector.report.groups import Group
from coordexp.inspector.report.series import Floats
from coordexp.inspector.report.servers import Fleet, read_fleet
from coordexp.inspector.report.tables import table
from coordexp.inspector.report.times import BETWEEN, PHASES, Spent, spent

Curves = list[tuple[str, Curve]]  # by the letter of the group


@dataclass
class ReadOut:
    """What the page's script reads values from: steps once for all charts that share them."""

    over: Stretches
    steps: list[list[float]] = field(default_factory=list)
    charts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _known: dict[bytes, int] = field(default_factory=dict)

    def add(self, chart: str, letter: str, steps: Floats, *values: Floats) -> None:
        key = np.round(steps, 1).tobytes()
        if key not in self._known:
            self._known[key] = len(self.steps)
            self.steps.append([_short(step) for step in np.round(steps, 1)])
        shown = [[None if not np.isfinite(v) else _short(float(f"{v:.4g}")) for v in each] for each in values]
        self.charts.setdefault(chart, []).append({"g": letter, "x": self._known[key], "v": shown})


@dataclass(frozen=True)
class Drawn:
    """A family on the page, or why it is not there."""

    family: Family
    html: str | None


def draw_family(family: Family, groups: Sequence[Group], out: ReadOut, marks: Sequence[StepMark] = ()) -> Drawn:
    found = [(chart, curves) for chart in family.charts if (curves := _curves(chart, groups, out.over))]
    if not found:
        return Drawn(family, None)
    shown = [_figure(family, *each, out, marks) for each in found if not _is_zero(each[1])]
    zero = _zero([chart for chart, curves in found if _is_zero(curves)])
    about = f'<p class="about">{written(family.about)}</p>' if family.about else ""
    return Drawn(family, f'{about}<div class="charts">{"".join(shown)}</div>{zero}')


def _curves(chart: Chart, groups: Sequence[Group], over: Stretches) -> Curves:
    return [
        (group.letter, found)
        for group in groups
        if (found := curve([chart.read(one) for one in group.runs], over)) is not None
    ]


def _is_zero(curves: Curves) -> bool:
    """In all that was logged."""
    return all(not len(found.broken) and not found.lowest.any() and not found.highest.any() for _, found in curves)


def _zero(charts: Sequence[Chart]) -> str:
    """A chart of zeros says no more than a word."""
    if not charts:
        return ""
    return f'<p class="about zero">0 throughout: {written(", ".join(chart.title for chart in charts))}.</p>'


def _figure(family: Family, chart: Chart, curves: Curves, out: ReadOut, marks: Sequence[StepMark]) -> str:
    key = f"{family.key}:{chart.key}"
    for letter, found in curves:
        low, high = (found.low, found.high) if (found.runs > 1).any() else (found.lowest, found.highest)
        out.add(key, letter, found.steps, *_needed(found.mean, low, high))
    wide = chart.wide
    frame = Frame(*(LARGE if wide else SMALL), out.over.first, out.over.last)
    title, under = f"{family.title}: {chart.title}", marks if wide else ()
    picture = line_chart(title, curves, frame, share=chart.share, marks=under)
    both = not chart.share and spread(curves)
    picture += line_chart(title, curves, frame, log=True, marks=under) if both else ""
    kind = " ".join([*(["wide"] if wide else []), *(["both"] if both else [])])
    about = f"<small>{written(chart.about)}</small>" if chart.about else ""
    return (
        f'<figure class="{kind}" data-chart="{written(key)}"><figcaption>'
        f"<b>{written(chart.title)}</b>{_lasts(curves)}{about}</figcaption>{picture}</figure>"
    )


def _needed(mean: Floats, low: Floats, high: Floats) -> list[Floats]:
    return [mean] if np.array_equal(low, high, equal_nan=True) else [mean, low, high]


def _lasts(curves: Curves) -> str:
    """The last point of each line, until the reader points at another."""
    parts = []
    for letter, found in curves:
        known = found.mean[np.isfinite(found.mean)]
        parts.append(f'<span class="of-{letter}"><i>{letter}</i>{number(float(known[-1]))}</span>')
    return f"<output>{''.join(parts)}</output>"


def draw_times(groups: Sequence[Group], out: ReadOut) -> str | None:
    found = [(group, seconds) for group in groups if (seconds := spent(group, out.over)) is not None]
    if not found:
        return None
    return "".join(_time_figure(group, seconds, out) for group, seconds in found)


def _time_figure(group: Group, found: Spent, out: ReadOut) -> str:
    frame = Frame(*WIDE, out.over.first, out.over.last)
    layers = list(zip(PHASES, found.seconds, strict=True))
    picture = stacked_chart(f"seconds a step by phase, {group.name}", found.edges, layers, frame)
    key = f"time:{group.letter}"
    for name, values in layers:
        if values.any():
            out.add(key, name, found.steps, values)
    rows = [
        (
            f'<i class="swatch at-{name}"></i>{name}',
            _seconds(found, name),
            f"{100 * found.shares[name]:.1f} %",
            about,
        )
        for name, about in [*reversed(PHASES.items()), ("between", BETWEEN)]
        if found.shares[name] > 0
    ]
    return (
        f'<div class="time"><figure class="wide stack" data-chart="{key}"><figcaption>'
        f'<b><b class="badge of-{group.letter}">{group.letter}</b> {written(group.name)}</b>'
        f"<small>seconds a step; {duration(found.step)} in the mean</small></figcaption>{picture}</figure>"
        f"{table(('phase', 's a step', 'of all time', ''), rows, 'plain phases')}</div>"
    )


def _seconds(found: Spent, name: str) -> str:
    """The page's script writes those of the step that is pointed at."""
    within = 1 - found.shares["between"]
    text = "" if name == "between" or not within else f"{found.step * found.shares[name] / within:.3f}"
    return f'<span data-phase="{name}">{text}</span>'


def draw_servers(groups: Sequence[Group]) -> str | None:
    fleets = [(group, one.run.name, read_fleet(one.run.folder)) for group in groups for one in group.runs]
    tables = [_fleet(group, name, fleet) for group, name, fleet in fleets if fleet is not None]
    return "".join(tables) or None


def _fleet(group: Group, name: str, fleet: Fleet) -> str:
    rows = [
        (
            written(one.address),
            f"{one.calls:,}",
            f"{one.answers:,}",
            f"{one.lost}",
            f"{one.synced:,}",
            f"{one.failed}",
        )
        for one in fleet.servers
    ]
    names = ("server", "calls answered", "answers", "calls lost", "syncs", "syncs failed")
    told = [*(f"{why} ({count} times)" if count > 1 else why for why, count in fleet.why), *fleet.fallbacks]
    listed = "".join(f"<li>{written(each)}</li>" for each in told)
    return (
        f'<h3><b class="badge of-{group.letter}">{group.letter}</b> {written(name)}</h3><p class="about">'
        f"Syncs of {fleet.megabytes:.3g} MB: {_times(fleet.syncs, fleet.sync_seconds)}. "
        f"Rounds of answers: {_times(fleet.rounds, fleet.round_seconds)}.</p>"
        + table(names, rows)
        + (f"<ul>{listed}</ul>" if listed else "")
    )


def _times(count: int, seconds: tuple[float, float]) -> str:
    if not count:
        return "none"
    return f"{count:,}, each {duration(seconds[0])} in the median and {duration(seconds[1])} at most"


def _short(value: float) -> float:
    return int(value) if value == int(value) else float(value)
