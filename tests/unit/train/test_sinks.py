"""Where a run reports to. Trackers are real; wandb writes offline."""

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from coordexp.errors import UserError
from coordexp.evaluate import evaluate
from coordexp.train.folder import ServerLog
from coordexp.train.pictures import EXTRA, MATCHED, TRUE, draw_objects
from coordexp.train.sinks import (
    PROMETHEUS,
    WANDB_ID,
    MetricsFile,
    PrometheusFile,
    Sink,
    Sinks,
    TensorBoard,
    Wandb,
    to_prometheus,
)
from coordexp.train.terminal import COUNTED, AnswerWarning, FillWarning, summarise_rollouts
from tests.unit.evaluate.scenes import BOX, FAR, answer, prediction, record

parser = pytest.importorskip("prometheus_client.parser")
pytestmark = pytest.mark.timeout(60)
ODD = "cat | <b>`*"


def at(step: int, is_first: bool = True) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=50, is_world_process_zero=is_first)


def begin(sink: Sink, step: int = 0, is_first: bool = True) -> Sinks:
    sinks = Sinks([sink])
    sinks.on_train_begin(None, at(step, is_first), None)
    return sinks


def log(sinks: Sinks, step: int = 0, **values: float) -> None:
    sinks.on_log(None, at(step), None, values)


# All of them


class Recorder(Sink):
    def __init__(self) -> None:
        self.told: list[tuple] = []

    def begin(self, state):
        self.told.append(("begin", state.global_step))

    def end_step(self, state):
        self.told.append(("end_step",))

    def log(self, state, values):
        self.told.append(("log", values))

    def show(self, state, images):
        self.told.append(("show", images))

    def end(self, state):
        self.told.append(("end",))


@pytest.mark.parametrize("is_first", [True, False])
def test_every_sink_is_told_what_happens_on_the_first_rank_alone(is_first):
    recorder = Recorder()
    sinks = begin(recorder, 3, is_first)
    sinks.on_step_end(None, None, None)
    sinks.on_log(None, None, None, {"loss": 1.0})
    sinks.on_log(None, None, None, {})
    sinks.show(["image"])
    sinks.on_train_end(None, None, None)
    told = [("begin", 3), ("end_step",), ("log", {"loss": 1.0}), ("show", ["image"]), ("end",)]
    assert recorder.told == (told if is_first else [])


def test_metrics_that_have_no_room_are_warned_of_once(tmp_path, capsys):
    """Writing to /dev/full fails as on a full disk."""
    file = tmp_path / "metrics.jsonl"
    sinks = begin(MetricsFile(file))
    file.symlink_to("/dev/full")
    for _ in range(3):
        log(sinks, loss=1.0)
    file.unlink()
    log(sinks, loss=float("nan"))
    shown = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert (shown[0], shown[-1], len(shown)) == ("warning", "note", 3)
    assert json.loads(file.read_text())["loss"] is None


# Trackers


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    module = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    module.teardown()
    yield module
    module.teardown()


def test_a_resumed_run_writes_to_the_same_folder_and_hides_the_steps_that_it_repeats(tmp_path):
    for start, losses in ((0, {1: 1.0, 2: 2.0, 3: 3.0}), (2, {3: 30.0})):
        sinks = begin(TensorBoard(tmp_path), start)
        for step, loss in losses.items():
            sinks._state = at(step)
            log(sinks, loss=loss, eval_f1=0.5)
        sinks.on_train_end(None, None, None)
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert len(events.Scalars("eval/f1")) == 3


