"""Notes on what deserves attention in a group of runs.

A rule for notes yields sentences, none if there is nothing to report. The thresholds of all rules are listed
below.
"""

from collections.abc import Callable, Iterator

import numpy as np

from coordexp.pages.curves import Steps
from coordexp.pages.run_folder import Run, RunGroup

LATE = 0.25  # the share of lines, from the end, by which rates of training answers are judged
MAX_BAD_SHARE = 0.1  # of answers cut off, looped or unreadable, and of objects invalid
MAX_REPEATS = 0.05  # of valid objects
WORSE = 0.02  # F1 below the best evaluation
SPIKE = 20.0  # times the median of the gradient norm

TRAINING_RATES = (
    ("rollout/cut_off", "rollout/answers", MAX_BAD_SHARE, "training answers were cut off at max_new_tokens"),
    ("rollout/looped", "rollout/answers", MAX_BAD_SHARE, "training answers were ended by the repeat guard"),
    ("rollout/unreadable", "rollout/answers", MAX_BAD_SHARE, "training answers were unreadable"),
    ("parse/invalid", "parse/objects", MAX_BAD_SHARE, "objects in training answers were invalid"),
    ("parse/repeats", "parse/valid", MAX_REPEATS, "valid objects in training answers were repeats"),
)
EVALUATION_RATES = (
    ("eval_truncated", MAX_BAD_SHARE, "answers were cut off"),
    ("eval_invalid", MAX_BAD_SHARE, "objects were invalid"),
    ("eval_duplicates", MAX_REPEATS, "valid objects were duplicates"),
)


def make_notes(group: RunGroup) -> list[str]:
    """Return the notes on each run, with its name if there are several, then those on the group."""
    several = len(group.runs) > 1
    notes = []
    for run in group.runs:
        of_run = [note for rule in RUN_RULES for note in rule(run)]
        notes += [f"{run.name}: {note}" if several else note for note in of_run]
    return [*notes, *note_different_ends(group)]


def note_unfinished(run: Run) -> Iterator[str]:
    """Report a run that is not complete. Training logs its runtime even if it is interrupted, so the last planned
    step must have been reached too. A run that is limited by epochs does not say how many steps they are."""
    end, last, planned = run.series("train_runtime").last_step, run.last_step, run.planned_steps
    if not len(run.series("loss")):
        yield "no step was logged"
    elif not (end == last and last >= planned):
        where = f"step {last}" + (f" of {planned}" if planned else "")
        if planned and last >= planned:
            yield f"was interrupted after its last step, or is still evaluating or saving: {where}"
        else:
            yield f"is not finished, or is still running: the last line is of {where}"


def note_broken_numbers(run: Run) -> Iterator[str]:
    broken = {
        "loss was": run.series("loss").invalid_steps,
        "gradient norm was": run.series("grad_norm").invalid_steps,
        "logits were": run.series("broken_logits").steps[run.series("broken_logits").values > 0],
    }
    for subject, steps in broken.items():
        if len(steps):
            yield f"{subject} NaN or infinite in {_describe_lines(steps)}"


def note_gradient_spikes(run: Run) -> Iterator[str]:
    series = run.series("grad_norm")
    known = series.values[np.isfinite(series.values)]
    median = float(np.median(known)) if len(known) else 0.0
    steps = series.steps[series.values > SPIKE * median]
    if median and len(steps):
        yield f"gradient norm over {SPIKE:g} times its median in {_describe_lines(steps)}"


def note_bad_answers(run: Run) -> Iterator[str]:
    """Judge the last part of training, by ratios of sums."""
    for name, per, most, words in TRAINING_RATES:
        count, total = run.series(name), run.series(per)
        lines = max(1, round(LATE * len(total)))
        below = float(np.nansum(total.values[-lines:]))
        share = float(np.nansum(count.values[-lines:])) / below if below else 0.0
        if share > most:
            yield f"{100 * share:.3g} % of the {words} in the last quarter of the log (more than {100 * most:g} %)"


def note_bad_evaluation(run: Run) -> Iterator[str]:
    for name, most, words in EVALUATION_RATES:
        share = run.series(name).last or 0.0
        if share > most:
            yield f"{100 * share:.3g} % of the {words} in the last evaluation (more than {100 * most:g} %)"


def note_decline(run: Run) -> Iterator[str]:
    series = run.series("eval_f1_50")
    if run.has_complete_labels and len(series) >= 2 and np.isfinite(series.values).all():
        best = int(np.argmax(series.values))
        if series.values[best] - series.values[-1] > WORSE:
            yield (
                f"the best evaluation was at step {series.steps[best]} (F1 {series.values[best]:.3f}); "
                f"the last, at step {series.steps[-1]}, has {series.values[-1]:.3f}"
            )


RUN_RULES: tuple[Callable[[Run], Iterator[str]], ...] = (
    *(note_unfinished, note_broken_numbers, note_gradient_spikes, note_bad_answers, note_decline),
    note_bad_evaluation,
)


def note_different_ends(group: RunGroup) -> Iterator[str]:
    ends = [step for run in group.runs if (step := run.series("loss").last_step)]
    if len(set(ends)) > 1:
        yield (
            f"the runs end at different steps ({', '.join(map(str, ends))}): after step {min(ends)} a line is the "
            "mean of fewer runs"
        )


def _describe_lines(steps: Steps) -> str:
    first = ", ".join(str(step) for step in steps[:3]) + (", ..." if len(steps) > 3 else "")
    plural = "s" if len(steps) > 1 else ""
    return f"{len(steps)} line{plural} (step{plural} {first})"
