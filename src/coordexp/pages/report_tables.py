"""The tables of a report: the comparison with its intervals, and how the runs were made.

`run.json` has no environment variables, and settings that may be secrets are not shown.
"""

import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from coordexp.pages.charts import Scale, choose_ticks
from coordexp.pages.comparison import ComparisonResult, GroupComparison, RateDifference, describe_interval
from coordexp.pages.document import escape_text, render_list, render_table
from coordexp.pages.report_charts import EVALUATED
from coordexp.pages.run_folder import (
    LoggedRun,
    RunGroup,
    RunObjective,
    RunStart,
    find_differences,
    hide_secrets,
)

WIDTH, HEIGHT, MARGIN = 300, 22, 8
METHOD = (
    "Paired bootstrap over images: {resamples:,} times, as many images as there are ({images:,}) are drawn with "
    "replacement, the same ones for every run. Rates are ratios of sums over the drawn images, averaged over "
    "seeds. The bar is the middle 95 % of the differences: what to expect on other images with the same weights. "
    "Of twenty rates that do not differ, about one interval excludes 0 by chance."
)
SEEDS = (
    " The thin line includes other seeds: the variance over images plus that of the means over seeds, with "
    "Student's t (Welch), because a bootstrap of so few seeds would be overconfident. A difference is called "
    "better or worse if both intervals exclude 0."
)
SIGN = "Share of resamples in which the difference has this sign"
FEW_SEEDS = " With fewer than three seeds on a side, nothing can be said about other seeds."
NO_INTERVAL = (
    "AP has no interval: it ranks the objects of all images together, so it is not a ratio of sums over images. "
    "It is shown as the runs logged it."
)
MAX_LETTERS = 90  # of a value in a table
CHANNELS = {"A": "ground truth", "B": "rollouts"}  # in words, because groups of runs have letters too


def render_comparison(result: ComparisonResult) -> str:
    words = METHOD.format(resamples=result.resamples, images=result.images)
    words += SEEDS if any(comparison.has_seed_intervals for comparison in result.comparisons) else FEW_SEEDS
    notes = "".join(f'<p class="note">{escape_text(note)}</p>' for note in result.notes)
    tables = "".join(_render_intervals(comparison, result) for comparison in result.comparisons)
    return f'<p class="about">{escape_text(words)}</p>{notes}{tables}<p class="about">{NO_INTERVAL}</p>'


def _render_intervals(comparison: GroupComparison, result: ComparisonResult) -> str:
    rows = comparison.rows
    ends = [end for row in rows for pair in (row.image_interval, row.seed_interval) if pair for end in pair]
    reach = max((abs(end) for end in ends), default=0.01) or 0.01
    scale = Scale(-reach * 1.05, reach * 1.05, MARGIN, WIDTH - MARGIN)
    quality = [row for row in rows if "_50" in row.name]  # F1, recall and precision at IoU 0.5
    behaviour = [row for row in rows if row not in quality and (row.base or row.other)]
    never = [EVALUATED[row.name][0] for row in rows if row not in quality and row not in behaviour]
    groups = (comparison.base, comparison.other)
    names = [f"{group.letter} {group.name}, {_describe_steps(result.steps[group.letter])}" for group in groups]
    seeds = comparison.has_seed_intervals
    good = [*(_render_row(row, scale, True, seeds) for row in quality), _render_average(comparison, seeds)]
    bad = [*(_render_row(row, scale, False, seeds) for row in behaviour), _render_never(never)]
    body = _render_part("Quality, higher is better", good) + _render_part("Behaviour, lower is better", bad)
    heads = ["difference", _draw_axis(scale), "95 % over images", *(["95 % with seeds"] if seeds else [])]
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Comparison"><table class="numbers forest">'
        f"<caption>{escape_text(names[1])} against {escape_text(names[0])}</caption>"
        f'<thead><tr><th scope="col">rate</th><th scope="col">{render_badge(groups[0])}</th>'
        f'<th scope="col">{render_badge(groups[1])}</th>{head}<th scope="col" title="{SIGN}">same sign</th>'
        f"</tr></thead>{body}</table></div>"
    )


def _describe_steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(set(steps)) == 1 else f"steps {', '.join(map(str, steps))}"


def render_badge(group: RunGroup) -> str:
    return f'<b class="badge of-{group.letter}">{group.letter}</b>'


def _render_part(title: str, rows: Sequence[str]) -> str:
    head = f'<tr class="part"><th colspan="8" scope="rowgroup">{title}</th></tr>'
    return f"<tbody>{head}{''.join(rows)}</tbody>" if any(rows) else ""


def _render_row(row: RateDifference, scale: Scale, higher_is_better: bool, seeds: bool) -> str:
    style = "" if not row.is_clear else " better" if (row.value > 0) == higher_is_better else " worse"
    intervals = [row.image_interval, *([row.seed_interval] if seeds else [])]
    same_sign = "-" if row.same_sign is None else f"{100 * row.same_sign:.1f} %"
    cells = [_draw_intervals(row, scale), *map(describe_interval, intervals), same_sign]
    return _render_cells(EVALUATED[row.name][0], style, row.base, row.other, cells)


def _render_average(comparison: GroupComparison, seeds: bool) -> str:
    if comparison.average_precision is None:
        return ""
    return _render_cells("AP", "", *comparison.average_precision, ["", *["-"] * (3 if seeds else 2)])


def _render_never(names: Sequence[str]) -> str:
    words = f"0 in both: {', '.join(names)}"
    return f'<tr class="row"><td class="never" colspan="8">{escape_text(words)}</td></tr>' if names else ""


