"""The line that a rollout step gets on a terminal."""

from coordexp.train.callbacks import rollout_story

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
    assert rollout_story(LOGS) == (
        "loss 4.2922, 16 answers: found 112 of 115, 4 extra, 3 invalid, 2 cut off, 1 looped  "
        "[4.1 s: rollout 3.1, compute 0.9, waited 0.0]"
    )


def test_a_step_without_answers_has_no_such_line():
    assert rollout_story({"loss": 4.3, "time/step": 0.4}) is None
