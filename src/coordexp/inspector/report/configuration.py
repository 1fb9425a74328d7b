"""How the runs were made: what differs between groups, settings, environment, data and objective. No environment
variables: `run.json` has none, and settings that may be secrets are not shown."""

import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from coordexp.document import written
from coordexp.inspector.report.groups import Group, Logged, differences, without_secrets
from coordexp.inspector.report.tables import table

WORD = 90  # letters of a value in a table
CHANNELS = {"A": "ground truth", "B": "rollouts"}  # groups of runs have letters too


def configuration(groups: Sequence[Group]) -> str:
    return _differences(groups) + "".join(_group(group, len(groups) == 1) for group in groups)


def _differences(groups: Sequence[Group]) -> str:
    if len(groups) < 2:
        return ""
    rows = differences(groups)
    if not rows:
        return "<p>The settings are the same; the data of the groups is not.</p>"
    heads = [f'<b class="badge of-{group.letter}">{group.letter}</b> {written(group.name)}' for group in groups]
    cells = [
        (f"<code>{written(path)}</code>", *(written(_word(value)) for value in row)) for path, row in rows.items()
    ]
    words = f"{len(rows)} setting{'s differ' if len(rows) > 1 else ' differs'}, besides seeds and names."
    return f'<p class="about">{words}</p>' + table(["setting", *heads], cells)


def _group(group: Group, alone: bool) -> str:
    settings = yaml.safe_dump(without_secrets(group.settings), sort_keys=False, allow_unicode=True)
    runs = "".join(_made(one) for one in group.runs)
    return (
        f'<h3><b class="badge of-{group.letter}">{group.letter}</b> {written(group.name)}</h3>'
        f"<details{' open' if alone else ''}><summary>Objective</summary>{_objective(group.runs[0])}</details>"
        f"<details><summary>Settings, of {written(group.runs[0].run.name)}</summary>"
        f'<pre tabindex="0">{written(settings)}</pre></details>'
        f"<details><summary>Environment and data, of each run</summary>{runs}</details>"
    )


def _objective(one: Logged) -> str:
    about = one.latest.get("objective") or {}
    rows = [
        (
            f"<code>{written(str(term['term']))}</code>",
            _weight(term["weight"]),
            written(", ".join(CHANNELS.get(each, each) for each in term["channels"])),
            written(_over(term["divided_by"])),
        )
        for term in about.get("terms", ())
    ]
    idle = "".join(
        f"<li><code>{written(name)}</code> does not run: {written(str(why))}</li>"
        for name, why in (about.get("idle") or {}).items()
    )
    masked = about.get("masked_desc") or []
    idle += f"<li>desc is masked on channel {written(', '.join(masked))}</li>" if masked else ""
    return table(("term", "weight", "on", "divided by"), rows) + (f"<ul>{idle}</ul>" if idle else "")


def _weight(weight: float | None) -> str:
    return "diagnostic" if weight is None else f"{weight:g}"


def _over(divided_by: Any) -> str:
    return divided_by if isinstance(divided_by, str) else ", ".join(divided_by)


def _made(one: Logged) -> str:
    """Every start and resume of a run."""
    starts = "".join(
        f"<h5>{'start' if k == 0 else f'resume {k}'}</h5><dl>{_facts(about)}</dl>"
        for k, about in enumerate(one.run.beginnings)
    )
    return f"<h4>{written(str(one.run.folder))}, seed {written(str(one.seed))}</h4>{starts}"


def _facts(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in (about.get("packages") or {}).items())
    facts = {
        "command": shlex.join(about.get("command") or ()),
        "files": ", ".join(about.get("files") or ()),
        "python": str(about.get("python", "")),
        "packages": packages,
        "git": _git(about.get("git")),
        **{f"{name} data": _data(found) for name, found in (about.get("data") or {}).items()},
        "rollouts": _rollouts(about.get("rollouts")),
    }
    return "".join(f"<dt>{written(name)}</dt><dd>{written(text)}</dd>" for name, text in facts.items() if text)


def _git(state: Any) -> str:
    if not isinstance(state, dict):
        return "not started in a repository"
    changed = state.get("changed_files")
    return f"{state.get('commit')}" + (f", {changed} changed file{'' if changed == 1 else 's'}" if changed else "")


def _data(found: Any) -> str:
    return f"{found['file']}, {found['records']} records, sha256 {found['sha256']}"


def _rollouts(found: Any) -> str:
    if not isinstance(found, dict):
        return ""
    simple = {name: value for name, value in found.items() if not isinstance(value, list | dict)}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in simple.items())


def _word(value: Any) -> str:
    text = "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= WORD else f"{text[: WORD - 3]}..."
