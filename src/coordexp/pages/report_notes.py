"""The first look at a group of runs: headline numbers, and notes on what deserves attention.

A rule for notes is a pure function from a run or a group to sentences, empty if there is nothing to report. The
thresholds of all rules are listed below.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordexp.pages.charts import format_duration, format_number
from coordexp.pages.curves import Series, Steps, share_of_step
from coordexp.pages.document import escape_text, render_look, render_tiles
from coordexp.pages.report_servers import ServerSummary, note_servers_out
from coordexp.pages.report_tables import format_value
from coordexp.pages.run_folder import LoggedRun, RunGroup

LATE = 0.25  # the share of lines, from the end, by which rates of training answers are judged
MAX_BAD_SHARE = 0.1  # of answers cut off, looped or unreadable, and of objects invalid
MAX_REPEATS = 0.05  # of valid objects
WORSE = 0.02  # F1 below the best evaluation
MAX_WAITING = 0.3  # of the time in steps
SPIKE = 20.0  # times the median of the gradient norm
MAX_SETTINGS = 6  # in which groups differ, listed with each group; the table of settings has all of them

TRAINING_RATES = (
    (
        "rollout/cut_off",
        "rollout/answers",
        MAX_BAD_SHARE,
        "of the training answers were cut off at max_new_tokens",
    ),
    ("rollout/looped", "rollout/answers", MAX_BAD_SHARE, "of the training answers were ended by the repeat guard"),
    ("rollout/unreadable", "rollout/answers", MAX_BAD_SHARE, "of the training answers were unreadable"),
    ("parse/invalid", "parse/objects", MAX_BAD_SHARE, "of the objects in training answers were invalid"),
    ("parse/repeats", "parse/valid", MAX_REPEATS, "of the valid objects in training answers were repeats"),
)
EVALUATION_RATES = (
    ("eval_truncated", MAX_BAD_SHARE, "of the answers were cut off"),
    ("eval_invalid", MAX_BAD_SHARE, "of the objects were invalid"),
    ("eval_duplicates", MAX_REPEATS, "of the valid objects were duplicates"),
)


Tile = tuple[str, str, str]  # a headline number, its name, and a smaller remark


def render_summary(
    group: RunGroup, servers: Mapping[Path, ServerSummary], differing: Mapping[str, Any] | None = None
) -> str:
    """`servers` are the rollout servers by the folder of the run. `differing` has the values of this group for the
    settings in which the groups differ; None if there is only one group."""
    settings = "" if differing is None else _render_differing(differing)
    count = len(group.runs)
    seeds = f"{count} runs, seeds {group.seeds}" if count > 1 else f"seed {group.seeds}"
    variant = str(group.runs[0].run.custom.get("trainer_variant", "run")).replace("_", " ")
    return (
        f'<article class="group of-{group.letter}"><h3><b class="badge">{group.letter}</b> '
        f"{escape_text(group.name)} <small>{escape_text(variant)}, {escape_text(seeds)}</small></h3>"
        f"{settings}{render_tiles(make_tiles(group))}{render_look(make_notes(group, servers))}</article>"
    )


def _render_differing(differing: Mapping[str, Any]) -> str:
    if not differing:
        return '<p class="differing">the same settings as the other groups, but different data</p>'
    shown = [
        f"<span><code>{escape_text(path)}</code> <b>{escape_text(format_value(value))}</b></span>"
        for path, value in list(differing.items())[:MAX_SETTINGS]
    ]
    more = len(differing) - len(shown)
    link = f'<a href="#settings">{more} more setting{"s differ" if more > 1 else " differs"}</a>' if more else ""
    return f'<p class="differing">{"".join(shown)}{link}</p>'


def make_tiles(group: RunGroup) -> list[Tile]:
    """Return means over the runs, each with the lowest and the highest. Numbers that no run has are left out."""
    runs = group.runs
    tiles = [
        _step_tile(group),
        _mean_tile("wall time", _last_values(runs, "seconds"), format_duration),
        _mean_tile("last loss", _last_values(runs, "loss"), format_number),
    ]
    for name, title in (("f1_50", "F1"), ("recall_50", "recall"), ("precision_50", "precision"), ("ap", "AP")):
        tiles.append(_mean_tile(title, _last_values(runs, f"eval_{name}"), "{:.3f}".format))
    answers = [run.series("rollout/answers") for run in runs]
    sums = [float(np.nansum(series.values)) if len(series) else None for series in answers]
    tiles.append(_mean_tile("training answers", sums, format_number))
    if any("rollout/answers" in run.log for run in runs):
        shares = [share_of_step(run.log, "rollout") for run in runs]
        tiles.append(_mean_tile("of step time in rollouts", shares, _format_whole_percent))
    waiting = [share_of_step(run.log, "waited") for run in runs]
    tiles.append(_mean_tile("of step time waiting", waiting, _format_whole_percent))
    return [tile for tile in tiles if tile is not None]


def _last_values(runs: Sequence[LoggedRun], metric: str) -> list[float | None]:
    return [run.series(metric).last for run in runs]


def _step_tile(group: RunGroup) -> Tile:
    last = [int(steps[-1]) if len(steps := run.series("loss").steps) else 0 for run in group.runs]
    planned = group.runs[0].run.training.get("max_steps")
    value = f"{min(last):,}" if len(set(last)) == 1 else f"{min(last):,} to {max(last):,}"
    return value, f"of {planned:,} steps" if isinstance(planned, int) and planned > 0 else "steps", ""


def _mean_tile(name: str, values: Iterable[float | None], show: Callable[[float], str]) -> Tile | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = show(min(known)), show(max(known))
    return show(sum(known) / len(known)), name, f"{low} to {high}" if low != high else ""


def make_notes(group: RunGroup, servers: Mapping[Path, ServerSummary]) -> list[str]:
    """Return the notes on each run, with its name if there are several, then those on the group."""
    several = len(group.runs) > 1
    notes = []
    for run in group.runs:
        of_run = [note for rule in RUN_RULES for note in rule(run)]
        if run.run.folder in servers:
            of_run += note_servers_out(servers[run.run.folder], run.last_step)
        notes += [f"{run.name}: {note}" if several else note for note in of_run]
    return [*notes, *note_different_ends(group), *note_different_code(group)]


def note_unfinished(run: LoggedRun) -> list[str]:
    """Report a run that is not complete. Training logs its runtime even if it is interrupted, so the last planned
    step must have been reached too."""
    if not len(run.series("loss")):
        return ["no step was logged"]
    last = run.last_step
    ends = run.series("train_runtime").steps
    max_steps = run.run.training.get("max_steps")
    # A run that is limited by epochs does not say how many steps they are.
    planned = max_steps if type(max_steps) is int and max_steps > 0 else 0
    if len(ends) and ends[-1] == last and last >= planned:
        return []
    where = f"step {last}" + (f" of {planned}" if planned else "")
    if planned and last >= planned:
        return [f"was interrupted after its last step, or is still evaluating or saving: {where}"]
    return [f"is not finished, or is still running: the last line is of {where}"]


def note_broken_numbers(run: LoggedRun) -> list[str]:
    notes = []
    for name, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
        if len(steps := run.series(name).invalid_steps):
            notes.append(f"{title} was NaN or infinite in {_describe_lines(steps)}")
    return notes


def note_broken_logits(run: LoggedRun) -> list[str]:
    series = run.series("broken_logits")
    steps = series.steps[series.values > 0]
    return [f"logits were NaN or infinite in {_describe_lines(steps)}"] if len(steps) else []


def note_gradient_spikes(run: LoggedRun) -> list[str]:
    series = run.series("grad_norm")
    known = series.values[np.isfinite(series.values)]
    median = float(np.median(known)) if len(known) else 0.0
    steps = series.steps[series.values > SPIKE * median] if median else series.steps[:0]
    return [f"gradient norm over {SPIKE:g} times its median in {_describe_lines(steps)}"] if len(steps) else []


def note_bad_answers(run: LoggedRun) -> list[str]:
    """Judge the last part of training, by ratios of sums."""
    notes = []
    for count, total, most, words in TRAINING_RATES:
        share = _late_share(run.series(count), run.series(total))
        if share is not None and share > most:
            limit = _format_percent(most)
            notes.append(f"{_format_percent(share)} {words} in the last quarter of the log (more than {limit})")
    return notes


def note_decline(run: LoggedRun) -> list[str]:
    series = run.series("eval_f1_50")
    if len(series) < 2 or not np.isfinite(series.values).all():
        return []
    best, last = int(np.argmax(series.values)), len(series) - 1
    if series.values[best] - series.values[last] <= WORSE:
        return []
    return [
        f"the best evaluation was at step {series.steps[best]} (F1 {series.values[best]:.3f}); "
        f"the last, at step {series.steps[last]}, has {series.values[last]:.3f}"
    ]


def note_bad_evaluation(run: LoggedRun) -> list[str]:
    values = [(run.series(name).last, most, words) for name, most, words in EVALUATION_RATES]
    return [
        f"{_format_percent(value)} {words} in the last evaluation (more than {_format_percent(most)})"
        for value, most, words in values
        if value is not None and value > most
    ]


def note_waiting(run: LoggedRun) -> list[str]:
    share = share_of_step(run.log, "waited")
    if share is None or share <= MAX_WAITING:
        return []
    return [f"{_format_percent(share)} of the time in steps was spent waiting for other processes"]


def note_resumes(run: LoggedRun) -> list[str]:
    times = len(run.run.starts) - 1
    return [f"was resumed {times} time{'s' if times > 1 else ''}"] if times > 0 else []


RUN_RULES: tuple[Callable[[LoggedRun], list[str]], ...] = (
    *(note_unfinished, note_broken_numbers, note_broken_logits, note_gradient_spikes),
    *(note_bad_answers, note_decline, note_bad_evaluation, note_waiting, note_resumes),
)


def note_different_ends(group: RunGroup) -> list[str]:
    ends = [int(steps[-1]) for run in group.runs if len(steps := run.series("loss").steps)]
    if len(set(ends)) < 2:
        return []
    return [
        f"the runs end at different steps ({', '.join(map(str, ends))}): after step {min(ends)} a line is the "
        "mean of fewer runs"
    ]


def note_different_code(group: RunGroup) -> list[str]:
    """Report runs that had the same settings but were made by different code."""
    starts = [run.run.latest_start for run in group.runs]
    commits = [start.git.get("commit") if isinstance(start.git, dict) else start.git for start in starts]
    origins = {
        "commits": commits,
        "versions of packages": [start.packages for start in starts],
        "versions of Python": [start.python for start in starts],
    }
    counts = {words: len({repr(value) for value in values}) for words, values in origins.items()}
    return [f"the runs were made by {count} different {words}" for words, count in counts.items() if count > 1]


def _late_share(count: Series, total: Series) -> float | None:
    lines = max(1, round(LATE * len(total)))
    below = float(np.nansum(total.values[-lines:]))
    return float(np.nansum(count.values[-lines:])) / below if below and len(count) else None


def _describe_lines(steps: Steps | Sequence[int]) -> str:
    first = ", ".join(str(step) for step in steps[:3]) + (", ..." if len(steps) > 3 else "")
    return f"{len(steps)} line{'s' if len(steps) > 1 else ''} (step{'s' if len(steps) > 1 else ''} {first})"


def _format_percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _format_whole_percent(share: float) -> str:
    return f"{100 * share:.0f} %"
