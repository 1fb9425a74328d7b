"""What to look at: each rule finds what it names, at its threshold, and nothing in a run that is well."""

import pytest

from coordexp.inspector.report import grouped
from coordexp.inspector.report.notes import (
    bad_answers,
    bad_evaluation,
    broken_logits,
    ends_apart,
    gradient_spikes,
    made_apart,
    no_numbers,
    not_finished,
    notes_on,
    past_the_best,
    resumed,
    waits,
)
from tests.unit.inspector.run_folders import END, evaluated, lines, logged, manifest, settings


def changed(step, **values):
    return [line | (values if line["step"] == step else {}) for line in lines()]


def test_a_run_that_is_well_gets_no_note():
    assert notes_on(grouped([logged(tree=settings(max_steps=10))])[0]) == []


def test_a_run_without_an_end_is_named_with_its_last_step():
    assert not_finished(logged(lines(7))) == ["is not finished, or goes on: the last line is of step 7 of 40"]
    assert not_finished(logged([])) == ["no step was logged"]


def test_a_runtime_before_the_steps_that_were_asked_for_is_of_an_interruption():
    assert not_finished(logged([*lines(10), END], tree=settings(max_steps=11))) == [
        "is not finished, or goes on: the last line is of step 10 of 11"
    ]
    assert not_finished(logged([*lines(10), END], tree=settings(max_steps=10))) == []


def test_a_run_that_was_cut_off_after_its_last_step_is_said_to_be():
    assert not_finished(logged(lines(10), tree=settings(max_steps=10))) == [
        "was cut off after its last step, or still evaluates or saves: step 10 of 10"
    ]


def test_steps_behind_a_runtime_are_of_a_resume_that_goes_on():
    for most in (12, -1):
        assert not_finished(logged([*lines(10), END, *lines(12)], tree=settings(max_steps=most)))


def test_a_runtime_counts_at_its_own_step_where_not_every_step_is_logged():
    found = [line for line in lines(10) if line["step"] % 4 == 0]
    assert not_finished(logged([*found, END], tree=settings(max_steps=10))) == []


def test_of_epochs_the_runtime_alone_is_the_end():
    assert not_finished(logged([*lines(10), END], tree=settings(max_steps=-1))) == []
    assert not_finished(logged(lines(10), tree=settings(max_steps=-1))) == [
        "is not finished, or goes on: the last line is of step 10"
    ]


def test_a_loss_that_is_no_number_is_named_with_its_step():
    assert no_numbers(logged(changed(4, loss=None))) == ["loss was NaN or infinite in 1 line (step 4)"]


def test_broken_logits_are_named_from_the_first():
    assert broken_logits(logged(changed(3, broken_logits=0.01))) == [
        "logits were NaN or infinite in 1 line (step 3)"
    ]


def test_many_lines_are_counted_and_the_first_three_named():
    found = [line | {"broken_logits": 1.0} for line in lines()]
    assert broken_logits(logged(found)) == ["logits were NaN or infinite in 10 lines (steps 1, 2, 3, ...)"]


def test_a_gradient_norm_far_over_its_median_is_named():
    assert "step 6" in gradient_spikes(logged(changed(6, grad_norm=21.0)))[0]
    assert gradient_spikes(logged(changed(6, grad_norm=19.0))) == []


@pytest.mark.parametrize(("cut_off", "found"), [(0.4, 0), (0.5, 1)])
def test_cut_off_answers_count_late_in_the_run_and_over_a_tenth(cut_off, found):
    late = [line | ({"rollout/cut_off": cut_off} if line["step"] >= 9 else {}) for line in lines()]
    assert len(bad_answers(logged(late))) == found
    early = [line | ({"rollout/cut_off": 4.0} if line["step"] < 9 else {}) for line in lines()]
    assert bad_answers(logged(early)) == []


def test_a_last_evaluation_below_the_best_names_both_steps():
    (text,) = past_the_best(logged([evaluated(4, f1_50=0.8), evaluated(8, f1_50=0.77)]))
    assert text == "the best evaluation was at step 4 (F1 0.800); the last, at 8, has 0.770"
    assert past_the_best(logged([evaluated(4, f1_50=0.8), evaluated(8, f1_50=0.785)])) == []


def test_duplicates_and_cut_off_answers_of_the_last_evaluation_are_named():
    found = bad_evaluation(logged([evaluated(4, truncated=0.2, duplicates=0.06, invalid=0.1)]))
    assert [text.split(" in ")[0] for text in found] == [
        *("20 % of the answers were cut off", "6 % of the valid objects were duplicates")
    ]


def test_waiting_counts_within_steps():
    assert waits(logged([line | {"time/waited": 0.5, "time/step": 1.75} for line in lines()])) == []
    assert (
        "30.8 % of the time"
        in waits(logged([line | {"time/waited": 0.8, "time/step": 2.6} for line in lines()]))[0]
    )


def test_a_resumed_run_is_told():
    assert resumed(logged(beginnings=[manifest(), manifest(), manifest()])) == ["was resumed 2 times"]


def test_seeds_that_end_at_different_steps_are_told():
    runs = [logged(lines(10)), logged(lines(6), tree=settings(seed=2), folder="runs/two")]
    assert "(10, 6): behind step 6" in ends_apart(grouped(runs)[0])[0]


def test_runs_of_other_code_are_told():
    runs = [
        logged(
            beginnings=[manifest(git={"commit": commit, "changed_files": k})], tree=settings(seed=k), folder=commit
        )
        for k, commit in enumerate(("aa", "bb"))
    ]
    assert made_apart(grouped(runs)[0]) == ["the runs were made by 2 different commits"]


def test_notes_name_the_run_where_a_group_has_several():
    trees = [settings(seed=seed, max_steps=10) for seed in (1, 2)]
    runs = [logged(tree=trees[0]), logged(changed(4, loss=None), tree=trees[1], folder="runs/two")]
    assert notes_on(grouped(runs)[0])[0].startswith("two: ")
