"""What to look at: each rule fires at its threshold, and none fires for a healthy run."""

import pytest

from coordexp.pages.report_notes import (
    make_notes,
    note_bad_answers,
    note_bad_evaluation,
    note_broken_numbers,
    note_decline,
    note_different_ends,
    note_gradient_spikes,
    note_unfinished,
)
from coordexp.pages.run_folder import group_runs
from tests.unit.pages.run_folders import END, evaluation_line, lines, make_run, settings


def change_line(step, **values):
    return [line | (values if line["step"] == step else {}) for line in lines()]


def test_a_healthy_run_gets_no_note():
    assert make_notes(group_runs([make_run(tree=settings(max_steps=10))])[0]) == []


STEPS = "is not finished, or is still running: the last line is of step"
AFTER = "was interrupted after its last step, or is still evaluating or saving: step"
SHORT, ENDLESS = settings(max_steps=10), settings(max_steps=-1)


@pytest.mark.parametrize(
    ("logged", "tree", "notes"),
    [
        (lines(7), settings(), [f"{STEPS} 7 of 40"]),
        ([], settings(), ["no step was logged"]),
        ([*lines(10), END], SHORT, []),
        ([*lines(10), END], settings(max_steps=11), [f"{STEPS} 10 of 11"]),  # it was interrupted
        (lines(10), SHORT, [f"{AFTER} 10 of 10"]),
        ([*lines(10), END, *lines(12)], settings(max_steps=12), [f"{AFTER} 12 of 12"]),  # it was resumed
        ([*lines(10), END, *lines(12)], ENDLESS, [f"{STEPS} 12"]),
        ([*[line for line in lines() if line["step"] % 4 == 0], END], SHORT, []),  # not every step is logged
        ([*lines(10), END], ENDLESS, []),
        (lines(10), ENDLESS, [f"{STEPS} 10"]),
    ],
)
def test_a_run_that_has_not_ended_is_reported_with_its_last_step(logged, tree, notes):
    assert list(note_unfinished(make_run(logged, tree=tree))) == notes


@pytest.mark.parametrize(
    ("note", "logged", "notes"),
    [
        (note_broken_numbers, change_line(4, loss=None), ["loss was NaN or infinite in 1 line (step 4)"]),
        (
            note_broken_numbers,
            change_line(3, broken_logits=0.01),
            ["logits were NaN or infinite in 1 line (step 3)"],
        ),
        (
            note_broken_numbers,
            [line | {"broken_logits": 1.0} for line in lines()],
            ["logits were NaN or infinite in 10 lines (steps 1, 2, 3, ...)"],
        ),
        (
            note_decline,
            [evaluation_line(4, f1_50=0.8), evaluation_line(8, f1_50=0.77)],
            ["the best evaluation was at step 4 (F1 0.800); the last, at step 8, has 0.770"],
        ),
        (note_decline, [evaluation_line(4, f1_50=0.8), evaluation_line(8, f1_50=0.785)], []),
        (note_gradient_spikes, change_line(6, grad_norm=19.0), []),
    ],
)
def test_a_rule_reports_what_crosses_its_threshold(note, logged, notes):
    assert list(note(make_run(logged))) == notes


@pytest.mark.parametrize(("cut_off", "notes"), [(0.4, 0), (0.5, 1)])
def test_cut_off_answers_count_late_in_the_run_and_over_a_tenth(cut_off, notes):
    late = [line | ({"rollout/cut_off": cut_off} if line["step"] >= 9 else {}) for line in lines()]
    assert len([*note_bad_answers(make_run(late))]) == notes
    early = [line | ({"rollout/cut_off": 4.0} if line["step"] < 9 else {}) for line in lines()]
    assert not [*note_bad_answers(make_run(early))]


def test_duplicates_and_cut_off_answers_of_the_last_evaluation_are_reported():
    notes = note_bad_evaluation(make_run([evaluation_line(4, truncated=0.2, duplicates=0.06, invalid=0.1)]))
    assert [text.split(" in ")[0] for text in notes] == [
        *("20 % of the answers were cut off", "6 % of the valid objects were duplicates")
    ]


def test_runs_that_end_at_different_steps_are_reported():
    runs = [make_run(lines(10)), make_run(lines(6), tree=settings(seed=2), folder="runs/two")]
    assert "(10, 6): after step 6" in next(note_different_ends(group_runs(runs)[0]))


def test_notes_name_the_run_where_a_group_has_several():
    trees = [settings(seed=seed, max_steps=10) for seed in (1, 2)]
    runs = [make_run(tree=trees[0]), make_run(change_line(4, loss=None), tree=trees[1], folder="runs/two")]
    assert make_notes(group_runs(runs)[0])[0].startswith("two: ")