def test_tensorboard_without_room_is_warned_of_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    """TensorBoard writes in a thread, which ends with the first error."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    sinks = begin(TensorBoard(tmp_path))
    (file,) = (tmp_path / "runs").glob("*/*")
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "full").replace(file)
    for _ in range(3):
        log(sinks, loss=1.0)
    sinks.on_train_end(None, None, None)
    for thread in threading.enumerate():
        if type(thread).__name__ == "_AsyncWriterThread":
            thread.join(20)
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in shown if line.startswith(("warning", "note"))] == ["warning"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # wandb leaves sockets open
@pytest.mark.timeout(180)
def test_a_resumed_run_continues_its_run_of_wandb_and_a_new_one_does_not(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")

    def start(step: int) -> str:
        begin(Wandb(tmp_path, None, {"seed": 1}), step)
        id = wandb.run.id
        assert wandb.run.config["seed"] == 1
        wandb.finish()
        return id

    first = start(0)
    assert (tmp_path / WANDB_ID).read_text() == f"{first}\n"
    assert start(5) == first
    assert start(0) != first


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_wandb_without_a_key_is_an_error_with_a_way_out(wandb, tmp_path):
    with pytest.raises(UserError) as caught:
        begin(Wandb(tmp_path, None, {}))
    assert caught.value.problem.startswith("training.report_to: wandb: ") and "WANDB_MODE" in caught.value.fix


@pytest.fixture
def images():
    """Return two evaluated images."""
    truth, answers = [], []
    for k in (1, 2):
        truth.append((k, record(("cat", BOX), (ODD, FAR), image=f"{k}.png", width=100, height=100)))
        objects = prediction("cat", BOX), prediction("dog", FAR)
        answers.append(answer(*objects, image_id=k, image=f"{k}.png", text=ODD))
    colours = [(255, 255, 254), (255, 255, 253)]
    pictures = [Image.new("RGB", (100, 100), colour) for colour in colours]
    reports = evaluate(truth, answers).images
    return [(picture, report, "Detect.") for picture, report in zip(pictures, reports, strict=True)]


def test_tensorboard_gets_images_and_a_table(images, tmp_path):
    sinks = begin(TensorBoard(tmp_path), 7)
    sinks.show(images)
    sinks.on_train_end(None, None, None)
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert events.Tags()["images"] == ["evaluation/0", "evaluation/1"]
    (shown,) = events.Images("evaluation/0")
    assert (shown.step, shown.width, shown.height) == (7, 256, 256)
    (text,) = events.Tensors("evaluation/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert len(lines) == 2 + 2
    cells = lines[2].split(" | ")
    assert cells[1:4] == ["Detect.", "cat, cat &#124; &lt;b&gt;&#96;&#42;", "cat, dog"]
    assert all(line.count(" | ") == 6 for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # wandb leaves sockets open
def test_wandb_gets_images_and_a_table(images, wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    begin(Wandb(tmp_path, None, {})).show(images)
    wandb.finish()
    (table,) = (tmp_path / "wandb").glob("offline-run*/files/media/table/eval/*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"][:3] == ["image", "question", "true"]
    first, _ = content["data"]
    assert first[1:5] == ["Detect.", f"cat, {ODD}", "cat, dog", ODD]
    pictures = sorted(table.parents[2].glob("images/eval/*.png"))
    assert [Image.open(file).size for file in pictures] == [(256, 256)] * 2


def test_true_matched_and_extra_objects_have_different_colours(images):
    drawn = np.asarray(draw_objects(*images[0][:2])).reshape(-1, 3)
    colours = {tuple(pixel) for pixel in drawn.tolist()}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in (TRUE, MATCHED, EXTRA)} <= colours


# Prometheus


def stream(taken: int = 0) -> SimpleNamespace:
    return SimpleNamespace(taken=taken, order=SimpleNamespace(ranks=3))


def read(folder: Path) -> dict[str, float]:
    """Read the file with Prometheus' own parser, and check that every sample names its run."""
    values = {}
    for family in parser.text_string_to_metric_families((folder / PROMETHEUS).read_text()):
        (sample,) = family.samples
        assert sample.labels == {"run": str(folder)}
        values[sample.name.removeprefix("coordexp_learner_")] = sample.value
    return values


def test_the_file_has_step_loss_time_and_samples_of_a_resumed_run(tmp_path):
    taking, before = stream(80), time.time()
    sink = PrometheusFile(tmp_path, taking)
    sink.begin(at(10))
    assert read(tmp_path)["step"] == 10 and read(tmp_path)["samples_total"] == 0
    taking.taken = 92
    sink.end_step(at(12))
    sink.log(at(12), {"loss": float("nan")})
    values = read(tmp_path)
    assert before <= values.pop("last_step_timestamp_seconds") <= time.time()
    assert str(values.pop("loss")) == "nan"
    assert values == {"running": 1, "step": 12, "max_steps": 50, "samples_total": (92 - 80) * 3}
    sink.end(at(12))
    assert read(tmp_path)["running"] == 0


