"""The page of a report: groups of runs and their comparison in, one HTML text out, with links to the inspector."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from coordexp.document import escape_text, read_resource, render_document
from coordexp.dumps import FOLDER, step_files
from coordexp.inspector.report.compare import ComparisonResult
from coordexp.inspector.report.configuration import render_configuration
from coordexp.inspector.report.drawing import LEFT, RIGHT, StepMark, mark_path
from coordexp.inspector.report.families import list_families
from coordexp.inspector.report.forest import render_comparison
from coordexp.inspector.report.groups import RunGroup
from coordexp.inspector.report.notes import render_summary
from coordexp.inspector.report.sections import DrawnFamily, ReadOut, draw_family, draw_times, render_servers
from coordexp.inspector.report.series import SMOOTH_FROM, StepRanges, divide_steps
from coordexp.inspector.run import INSPECTOR

TIME = (
    "Phases do not overlap: compute excludes reading images and waiting, and rest is what a step takes besides "
    "all of them. A column is the mean over its steps and over processes. Layers are in the order of the table."
)
MAX_TITLE = 90  # letters
MAX_MARKS = 120  # of a run
MAX_MARK_ROWS = 8
NO_TIME = "no step was timed"
NO_SERVERS = "no rollout servers were used: there is no servers.jsonl"


@dataclass(frozen=True)
class ReportSection:
    """A section without `content` is not on the page. One without a title is inserted without a frame."""

    key: str
    title: str
    content: str | None
    folded: bool = False

    @property
    def html(self) -> str:
        if not self.title:
            return self.content or ""
        if self.folded:
            summary = f"<summary>{escape_text(self.title)}</summary>"
            return f'<details id="{self.key}">{summary}{self.content}</details>'
        return f'<section id="{self.key}"><h2>{escape_text(self.title)}</h2>{self.content}</section>'


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
                address = _relative_address(page, report) if page.is_file() else None
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
    drawn = [draw_family(family, groups, read_out, marks) for family in list_families(groups)]
    times, servers = draw_times(groups, read_out), render_servers(groups)
    how_to_read = f'<p class="about key">{escape_text(_explain_charts(groups, read_out.ranges))}</p>'
    sections = [
        ReportSection("comparison", "Compared on the same images", _render_result(result, len(groups))),
        ReportSection("reading", "", how_to_read),
        *_family_sections(drawn[:2]),
        ReportSection("time", "Where the time goes", times and f'<p class="about">{TIME}</p>{times}'),
        *_family_sections(drawn[2:]),
        ReportSection("servers", "Rollout servers", servers),
        ReportSection("absent", "Not available", _render_absent(drawn, times, servers)),
        ReportSection("settings", "How they were made", render_configuration(groups)),
    ]
    shown = [section for section in sections if section.content]
    name = _join_names([group.name for group in groups])
    body = (
        f"{_render_bar(groups, read_out.ranges)}<main>{_render_head(name, groups, shown)}"
        f'<section id="summary">{render_summary(groups)}{_render_links(runs)}</section>'
        f"{''.join(section.html for section in shown)}</main>"
    )
    data = {"first": read_out.ranges.first, "last": read_out.ranges.last, "left": LEFT, "right": RIGHT}
    return render_document(
        f"Run report: {name}",
        body,
        styles=[read_resource(__package__, "report.css")],
        scripts=[read_resource(__package__, "report.js")],
        data={"curves": data | {"steps": read_out.steps, "charts": read_out.charts}},
    )


def make_step_marks(runs: Sequence[RunExamples]) -> list[StepMark]:
    """Return the triangles under the loss, one row per run, for as many runs and steps as there is room."""
    marks = []
    for row, run in enumerate([run for run in runs if run.steps][:MAX_MARK_ROWS]):
        stride = -(-len(run.steps) // MAX_MARKS)
        for step in run.steps[::stride]:
            href = f"{run.page}#step={step}" if run.page else ""
            words = f"{run.name}, step {step}: dumped examples" + (", in the inspector" if href else "")
            marks.append(StepMark(step, row, run.letter, words, href))
    return marks


def _render_links(runs: Sequence[RunExamples]) -> str:
    """Render links to the inspector's pages, and the command that makes the missing ones."""
    parts = []
    linked = [run for run in runs if run.page]
    if linked:
        links = ", ".join(
            f'<a href="{escape_text(run.page or "")}">{escape_text(_unique_name(run, linked))}</a>'
            for run in linked
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


def _unique_name(run: RunExamples, runs: Sequence[RunExamples]) -> str:
    """Return the name, or the folder if several runs have the same name."""
    return run.name if sum(other.name == run.name for other in runs) == 1 else str(run.folder)


def _relative_address(page: Path, report: Path) -> str:
    return quote(Path(os.path.relpath(page.resolve(), report.resolve().parent)).as_posix())


def _join_names(names: Sequence[str]) -> str:
    title = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return title if len(title) <= MAX_TITLE else f"{names[0]} and {len(names) - 1} others"


def _render_head(name: str, groups: Sequence[RunGroup], sections: Sequence[ReportSection]) -> str:
    runs = sum(len(group.runs) for group in groups)
    words = f"{runs} run{'s' if runs > 1 else ''}"
    words += f" in {len(groups)} groups; runs in a group differ only in seeds and names" if len(groups) > 1 else ""
    links = "".join(
        f'<a href="#{section.key}">{escape_text(section.title)}</a>' for section in sections if section.title
    )
    head = f'<p class="kicker">coordexp run report</p><h1>{escape_text(name)}</h1><p>{words}</p>'
    return f'<header>{head}<nav aria-label="Sections">{links}</nav></header>'


def _render_bar(groups: Sequence[RunGroup], ranges: StepRanges) -> str:
    """Render the bar that stays visible: the legend of the groups, and the step whose values all charts show. The
    controls need the script, which unhides them."""
    keys = "".join(
        f'<button type="button" class="key of-{group.letter}" data-group="{group.letter}" aria-pressed="true">'
        f'<svg viewBox="0 0 34 12" aria-hidden="true"><path class="line" d="M1 6H33"/>'
        f'<path class="mark" d="{mark_path(group.letter, 17, 6, 3.4)}"/></svg>'
        f"<b>{group.letter}</b> {escape_text(group.name)}</button>"
        for group in groups
    )
    return (
        f'<div class="bar"><div class="keys" role="group" aria-label="Groups">{keys}</div>'
        '<div class="tools" hidden>'
        '<label class="smooth"><input type="checkbox" checked> running mean</label>'
        '<label class="scale"><input type="checkbox"> log scale</label>'
        f'<label>step <input type="range" min="{ranges.first}" max="{ranges.last}" value="{ranges.last}" '
        f'aria-label="Step whose values all charts show"></label><output id="step">last</output></div></div>'
    )


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


def _render_result(result: ComparisonResult | str, groups: int) -> str | None:
    if isinstance(result, ComparisonResult):
        return render_comparison(result)
    return None if groups < 2 else f'<p class="note">Not compared: {escape_text(result)}.</p>'


def _family_sections(drawn: Sequence[DrawnFamily]) -> list[ReportSection]:
    return [ReportSection(item.family.key, item.family.title, item.html, item.family.folded) for item in drawn]


def _render_absent(drawn: Sequence[DrawnFamily], times: str | None, servers: str | None) -> str | None:
    """Render one line with the reason for everything that has nothing to show."""
    missing = [(item.family.title, item.family.absent) for item in drawn if item.html is None]
    missing += [("Where the time goes", NO_TIME)] if times is None else []
    missing += [("Rollout servers", NO_SERVERS)] if servers is None else []
    lines = "".join(f"<li><b>{escape_text(title)}</b>: {escape_text(reason)}</li>" for title, reason in missing)
    return f"<ul>{lines}</ul>" if missing else None