def _render_cells(title: str, style: str, base: float, other: float, cells: Sequence[str]) -> str:
    rest = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f'<tr class="row{style}"><th scope="row">{escape_text(title)}</th><td>{base:.4f}</td><td>{other:.4f}</td>'
        f'<td class="delta">{_format_signed(other - base)}</td>{rest}</tr>'
    )


def _draw_intervals(row: RateDifference, scale: Scale) -> str:
    middle, zero = HEIGHT / 2, scale.at(0)
    parts = [f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{HEIGHT}"/>']
    if row.seed_interval is not None:
        low, high = (scale.at(end) for end in row.seed_interval)
        parts.append(f'<path class="seeds" d="M{low:.1f} {middle - 3}v6m0-3H{high:.1f}m0-3v6"/>')
    if row.image_interval is not None:
        low, high = (scale.at(end) for end in row.image_interval)
        place = f'x="{low:.1f}" width="{max(0.5, high - low):.1f}" y="{middle - 3}"'
        parts.append(f'<rect class="images" {place} height="6" rx="2"/>')
    parts.append(f'<circle class="value" cx="{scale.at(row.value):.1f}" cy="{middle}" r="4"/>')
    label = f"difference {_format_signed(row.value)}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _draw_axis(scale: Scale) -> str:
    parts = []
    for value in choose_ticks(scale.low, scale.high, 4):
        x = min(max(scale.at(value), 16), WIDTH - 16)
        label = "0" if value == 0 else f"{value:+g}"
        parts.append(f'<text x="{x:.1f}" y="14" text-anchor="middle">{label}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{"".join(parts)}</svg>'


def _format_signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.4f}"


def render_configuration(groups: Sequence[RunGroup]) -> str:
    return _render_differences(groups) + "".join(_render_group(group, len(groups) == 1) for group in groups)


def _render_differences(groups: Sequence[RunGroup]) -> str:
    if len(groups) < 2:
        return ""
    rows = find_differences(groups)
    if not rows:
        return "<p>The groups have the same settings, but different data.</p>"
    heads = [f"{render_badge(group)} {escape_text(group.name)}" for group in groups]
    cells = [
        (f"<code>{escape_text(path)}</code>", *(escape_text(format_value(value)) for value in row))
        for path, row in rows.items()
    ]
    words = f"{len(rows)} setting{'s differ' if len(rows) > 1 else ' differs'}, besides seeds and names."
    return f'<p class="about">{words}</p>' + render_table(["setting", *heads], cells)


def _render_group(group: RunGroup, is_open: bool) -> str:
    settings = yaml.safe_dump(hide_secrets(group.settings), sort_keys=False, allow_unicode=True)
    first = group.runs[0]
    objective = _render_objective(first.run.latest_start.objective)
    return (
        f"<h3>{render_badge(group)} {escape_text(group.name)}</h3>"
        f"<details{' open' if is_open else ''}><summary>Objective</summary>{objective}</details>"
        f"<details><summary>Settings of {escape_text(first.name)}</summary>"
        f'<pre tabindex="0">{escape_text(settings)}</pre></details>'
        f"<details><summary>Environment and data of each run</summary>"
        f"{''.join(map(_render_starts, group.runs))}</details>"
    )


def _render_objective(objective: RunObjective | None) -> str:
    heads = ("term", "weight", "on", "divided by")
    if objective is None:
        return render_table(heads, ())
    rows = [
        (
            f"<code>{escape_text(term.term)}</code>",
            "diagnostic" if term.weight is None else f"{term.weight:g}",
            escape_text(", ".join(CHANNELS.get(channel, channel) for channel in term.channels)),
            escape_text(", ".join(term.divided_by)),
        )
        for term in objective.terms
    ]
    remarks = [
        f"<code>{escape_text(name)}</code> does not run: {escape_text(str(reason))}"
        for name, reason in (objective.idle or {}).items()
    ]
    if objective.masked_desc:
        remarks.append(f"desc is masked on channel {escape_text(', '.join(objective.masked_desc))}")
    return render_table(heads, rows) + render_list(remarks)


def _render_starts(run: LoggedRun) -> str:
    starts = "".join(
        f'<h5>{"start" if k == 0 else f"resume {k}"}</h5><dl class="facts">{_render_facts(start)}</dl>'
        for k, start in enumerate(run.run.starts)
    )
    return f"<h4>{escape_text(str(run.run.folder))}, seed {escape_text(str(run.seed))}</h4>{starts}"


def _render_facts(start: RunStart) -> str:
    facts = {
        "command": shlex.join(start.command or ()),
        "files": ", ".join(start.files or ()),
        "python": str(start.python),
        "packages": ", ".join(f"{name} {version}" for name, version in (start.packages or {}).items()),
        "git": _describe_git(start.git),
        **{f"{name} data": str(file) for name, file in (start.data or {}).items()},
        "rollouts": _describe_rollouts(start.rollouts),
    }
    return "".join(
        f"<dt>{escape_text(name)}</dt><dd>{escape_text(text)}</dd>" for name, text in facts.items() if text
    )


def _describe_git(state: Any) -> str:
    if not isinstance(state, dict):
        return "not started in a repository"
    changed = state.get("changed_files")
    return f"{state.get('commit')}" + (f", {changed} changed file{'' if changed == 1 else 's'}" if changed else "")


def _describe_rollouts(facts: Any) -> str:
    if not isinstance(facts, dict):
        return ""
    simple = {name: value for name, value in facts.items() if not isinstance(value, list | dict)}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in simple.items())


def format_value(value: Any) -> str:
    text = "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."