def test_it_counts_what_servers_lost(tmp_path):
    sink = PrometheusFile(tmp_path, stream())
    events = ServerLog(tmp_path, 0, sink.count)
    lost, made = {"server": 0, "count": 5, "lost": True}, {"server": 1, "count": 8}
    facts = {"servers": [], "sync_mode": "full", "fallbacks": []}
    events({"event": "sync", "synced": [1], "failed": {"0": "slow"}} | facts)
    events({"event": "rollouts", "calls": [lost, made]})
    events({"event": "rollouts", "calls": [made]})
    sink.begin(at(0))
    values = read(tmp_path)
    assert values["rollouts_lost_total"] == 5 and values["rollouts_total"] == 16
    assert values["servers"] == 1 and values["syncs_failed_total"] == 1


def test_the_name_of_a_run_is_escaped():
    (family,) = parser.text_string_to_metric_families(to_prometheus({"step": 3}, 'a"b\\c'))
    assert family.samples[0].labels == {"run": 'a"b\\c'}


# The terminal

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


def counters(answers: int, **odd: int) -> dict[str, float]:
    """Return the counters of answers with four objects each, of which three match the four labels."""
    sound = {"rollout/answers": answers, "parse/objects": 4 * answers, "parse/valid": 4 * answers}
    sound |= {"match/true": 4 * answers, "match/matched": 3 * answers}
    return dict.fromkeys(COUNTED, 0.0) | sound | {name.replace("__", "/"): count for name, count in odd.items()}


def judge(warning: AnswerWarning, capsys, *logs: dict[str, float]) -> list[str]:
    """Return what is shown after each log line."""
    shown = []
    for step, values in enumerate(logs, start=1):
        warning.log(at(step), values)
        shown.append(capsys.readouterr().err)
    return shown


ODD_ANSWERS = (
    ({"rollout__cut_off": 15, "rollout__looped": 9}, "12% are cut off or loop"),
    ({"rollout__unreadable": 22}, "11% cannot be read"),
    ({"parse__invalid": 50}, "25% of their objects are invalid"),
    ({"target__duplicates_removed": 50}, "25% of their valid objects are duplicates"),
    ({"match__matched": 74}, "only 37% of the labelled objects are found"),
)


@pytest.mark.parametrize(("odd", "words"), ODD_ANSWERS, ids=[words for _, words in ODD_ANSWERS])
def test_the_first_200_answers_tell_whether_stage_1_is_ready(capsys, odd, words):
    empty = dict.fromkeys(COUNTED, 0.0) | {"rollout/answers": 150.0}
    first, second = judge(AnswerWarning(), capsys, empty, counters(50, **odd))
    assert first == ""
    assert second.startswith(f"warning: step 2: of the last 200 answers, {words}; Stage 1 is not ready")


def test_answers_of_a_model_that_is_ready_give_no_warning_and_neither_does_a_log_without_any(capsys):
    sound = counters(200, rollout__cut_off=20, parse__invalid=80, target__duplicates_removed=80)
    assert judge(AnswerWarning(), capsys, sound, {"loss": 1.0}, sound) == ["", "", ""]


def test_answers_that_run_away_later_give_one_warning_until_they_are_sound_again(capsys):
    away, sound = counters(200, rollout__cut_off=50), counters(200, match__matched=0)
    shown = judge(AnswerWarning(), capsys, sound | {"match/matched": 600.0}, away, away, sound, away)
    assert [bool(text) for text in shown] == [False, True, False, False, True]
    weak = counters(200, match__matched=280)
    assert [bool(text) for text in judge(AnswerWarning(), capsys, weak, away, away)] == [True, True, False]
    resumed = AnswerWarning()
    resumed.begin(at(7))
    assert judge(resumed, capsys, sound, away) == ["", shown[1]]
    assert "25% are cut off or loop" in shown[1] and "stage2.b_ratio" in shown[1]


@pytest.mark.scenario("R05.C10", on="fake")
def test_rows_that_are_filled_too_little_give_one_warning_until_they_are_filled_again(capsys):
    warning, shown = FillWarning(0.85), []
    for step, fill in enumerate((0.6, 0.5, 0.85, 0.849), start=1):
        warning.log(at(step), {"packing/fill": fill, "packing/waiting": 0.0})
        shown.append(capsys.readouterr().err)
    first, second, third, fourth = shown
    assert first.startswith("warning: step 1: ") and "0.600" in first and "0.85" in first
    assert (second, third) == ("", "")
    assert fourth.startswith("warning: step 4: ")
    warning.log(at(5), {"eval_f1": 0.1})
    assert capsys.readouterr().err == ""
