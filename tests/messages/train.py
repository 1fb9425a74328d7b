"""Messages about checkpoints, samples, rollouts, and runs that stop."""

import json
import math
import signal
from types import SimpleNamespace

from coordexp.objective.carry import CarryBuffer
from coordexp.rollout.backend import Rollout, check_version
from coordexp.train.checkpoints import MANIFEST, choose_checkpoint
from coordexp.train.folder import read_starts
from coordexp.train.mixture import Mixture
from coordexp.train.sinks import cut_metrics
from coordexp.train.stopping import Health, StepNumbers, stop_line
from coordexp.train.stream import RowStream, SampleOrder
from coordexp.train.terminal import COUNTED, AnswerWarning, FillWarning, summarise_rollouts
from tests.messages import provoke
from tests.unit.train.test_checkpoint_choice import DAMAGES, flip, saved
from tests.unit.train.test_requests import DESCS, make_set, write
from tests.unit.train.test_sinks import LOGS
from tests.unit.train.test_stream import example_of
from tests.vocabularies import table

STATE = SimpleNamespace(is_world_process_zero=True, global_step=1)


@provoke(*DAMAGES)
def the_newest_checkpoint_is_damaged(folder, name):
    saved(folder, 4)
    DAMAGES[name](saved(folder, 8))
    choose_checkpoint(folder, True, print)


@provoke("not whole", "damaged")
def no_checkpoint_to_resume_from(folder, why):
    if why == "not whole":
        (folder / "run.json").write_text("{}")
        (saved(folder, 4) / MANIFEST).unlink()
    else:
        flip(saved(folder, 4) / "model.safetensors")
    choose_checkpoint(folder, True, print)


@provoke()
def a_new_run_in_a_folder_with_a_checkpoint(folder):
    saved(folder, 4)
    choose_checkpoint(folder, False, print)


@provoke("{broken", "[1]", '{"loss": 1}')
def a_line_of_metrics(folder, line):
    (folder / "metrics.jsonl").write_text(
        f'{{"step": 1, "seconds": 1.0}}\n{line}\n{{"step": 2, "seconds": 2.0}}\n'
    )
    cut_metrics(folder / "metrics.jsonl", 2)


@provoke("", '[{"command"', "{}", "[1]")
def a_run_json_with(folder, content):
    (folder / "run.json").write_text(content)
    read_starts(folder / "run.json")


@provoke("SIGTERM", "SIGINT")
def a_signal(folder, name):
    return stop_line(signal.Signals[name])


@provoke(
    *({"terms": {"coord_reg/w1": value}} for value in (math.nan, math.inf)),
    {"grad_norm": math.nan},
    {"grad_norm": math.inf, "broken_logits": 1200},
)
def a_step_with(folder, changes):
    usual = {"step": 7, "terms": {"token_ce/struct_ce": 1.0}, "grad_norm": 1.0, "broken_logits": 0}
    Health().after(StepNumbers(**usual | changes))


@provoke({"grad_norm": math.inf, "scaled": True}, {"broken_logits": 3})
def many_steps_with(folder, changes):
    health = Health()
    for number in range(1000):
        usual = {"step": number, "terms": {}, "grad_norm": 1.0, "broken_logits": 0}
        health = health.after(StepNumbers(**usual | changes))


@provoke((5, 1), (2, 0))
def a_rollout_of_version_3_at(folder, step_and_bound):
    old = Rollout.of(table("small"), (), (), (), "stop", version=3)
    check_version(old, step_and_bound[0], max_staleness=step_and_bound[1])


def stream(batch=4, packing=True, mixture=None, **options):
    order = SampleOrder(16, **{"rank": 0, "ranks": 1, "seed": 3, "shuffled": True, "mixture": mixture} | options)
    return RowStream(order, batch, CarryBuffer(16, 12) if packing else None, max_length=16)


@provoke(
    *({"seed": 9}, {"packing": False}, {"batch": 5}, {"rank": 1, "ranks": 2}),
    {"mixture": Mixture((1, 1), (10, 6))},
)
def resuming_with_another(folder, changes):
    stream().save(folder)
    stream(**changes).load(folder)


@provoke((3, 20), (17, 1))
def packing(folder, lengths):
    rows = stream(batch=lengths[1])
    rows.plan_step()
    rows.pack([example_of(lengths[0])] * lengths[1])


@provoke({"classes": ["cup"]}, {"bbox": [5, 5, 5, 5]})
def a_sample_that_cannot_be_trained_on(folder, changes):
    file = write(folder / "a.jsonl", [(DESCS, {})])
    line = json.loads(file.read_text())
    if "bbox" in changes:
        line["objects"][0]["bbox_2d"] = changes["bbox"]
    else:
        line = {"question": "Why?", "answer": "so"}
    file.write_text(json.dumps(line))
    make_set([file]).read(0, 0)


@provoke(0.0, 3.0)
def rows_that_are_not_full_while_segments_wait(folder, waiting):
    FillWarning(0.85).log(STATE, {"packing/fill": 0.6, "packing/waiting": waiting})


@provoke("first", "later")
def answers_that_run_away(folder, when):
    warning, sound = AnswerWarning(), dict.fromkeys(COUNTED, 0.0)
    for name in ("rollout/answers", "parse/objects", "parse/valid", "match/true", "match/matched"):
        sound[name] = 200.0
    for values in [sound] * (when == "later") + [sound | {"rollout/cut_off": 50.0, "parse/invalid": 30.0}]:
        warning.log(STATE, values)


@provoke()
def a_step_with_rollouts(folder):
    return summarise_rollouts(LOGS)
