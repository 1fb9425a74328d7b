"""The page of a report, from groups of runs and their comparison to one HTML text."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordexp.document import document, part, written
from coordexp.inspector.report.compare import Compared
from coordexp.inspector.report.configuration import configuration
from coordexp.inspector.report.curves import SMOOTH_FROM, Stretches, stretches
from coordexp.inspector.report.drawing import LEFT, RIGHT, mark_shape
from coordexp.inspector.report.families import families
from coordexp.inspector.report.forest import comparison_section
from coordexp.inspector.report.groups import Group
from coordexp.inspector.report.links import Examples, links, step_marks
from coordexp.inspector.report.sections import Drawn, ReadOut, draw_family, draw_servers, draw_times
from coordexp.inspector.report.series import NOTHING, Series
from coordexp.inspector.report.summary import summary

TIME = (
    "Phases do not overlap: compute is without the pictures and the waiting inside of it, and rest is what a step "
    "takes beyond all of them. A column is the mean over its steps and over processes; layers stand as in "
    "the table."
)
COMPARED = "Compared on the same images"
LONGEST = 90  # letters of a title
NO_TIME = "no step was timed"
NO_SERVERS = "no rollout servers were used: there is no servers.jsonl"


@dataclass(frozen=True)
class Section:
    """Without anything `inside` it is not on the page; without a title it is a part of its own."""

    key: str
    title: str
    inside: str | None
    folded: bool = False

    @property
    def html(self) -> str:
        if not self.title:
            return self.inside or ""
        if self.folded:
            summary = f"<summary>{written(self.title)}</summary>"
            return f'<details id="{self.key}">{summary}{self.inside}</details>'
        return f'<section id="{self.key}"><h2>{written(self.title)}</h2>{self.inside}</section>'


def report_page(groups: Sequence[Group], result: Compared | str, runs: Sequence[Examples]) -> str:
    """`result` is the comparison, or why there is none."""
    logged = [one.log.get("loss", NOTHING) for group in groups for one in group.runs]
    out = ReadOut(stretches([*logged, *_evaluated(groups)], len(groups)))
    marks = step_marks(runs)
    drawn = [draw_family(family, groups, out, marks) for family in families(groups)]
    times, servers = draw_times(groups, out), draw_servers(groups)
    sections = [
        Section("comparison", COMPARED, _comparison(result, len(groups))),
        Section("reading", "", f'<p class="about key">{written(_reading(groups, out.over))}</p>'),
        *_families(drawn[:2]),
        Section("time", "Where the time goes", times and f'<p class="about">{TIME}</p>{times}'),
        *_families(drawn[2:]),
        Section("servers", "Rollout servers", servers),
        Section("absent", "Not here", _absent(drawn, times, servers)),
        Section("settings", "How they were made", configuration(groups)),
    ]
    shown = [section for section in sections if section.inside]
    name = _title([group.name for group in groups])
    contents = [(section.key, section.title) for section in shown if section.title]
    body = (
        f"{_bar(groups, out.over)}<main>{_head(name, groups, contents)}"
        f'<section id="summary">{summary(groups)}{links(runs)}</section>'
        f"{''.join(section.html for section in shown)}</main>"
    )
    data = {"first": out.over.first, "last": out.over.last, "left": LEFT, "right": RIGHT}
    return document(
        f"Run report: {name}",
        body,
        styles=[part(__package__, "report.css")],
        scripts=[part(__package__, "report.js")],
        data={"curves": data | {"steps": out.steps, "charts": out.charts}},
    )


def _title(names: Sequence[str]) -> str:
    told = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return told if len(told) <= LONGEST else f"{names[0]} and {len(names) - 1} others"


def _evaluated(groups: Sequence[Group]) -> list[Series]:
    return [one.log.get("eval_f1_50", NOTHING) for group in groups for one in group.runs]


def _head(name: str, groups: Sequence[Group], contents: Sequence[tuple[str, str]]) -> str:
    runs = sum(len(group.runs) for group in groups)
    words = f"{runs} run{'s' if runs > 1 else ''}"
    words += (
        f" in {len(groups)} groups; runs that differ in seeds and names alone are one" if len(groups) > 1 else ""
    )
    ways = "".join(f'<a href="#{key}">{written(title)}</a>' for key, title in contents)
    head = f'<p class="kicker">coordexp run report</p><h1>{written(name)}</h1><p>{words}</p>'
    return f'<header>{head}<nav aria-label="Sections">{ways}</nav></header>'


def _bar(groups: Sequence[Group], over: Stretches) -> str:
    """Stays in sight: which group is which, and the step that all charts tell the values of. The controls are for
    the script, and shown by it."""
    keys = "".join(
        f'<button type="button" class="key of-{group.letter}" data-group="{group.letter}" aria-pressed="true">'
        f'<svg viewBox="0 0 34 12" aria-hidden="true"><path class="line" d="M1 6H33"/>'
        f'<path class="mark" d="{mark_shape(group.letter, 17, 6, 3.4)}"/></svg>'
        f"<b>{group.letter}</b> {written(group.name)}</button>"
        for group in groups
    )
    return (
        f'<div class="bar"><div class="keys" role="group" aria-label="Groups">{keys}</div>'
        '<div class="tools" hidden>'
        '<label class="smooth"><input type="checkbox" checked> running mean</label>'
        '<label class="scale"><input type="checkbox"> log scale</label>'
        f'<label>step <input type="range" min="{over.first}" max="{over.last}" value="{over.last}" '
        f'aria-label="Step that all charts tell the values of"></label><output id="step">last</output></div></div>'
    )


def _reading(groups: Sequence[Group], over: Stretches) -> str:
    several = max(len(group.runs) for group in groups) > 1
    parts = ["The x axis is optimizer steps."]
    if several:
        counts = ", ".join(f"{group.letter} {len(group.runs)}" for group in groups)
        parts.append(
            f"Lines are means over the runs of a group (seeds: {counts}); the band is from the lowest to the "
            "highest run."
        )
    if over.length > 1:
        parts.append(
            f"A point stands for {over.length:.3g} steps: the mean of what was logged in them"
            + (
                ", and the wide pale band holds every single value."
                if several
                else "; the band holds every value."
            )
        )
    if over.count > SMOOTH_FROM:
        width = 2 * (over.count // 50) + 1
        parts.append(
            f"Of lines with more than {SMOOTH_FROM} points the thick one is a running mean over up to {width} "
            "points, fewer at the ends; the thin one is as logged."
        )
    parts.append(
        "Steps without a value are passed over; a cross marks one that was NaN or infinite, and a gap is left."
    )
    return " ".join(parts)


def _comparison(result: Compared | str, groups: int) -> str | None:
    if isinstance(result, Compared):
        return comparison_section(result)
    return None if groups < 2 else f'<p class="note">Not compared: {written(result)}.</p>'


def _families(drawn: Sequence[Drawn]) -> list[Section]:
    return [Section(each.family.key, each.family.title, each.html, each.family.folded) for each in drawn]


def _absent(drawn: Sequence[Drawn], times: str | None, servers: str | None) -> str | None:
    """One line for each family that has nothing to show."""
    missing = [(each.family.title, each.family.absent) for each in drawn if each.html is None]
    missing += [("Where the time goes", NO_TIME)] if times is None else []
    missing += [("Rollout servers", NO_SERVERS)] if servers is None else []
    lines = "".join(f"<li><b>{written(title)}</b>: {written(why)}</li>" for title, why in missing)
    return f"<ul>{lines}</ul>" if missing else None
