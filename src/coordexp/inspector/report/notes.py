"""What to look at in a run, by plain rules. Each takes what was logged and says what it found, with the step.

A rule is a pure function from a run or a group to sentences; none means that it found nothing. Its threshold
stands at the top.
"""

from collections.abc import Callable, Sequence

import numpy as np

from coordexp.inspector.report.groups import Group, Logged
from coordexp.inspector.report.series import NOTHING, Series, Steps
from coordexp.inspector.report.times import share_of_step

LATE = 0.25  # the share of lines, from the end, that rates of training answers are judged by
MOST_ENDED = 0.1  # of answers cut off, looped or unreadable, and of objects invalid
MOST_REPEATED = 0.05  # of valid objects
WORSE = 0.02  # F1 below the best evaluation
MOST_WAITED = 0.3  # of the time in steps
SPIKE = 20.0  # times the median of the gradient norm

Rule = Callable[[Logged], list[str]]


def notes_on(group: Group) -> list[str]:
    """Of each run by itself, with its name where there are several, then of the group."""
    several = len(group.runs) > 1
    own = [
        f"{one.run.name}: {text}" if several else text
        for one in group.runs
        for rule in RULES
        for text in rule(one)
    ]
    return [*own, *ends_apart(group), *made_apart(group)]


def not_finished(one: Logged) -> list[str]:
    """Training logs its runtime however it ends, so the steps that were asked for must be there too."""
    if not len(one.log.get("loss", NOTHING)):
        return ["no step was logged"]
    last = max(int(series.steps[-1]) for series in one.log.values())
    ends = one.log.get("train_runtime", NOTHING).steps
    asked = (one.run.settings.get("training") or {}).get("max_steps")
    most = asked if type(asked) is int and asked > 0 else 0  # by epochs, nothing says how many steps they are
    if len(ends) and ends[-1] == last and last >= most:
        return []
    told = f"step {last}" + (f" of {most}" if most else "")
    if most and last >= most:
        return [f"was cut off after its last step, or still evaluates or saves: {told}"]
    return [f"is not finished, or goes on: the last line is of {told}"]


def no_numbers(one: Logged) -> list[str]:
    """Loss and gradient norm that were logged as null."""
    found = []
    for name, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
        if len(steps := one.log.get(name, NOTHING).broken):
            found.append(f"{title} was NaN or infinite in {_lines(steps)}")
    return found


def broken_logits(one: Logged) -> list[str]:
    series = one.log.get("broken_logits", NOTHING)
    steps = series.steps[series.values > 0]
    return [f"logits were NaN or infinite in {_lines(steps)}"] if len(steps) else []


def gradient_spikes(one: Logged) -> list[str]:
    series = one.log.get("grad_norm", NOTHING)
    known = series.values[np.isfinite(series.values)]
    middle = float(np.median(known)) if len(known) else 0.0
    steps = series.steps[series.values > SPIKE * middle] if middle else series.steps[:0]
    return [f"gradient norm over {SPIKE:g} times its median in {_lines(steps)}"] if len(steps) else []


def bad_answers(one: Logged) -> list[str]:
    """Late in training, as ratios of sums."""
    rules = (
        (
            "rollout/cut_off",
            "rollout/answers",
            MOST_ENDED,
            "of the training answers were cut off at max_new_tokens",
        ),
        (
            "rollout/looped",
            "rollout/answers",
            MOST_ENDED,
            "of the training answers were ended by the repeat guard",
        ),
        ("rollout/unreadable", "rollout/answers", MOST_ENDED, "of the training answers were unreadable"),
        ("parse/invalid", "parse/objects", MOST_ENDED, "of the objects in training answers were invalid"),
        ("parse/repeats", "parse/valid", MOST_REPEATED, "of the valid objects in training answers were repeats"),
    )
    found = []
    for above, below, most, words in rules:
        share = _late_share(one.log.get(above, NOTHING), one.log.get(below, NOTHING))
        if share is not None and share > most:
            found.append(f"{_percent(share)} {words} in the last quarter of the log (more than {_percent(most)})")
    return found


def past_the_best(one: Logged) -> list[str]:
    series = one.log.get("eval_f1_50", NOTHING)
    if len(series) < 2 or not np.isfinite(series.values).all():
        return []
    best, last = int(np.argmax(series.values)), len(series) - 1
    if series.values[best] - series.values[last] <= WORSE:
        return []
    return [
        f"the best evaluation was at step {series.steps[best]} (F1 {series.values[best]:.3f}); "
        f"the last, at {series.steps[last]}, has {series.values[last]:.3f}"
    ]


def bad_evaluation(one: Logged) -> list[str]:
    rules = (
        ("eval_truncated", MOST_ENDED, "of the answers were cut off"),
        ("eval_invalid", MOST_ENDED, "of the objects were invalid"),
        ("eval_duplicates", MOST_REPEATED, "of the valid objects were duplicates"),
    )
    lasts = [(one.log.get(name, NOTHING).last, most, words) for name, most, words in rules]
    return [
        f"{_percent(value)} {words} in the last evaluation (more than {_percent(most)})"
        for value, most, words in lasts
        if value is not None and value > most
    ]


def waits(one: Logged) -> list[str]:
    share = share_of_step(one.log, "waited")
    if share is None or share <= MOST_WAITED:
        return []
    return [f"{_percent(share)} of the time in steps was spent waiting for other processes"]


def resumed(one: Logged) -> list[str]:
    times = len(one.run.beginnings) - 1
    return [f"was resumed {times} time{'s' if times > 1 else ''}"] if times > 0 else []


RULES: tuple[Rule, ...] = (
    *(not_finished, no_numbers, broken_logits, gradient_spikes),
    *(bad_answers, past_the_best, bad_evaluation, waits, resumed),
)


def ends_apart(group: Group) -> list[str]:
    lasts = [int(steps[-1]) for one in group.runs if len(steps := one.log.get("loss", NOTHING).steps)]
    if len(set(lasts)) < 2:
        return []
    return [
        f"the runs end at different steps ({', '.join(map(str, lasts))}): behind step {min(lasts)} a line is the "
        "mean of fewer"
    ]


def made_apart(group: Group) -> list[str]:
    """By different code, though with the same settings."""
    found = []
    for name, words in (
        ("git", "commits"),
        ("packages", "versions of packages"),
        ("python", "versions of Python"),
    ):
        made = {repr(_made(one, name)) for one in group.runs}
        if len(made) > 1:
            found.append(f"the runs were made by {len(made)} different {words}")
    return found


def _made(one: Logged, name: str) -> object:
    about = one.latest.get(name)
    return about.get("commit") if name == "git" and isinstance(about, dict) else about


def _late_share(above: Series, below: Series) -> float | None:
    kept = max(1, round(LATE * len(below)))
    total = float(np.nansum(below.values[-kept:]))
    return float(np.nansum(above.values[-kept:])) / total if total and len(above) else None


def _lines(steps: Steps | Sequence[int]) -> str:
    some = ", ".join(str(step) for step in steps[:3]) + (", ..." if len(steps) > 3 else "")
    return f"{len(steps)} line{'s' if len(steps) > 1 else ''} (step{'s' if len(steps) > 1 else ''} {some})"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
