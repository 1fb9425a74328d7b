"""What a run prints to a terminal: the summary of a rollout step, and the warning about rows that are not full."""

from types import SimpleNamespace

import pytest

from coordexp.train.callbacks import FillWarning, summarise_rollouts

LOGS = {
    "loss": 4.29218,
    "rollout/answers": 16.0,
    "rollout/unreadable": 0.0,
    "rollout/cut_off": 2.0,
    "rollout/looped": 1.0,
    "parse/invalid": 3.0,
    "match/true": 115.0,
    "match/matched": 112.0,
    "match/extra": 4.0,
    "time/step": 4.06,
    "time/rollout": 3.1,
    "time/compute": 0.95,
}


def test_a_line_tells_what_was_answered_what_was_odd_and_where_the_time_went():
    assert summarise_rollouts(LOGS) == (
        "loss 4.2922, 16 answers: found 112 of 115, 4 extra, 3 invalid, 2 cut off, 1 looped  "
        "[4.1 s: rollout 3.1, compute 0.9, waited 0.0]"
    )


def warnings(capsys, *fills: float, rank: int = 0, waiting: float = 0.0) -> list[str]:
    """Return what is printed after each log line of a run with packing_min_fill_ratio 0.85."""
    callback, shown = FillWarning(0.85), []
    for step, fill in enumerate(fills, start=1):
        state = SimpleNamespace(is_world_process_zero=rank == 0, global_step=step)
        callback.on_log(None, state, None, logs={"packing/fill": fill, "packing/waiting": waiting})
        shown.append(capsys.readouterr().err)
    return shown


@pytest.mark.scenario("R05.C10", on="fake")
def test_rows_that_are_filled_too_little_give_one_warning_until_they_are_filled_again(capsys):
    first, second, third, fourth = warnings(capsys, 0.6, 0.5, 0.85, 0.849)
    assert first.startswith("warning: step 1: ") and "0.600" in first and "0.85" in first
    assert (second, third) == ("", "")
    assert fourth.startswith("warning: step 4: ")


def test_full_rows_other_ranks_and_lines_without_rows_give_no_warning(capsys):
    assert warnings(capsys, 0.85, 0.99) == ["", ""]
    assert warnings(capsys, 0.1, rank=1) == [""]
    callback = FillWarning(0.85)
    callback.on_log(None, SimpleNamespace(is_world_process_zero=True, global_step=1), None, logs={"eval_f1": 0.1})
    assert capsys.readouterr().err == ""
