"""How the runs were made: settings that differ between groups, then objective, settings, environment and data.

`run.json` has no environment variables, and settings that may be secrets are not shown.
"""

import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from coordexp.document import escape_text
from coordexp.inspector.report.drawing import render_table
from coordexp.inspector.report.groups import LoggedRun, RunGroup, find_differences, hide_secrets
from coordexp.inspector.run import RunObjective, RunStart

MAX_LETTERS = 90  # of a value in a table
CHANNELS = {"A": "ground truth", "B": "rollouts"}  # in words, because groups of runs have letters too


def render_configuration(groups: Sequence[RunGroup]) -> str:
    return _render_differences(groups) + "".join(_render_group(group, len(groups) == 1) for group in groups)


def _render_differences(groups: Sequence[RunGroup]) -> str:
    if len(groups) < 2:
        return ""
    rows = find_differences(groups)
    if not rows:
        return "<p>The groups have the same settings, but different data.</p>"
    heads = [
        f'<b class="badge of-{group.letter}">{group.letter}</b> {escape_text(group.name)}' for group in groups
    ]
    cells = [
        (f"<code>{escape_text(path)}</code>", *(escape_text(_format_value(value)) for value in row))
        for path, row in rows.items()
    ]
    words = f"{len(rows)} setting{'s differ' if len(rows) > 1 else ' differs'}, besides seeds and names."
    return f'<p class="about">{words}</p>' + render_table(["setting", *heads], cells)


def _render_group(group: RunGroup, is_open: bool) -> str:
    settings = yaml.safe_dump(hide_secrets(group.settings), sort_keys=False, allow_unicode=True)
    first = group.runs[0]
    objective = _render_objective(first.run.latest_start.objective)
    return (
        f'<h3><b class="badge of-{group.letter}">{group.letter}</b> {escape_text(group.name)}</h3>'
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
    remarks = "".join(
        f"<li><code>{escape_text(name)}</code> does not run: {escape_text(str(reason))}</li>"
        for name, reason in (objective.idle or {}).items()
    )
    if objective.masked_desc:
        remarks += f"<li>desc is masked on channel {escape_text(', '.join(objective.masked_desc))}</li>"
    return render_table(heads, rows) + (f"<ul>{remarks}</ul>" if remarks else "")


def _render_starts(run: LoggedRun) -> str:
    starts = "".join(
        f"<h5>{'start' if k == 0 else f'resume {k}'}</h5><dl>{_render_facts(start)}</dl>"
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


def _format_value(value: Any) -> str:
    text = "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."
