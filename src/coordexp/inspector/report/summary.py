"""The first look at a group of runs: how far, how long, how good, and what to look at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.document import written
from coordexp.inspector.report.axes import duration, number
from coordexp.inspector.report.groups import Group, Logged
from coordexp.inspector.report.notes import notes_on
from coordexp.inspector.report.series import NOTHING
from coordexp.inspector.report.times import share_of_step


@dataclass(frozen=True)
class Tile:
    value: str
    name: str
    more: str = ""


def summary(groups: Sequence[Group]) -> str:
    return "".join(_group(group) for group in groups)


def tiles(group: Group) -> list[Tile]:
    """Numbers are means over the seeds, with the lowest and the highest."""
    runs = group.runs
    found = [_steps(group), _tile(runs, "wall time", lambda one: one.log.get("seconds", NOTHING).last, duration)]
    found.append(_tile(runs, "last loss", lambda one: one.log.get("loss", NOTHING).last, number))
    for name, title in (("f1_50", "F1"), ("recall_50", "recall"), ("precision_50", "precision"), ("ap", "AP")):
        found.append(_tile(runs, title, _last(f"eval_{name}"), lambda value: f"{value:.3f}"))
    found.append(_tile(runs, "training answers", _answers, number))
    if any("rollout/answers" in one.log for one in runs):
        found.append(
            _tile(runs, "of step time in rollouts", lambda one: share_of_step(one.log, "rollout"), _percent)
        )
    found.append(_tile(runs, "of step time waiting", lambda one: share_of_step(one.log, "waited"), _percent))
    return [tile for tile in found if tile is not None]


def _group(group: Group) -> str:
    shown = "".join(
        f'<div class="tile"><b>{written(tile.value)}</b><span>{written(tile.name)}</span>'
        f"{f'<small>{written(tile.more)}</small>' if tile.more else ''}</div>"
        for tile in tiles(group)
    )
    notes = "".join(f"<li>{written(note)}</li>" for note in notes_on(group))
    count = len(group.runs)
    seeds = f"{count} runs, seeds {group.seeds}" if count > 1 else f"seed {group.seeds}"
    looked = f'<div class="look"><h4>What to look at</h4><ul>{notes}</ul></div>' if notes else ""
    return (
        f'<article class="group of-{group.letter}"><h3><b class="badge">{group.letter}</b> {written(group.name)} '
        f'<small>{written(_variant(group))}, {written(seeds)}</small></h3><div class="tiles">{shown}</div>{looked}'
        "</article>"
    )


def _variant(group: Group) -> str:
    return str((group.settings.get("custom") or {}).get("trainer_variant", "run")).replace("_", " ")


def _steps(group: Group) -> Tile:
    done = [int(steps[-1]) if len(steps := one.log.get("loss", NOTHING).steps) else 0 for one in group.runs]
    of = (group.settings.get("training") or {}).get("max_steps")
    shown = f"{min(done):,}" if len(set(done)) == 1 else f"{min(done):,} to {max(done):,}"
    return Tile(shown, f"of {of:,} steps" if isinstance(of, int) and of > 0 else "steps")


def _tile(
    runs: Sequence[Logged], name: str, read: Callable[[Logged], float | None], show: Callable[[float], str]
) -> Tile | None:
    """None when no run has the number."""
    values = [value for one in runs if (value := read(one)) is not None]
    if not values:
        return None
    low, high = show(min(values)), show(max(values))
    return Tile(show(sum(values) / len(values)), name, f"{low} to {high}" if low != high else "")


def _last(name: str) -> Callable[[Logged], float | None]:
    return lambda one: one.log.get(name, NOTHING).last


def _answers(one: Logged) -> float | None:
    series = one.log.get("rollout/answers", NOTHING)
    return float(np.nansum(series.values)) if len(series) else None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
