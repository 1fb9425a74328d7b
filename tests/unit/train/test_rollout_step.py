"""One step of channel B: rollouts are collected, checked, corrected and counted. The backend is scripted."""

import json
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from coordexp.answers.entries import Reason
from coordexp.answers.segment import Role
from coordexp.config import RolloutMatching, Settings
from coordexp.config.rollout import Decoding
from coordexp.data import DataError, TrueObject
from coordexp.demo.model import Size, make_model
from coordexp.errors import EngineError
from coordexp.objective.carry import CarryBuffer
from coordexp.rollout.backend import Decode, request_seed
from coordexp.train import data, run
from coordexp.train.encode import StepIndex, takes_rollouts
from coordexp.train.metrics import RATES, SUMS, StepMetrics
from coordexp.train.step import OptimizerSteps
from coordexp.train.stream import RowStream, SampleOrder
from tests.rollouts import PROMPT, answer_text
from tests.scripted import Said, ScriptedBackend, write_training_set
from tests.steps import RolloutStep
from tests.unit.answers.conftest import answer, box, coords, entry
from tests.unit.config.trees import load, stage2
from tests.vocabularies import table

QWEN = table("qwen")
CUP = TrueObject("cup", box(10, 10, 110, 110))
DOG = TrueObject("dog", box(300, 300, 500, 500))
FIRST = StepIndex(0, 0)


def weights():
    raise AssertionError("the scripted backend reads no weights")


class Step:
    """Channel B on records with these true objects, and scripted answers to them."""

    def __init__(self, folder, truth, script, *, rank=0, cfg=None, b_ratio=Fraction(1), **backend) -> None:
        self.training_set = write_training_set(folder, truth, QWEN)
        self.backend = ScriptedBackend(script, QWEN, **backend)
        self.metrics = StepMetrics()
        self.seen = []
        self.collect = RolloutStep(
            self.training_set,
            self.backend,
            cfg or self.training_set.settings,
            rank,
            self.metrics,
            self.watch,
            weights,
            b_ratio,
        )

    def watch(self, *example) -> None:
        self.seen.append(example)

    def __call__(self, at=FIRST, indices=None):
        return self.collect(range(len(self.training_set.records)) if indices is None else indices, at)


def written(*objects: TrueObject) -> str:
    return answer(*(entry(f"object_{k}", true.desc, true.geometry) for k, true in enumerate(objects, start=1)))


# In Qwen's vocabulary an answer of n boxes, each with a desc of one token, is 30 n tokens: 29 up to the `"]` of an
# object, then `},` or, at the end, `}}`.
TRUTH = {"garbage.png": (CUP, DOG), "empty.png": (CUP,), "right.png": (CUP, DOG), "cut.png": (CUP, DOG)}
SCRIPT = {
    # `Sure` and `!`. Nothing to keep: both objects are appended to an empty prefix, 60 tokens and the end of turn.
    "garbage.png": Said("Sure!"),
    # No container either. One object is appended: 30 + 1.
    "empty.png": Said(""),
    # 60 tokens. Cut behind the last object, inside of its `}}`: 59 are kept, `}}` and the end of turn appended.
    "right.png": Said(written(DOG, CUP)),
    # The first object is 29 tokens and `},`; ` "object_2": {"desc": "dog", "bbox_2d": [` is 18, then `3` and `0`:
    # 50. Cut inside of `},`: 29 are kept; `},`, the 29 of the dog, `}}` and the end of turn are appended.
    "cut.png": Said(
        "{" + entry("object_1", "cup", CUP.geometry) + ', "object_2": {"desc": "dog", "bbox_2d": [30', "length"
    ),
}
COUNTED = {
    "rollout/answers": 4,
    "rollout/tokens": 2 + 0 + 60 + 50,
    "rollout/stopped": 3,
    "rollout/cut_off": 1,  # cut
    "rollout/unreadable": 2,  # garbage and empty have no container
    "rollout/under_counts": 2,  # they stopped by themselves with less than there is
    "rollout/decoded/greedy": 4,
    "parse/objects": 2 + 2,  # right; cut, of which one is lost
    "parse/valid": 2 + 1,
    "parse/invalid": 1,
    "parse/invalid/truncated": 1,
    "match/true": 2 + 1 + 2 + 2,
    "match/matched": 2 + 1,
    "match/missed": 2 + 1 + 0 + 1,
    "target/prefix_tokens": 0 + 0 + 59 + 29,
    "target/appended_tokens": 61 + 31 + 2 + 32,
}


@pytest.mark.scenario("R31.C3", "R31.C4", "R31.C6", on="fake")
def test_garbage_nothing_all_right_and_cut_off_answers_in_one_batch_become_examples_and_are_counted(tmp_path):
    step = Step(tmp_path, TRUTH, SCRIPT)
    examples = step()
    assert [example.channel for example in examples] == ["B"] * 4
    report = step.metrics.report(steps=1)
    assert {name: report[name] for name in SUMS if name != "target/answers"} == {
        name: COUNTED.get(name, 0) for name in SUMS if name != "target/answers"
    }
    rates = {
        "match/recall": 3 / 7,
        "match/precision": 3 / 3,
        "parse/invalid_rate": 1 / 4,
        "rollout/cut_off_rate": 1 / 4,
        "rollout/under_count_rate": 2 / 3,
        "rollout/over_count_rate": 0 / 4,
        "rollout/staleness": 0.0,
        "rollout/mean_tokens": 112 / 4,
        "target/mean_prefix_tokens": 88 / 4,
        "target/mean_appended_tokens": 126 / 4,
    }
    assert {name: report[name] for name in RATES} == pytest.approx(rates)
    assert set(report) == {*SUMS, *RATES, "time/sync", "time/rollout", "time/correct"} - {"target/answers"}


@pytest.mark.scenario("R31.C1", "R31.C3", "R31.C4", "R31.C5", "R31.C6", on="fake")
def test_loops_repeats_overlaps_and_too_many_objects_are_counted(tmp_path):
    """The answers: two cups where there is one, looped; a box that overlaps too little; a box far from all
    true objects."""
    near, far = TrueObject("cup", box(80, 80, 180, 180)), TrueObject("dog", box(700, 700, 900, 900))
    truth = {"looped.png": (CUP,), "near.png": (CUP,), "far.png": (CUP, DOG), "none.png": ()}
    script = {
        "looped.png": Said(written(CUP, CUP), "repeat"),
        "near.png": Said(written(near)),
        "far.png": Said(written(CUP, far, DOG)),
        "none.png": Said("{}"),
    }
    step = Step(tmp_path, truth, script, cfg=sampled(temperature=0.5))
    step()
    report = step.metrics.report(steps=1)
    expected = {
        "rollout/answers": 4,
        "rollout/tokens": 60 + 30 + 90 + 1,
        "rollout/stopped": 3,
        "rollout/looped": 1,
        "rollout/under_counts": 0,
        "rollout/over_counts": 1 + 0 + 1 + 0,
        "rollout/decoded/sampling": 4,
        "parse/objects": 2 + 1 + 3 + 0,
        "parse/valid": 2 + 1 + 3 + 0,
        "parse/repeats": 1,
        "match/true": 1 + 1 + 2 + 0,
        "match/matched": 1 + 0 + 2 + 0,
        "match/missed": 0 + 1 + 0 + 0,
        "match/extra": 1 + 1 + 1 + 0,
        "match/gate_rejections": 0 + 1 + 0 + 0,
        # Kept up to the last object's `}`, inside of `}}`. `{}` is one token, of which the `{` is kept and `{}`
        # written anew; behind the near one a cup is appended: `},` and 29 more.
        "target/prefix_tokens": 59 + 29 + 89 + 0,
        "target/appended_tokens": (1 + 1) + (1 + 29 + 1 + 1) + (1 + 1) + (1 + 1),
    }
    assert {name: report[name] for name in SUMS if name != "target/answers"} == {
        name: expected.get(name, 0) for name in SUMS if name != "target/answers"
    }
    assert report["rollout/over_count_rate"] == 2 / 4
    assert report["match/precision"] == 3 / 6
    assert report["match/recall"] == 3 / 4


SHAPE = coords(box(1, 2, 3, 4))
ENTRIES = {
    Reason.bad_key: '"thing_1": {"desc": "a", "bbox_2d": %s}' % SHAPE,
    Reason.repeated_key: '"object_1": {"desc": "a", "bbox_2d": %s}' % SHAPE,
    Reason.not_a_mapping: '"object_3": 5',
    Reason.unexpected_key: '"object_4": {"desc": "a", "bbox_2d": %s, "score": 1}' % SHAPE,
    Reason.repeated_field: '"object_5": {"desc": "a", "desc": "a", "bbox_2d": %s}' % SHAPE,
    Reason.missing_desc: '"object_6": {"bbox_2d": %s}' % SHAPE,
    Reason.empty_desc: '"object_7": {"desc": "", "bbox_2d": %s}' % SHAPE,
    Reason.missing_geometry: '"object_8": {"desc": "a"}',
    Reason.two_geometries: '"object_9": {"desc": "a", "poly": [], "bbox_2d": %s}' % SHAPE,
    Reason.bad_geometry: '"object_10": {"desc": "a", "bbox_2d": [1, 2, 3, 4]}',
    Reason.wrong_count: '"object_11": {"desc": "a", "bbox_2d": ["<|coord_1|>"]}',
    Reason.degenerate: '"object_12": {"desc": "a", "bbox_2d": %s}' % coords(box(3, 2, 1, 4)),
    Reason.stray_coord: '"object_13": {"desc": "<|coord_1|>", "bbox_2d": %s}' % SHAPE,
    Reason.ambiguous: '"object_14": {"desc": "a", "bbox_2d": ["\\u003c|coord_1|>"]}',
}
ENDINGS = {
    Reason.syntax: ', "object_15": nonsense}',
    Reason.truncated: ', "object_15": {"desc": "a',
    Reason.placeholder: ', "object_15": {"desc": "<|image_pad|>"}}',
}


@pytest.mark.scenario("R31.C5", on="fake")
def test_every_pair_below_the_gate_is_counted_also_of_one_prediction(tmp_path):
    truth = {"a.png": (CUP, TrueObject("cup", box(90, 90, 190, 190)))}
    step = Step(tmp_path, truth, {"a.png": Said(written(TrueObject("cup", box(50, 50, 150, 150))))})
    step()
    report = step.metrics.report(steps=1)
    assert (report["match/gate_rejections"], report["match/matched"], report["match/missed"]) == (2, 0, 2)


@pytest.mark.scenario("R31.C2", on="fake")
def test_ambiguous_objects_are_counted_one_by_one_and_apart_from_others(tmp_path):
    spelled = '"object_%d": {"desc": "a", "bbox_2d": ["\\u003c|coord_1|>"]}'
    text = answer(spelled % 1, spelled % 2, ENTRIES[Reason.stray_coord], spelled % 3)
    step = Step(tmp_path, {"a.png": (CUP,)}, {"a.png": Said(text)})
    step()
    report = step.metrics.report(steps=1)
    assert (report["parse/ambiguous"], report["parse/invalid"]) == (3, 4)


@pytest.mark.scenario("R31.C2", on="fake")
@pytest.mark.parametrize("ending", ENDINGS)
def test_each_reason_for_which_an_object_is_not_used_has_a_counter(tmp_path, ending):
    assert set(ENTRIES) | set(ENDINGS) == set(Reason)
    text = "{" + entry("object_1", "cup", CUP.geometry) + ", " + ", ".join(ENTRIES.values()) + ENDINGS[ending]
    step = Step(tmp_path, {"a.png": (CUP,)}, {"a.png": Said(text)})
    step()
    report = step.metrics.report(steps=1)
    counted = {reason for reason in Reason for _ in range(int(report[f"parse/invalid/{reason.value}"]))}
    assert counted == {*ENTRIES, ending}
    assert (
        report["parse/invalid"]
        == len(ENTRIES) + 1
        == sum(report[f"parse/invalid/{reason.value}"] for reason in Reason)
    )
    assert (report["parse/valid"], report["parse/objects"]) == (1, len(ENTRIES) + 2)
    assert report["parse/ambiguous"] == 1
    # An unusable object is none too many, and an answer that ends early by itself is not cut off.
    assert (report["rollout/over_counts"], report["rollout/cut_off"]) == (0, 0)


@pytest.mark.scenario("R31.C1", on="fake")
def test_of_five_written_objects_broken_at_the_second_four_are_invalid_and_all_are_counted(tmp_path):
    entries = [entry(f"object_{k}", "cup", box(100 * k, 10, 100 * k + 90, 100)) for k in range(1, 6)]
    entries[1] = entries[1].replace("[", "[[", 1)
    step = Step(tmp_path, {"a.png": (CUP,)}, {"a.png": Said(answer(*entries))})
    step()
    report = step.metrics.report(steps=1)
    assert (report["parse/objects"], report["parse/valid"], report["parse/invalid"]) == (5, 1, 4)
    assert (report["parse/invalid/syntax"], report["parse/invalid/unread"]) == (1, 3)
    assert report["parse/invalid_rate"] == 4 / 5


@pytest.mark.scenario("R36.S1", on="fake")
def test_another_backend_behind_the_same_interface_gives_valid_supervision(tmp_path):
    step = Step(tmp_path, TRUTH, SCRIPT)
    for example, (image, truth) in zip(step(), TRUTH.items(), strict=True):
        segment = example.segment
        assert example.image.endswith(image)
        assert example.size == (64, 48)
        assert segment.ids[: segment.prompt_length].tolist() == list(PROMPT)
        said = json.loads(answer_text(segment, QWEN))
        assert sorted(object["desc"] for object in said.values()) == sorted(true.desc for true in truth)
        assert segment.ids[-1] == QWEN.end_of_turn
        assert segment.weights[-1] == 1
        assert not segment.weights[: segment.prompt_length].any()
        with_target = ~np.isnan(segment.coord_targets)
        assert sorted(segment.coord_targets[with_target].tolist()) == sorted(
            bin for true in truth for bin in true.geometry.bins
        )
        assert all(QWEN.is_coord(id) for id in segment.ids[with_target])
    # What the model wrote itself is context; of it only the coordinates of matched objects are trained.
    assert [int((example.segment.roles == Role.matched_coord).sum()) for example in step()] == [0, 0, 8, 4]


def sampled(**decoding):
    tree = stage2(rollout_matching__rollout_backend="hf", rollout_matching__decoding=decoding)
    return load(tree).settings.rollout_matching


def handed_over(tmp_path, monkeypatch, truth=TRUTH, **changes):
    """Return the settings of a run, and the arguments of its trainer."""
    training = {"output_dir": str(tmp_path / "run"), "use_cpu": True, "max_steps": 1, "report_to": "none"}
    model = tmp_path.parent / "tiny model"  # of all tests
    if not model.exists():
        make_model(model, "small", size=Size(hidden=64, layers=1, vision_hidden=32, vision_depth=1))
    write_training_set(tmp_path, truth, QWEN)
    loaded = load(
        stage2(
            model={"path": str(model), "dtype": "float32"},
            custom__train_jsonl=str(tmp_path / "train.jsonl"),
            **{f"training__{name}": value for name, value in training.items()},
            **changes,
        )
    )
    given = {}

    def trainer(**options):
        given.update(options)
        raise InterruptedError

    monkeypatch.setattr(run, "RowTrainer", trainer)
    with pytest.raises(InterruptedError):
        run.prepare(loaded)
    return loaded.settings, given


def boxes(side: int, count: int) -> dict[str, tuple[TrueObject, ...]]:
    cup = TrueObject("cup", box(100, 100, 100 + side, 100 + side))
    return {f"{side}-{k}.png": (cup,) for k in range(count)}


@pytest.mark.parametrize(
    ("truth", "resolution", "said"),
    [(boxes(19, 3) | boxes(500, 2), 256, True), (boxes(20, 3), 256, False), (boxes(19, 3), 1000, False)],
)
def test_a_run_says_once_that_a_finer_canvas_is_exact_when_the_median_side_is_under_20_bins(
    tmp_path, monkeypatch, capsys, truth, resolution, said
):
    """See D16."""
    monkeypatch.setattr(data, "MEASURED", 10)
    changes = {"rollout_backend": "hf", "maskiou_resolution": resolution}
    handed_over(tmp_path, monkeypatch, truth, **{f"rollout_matching__{name}": v for name, v in changes.items()})
    assert capsys.readouterr().err.count("19 bins") == said


PACKED = {
    "training__packing": True,
    "training__packing_buffer": 4,
    "training__packing_min_fill_ratio": 0.5,
    "training__per_device_train_batch_size": 4,
}


@pytest.mark.scenario("R06.C2", "R11.S1", "R12.S2", "R39.C3", on="fake")
def test_the_trainer_and_its_rollouts_are_given_the_loaders_own_contract(tmp_path, monkeypatch):
    """It says how the stream packs. Requests have the seed of the run."""
    backend = {"rollout_matching__rollout_backend": "hf"}
    settings, given = handed_over(tmp_path, monkeypatch, training__seed=23, **backend, **PACKED)
    steps = given["steps"]
    contract = steps.rollout_matching_cfg
    assert contract == settings.rollout_matching_cfg
    assert steps.encoder.training_set.settings is contract
    assert steps.encoder.seed == 23
    buffer = steps.stream.buffer
    assert contract.packing
    assert (buffer.limit, buffer.min_fill_ratio, buffer.capacity) == (4, 0.5, 16000)
    assert (contract.packing_buffer, contract.packing_min_fill_ratio, contract.packing_length) == (4, 0.5, 16000)


@pytest.mark.scenario("R11.C1", on="fake")
def test_packing_is_read_from_the_contract_and_not_from_the_training_section(tmp_path, monkeypatch):
    written = Settings.rollout_matching_cfg.fget

    def other(settings):
        return written(settings).model_copy(update={"packing_buffer": 9, "packing_length": 777})

    monkeypatch.setattr(Settings, "rollout_matching_cfg", property(other))
    _, given = handed_over(tmp_path, monkeypatch, rollout_matching__rollout_backend="hf", **PACKED)
    assert (given["steps"].stream.buffer.limit, given["steps"].stream.buffer.capacity) == (9, 777)


@pytest.mark.scenario("R20.C4", on="fake")
@pytest.mark.parametrize(
    ("settings", "decode"),
    [
        ({}, Decode(2048, "greedy")),
        ({"decode_mode": "greedy"}, Decode(2048, "greedy")),
        ({"decoding": Decoding(temperature=0.5)}, Decode(2048, "sampling", 0.5)),
        ({"decode_mode": "beam", "num_beams": 3, "decode_batch_size": 3}, Decode(2048, "beam", num_beams=3)),
    ],
)
def test_how_to_decode_follows_from_the_settings(tmp_path, settings, decode):
    step = Step(tmp_path, {"empty.png": (CUP,)}, SCRIPT)
    assert Decode.of(step.training_set.settings.model_copy(update=settings)) == decode


class RecordingBuffer(CarryBuffer):
    """A carry buffer that adds each row it draws to the list of events."""

    def __init__(self, capacity: int, events: list) -> None:
        super().__init__(capacity, limit=50)
        self.events = events

    def draw(self, leave=0):
        self.events.append(("draw", [len(item) for item, _ in self.waiting]))
        return super().draw(leave)


def packing(step: Step, capacity: int, events: list | None = None) -> OptimizerSteps:
    """Return a step that takes four samples, in file order, per micro-step."""
    order = SampleOrder(4, 0, 1, seed=0, shuffled=False)
    buffer = RecordingBuffer(capacity, [] if events is None else events)
    return step.collect.on(RowStream(order, 4, buffer, max_length=capacity))


@pytest.mark.scenario("R06.C1", "R06.S2", "R14.C1", on="fake")
def test_all_answers_of_a_micro_step_are_made_and_corrected_before_its_row_is_packed(tmp_path, monkeypatch):
    step, events = Step(tmp_path, TRUTH, SCRIPT), []
    generate = step.backend.generate
    monkeypatch.setattr(
        step.backend,
        "generate",
        lambda requests: events.append(("generate", [r.image.path for r in requests])) or generate(requests),
    )
    row = packing(step, 200, events).collect_examples()[0]
    (asked, images), (drawn, lengths) = events
    assert (asked, drawn) == ("generate", "draw")
    assert [path.rpartition("/")[2] for path in images] == list(TRUTH), "one request per sample"
    assert lengths == [len(correction.segment) for *_, correction in step.seen]
    assert 1 < len(row) < 4
    assert sum(map(len, row)) <= 200


@pytest.mark.scenario("R06.C1", on="fake")
def test_rows_are_packed_by_the_lengths_that_the_answers_have_made(tmp_path):
    """The records are the same. With other answers, other segments share a row."""

    def first_row(said: str) -> list[str]:
        truth = {f"{name}.png": (CUP,) for name in "abcd"}
        step = Step(tmp_path, truth, {name: Said("{}") for name in truth} | {"b.png": Said(said)})
        row = packing(step, 80).collect_examples()[0]
        return [example.image.rpartition("/")[2] for example in row]

    far = TrueObject("dog", box(700, 700, 900, 900))
    assert first_row("{}") == ["a.png", "b.png"]
    assert first_row(written(far)) == ["a.png", "c.png"], "b has a false positive now, and is too long"


@pytest.mark.scenario("R37.C1", on="fake")
def test_ground_truth_and_rollouts_are_packed_by_the_same_scheduler_into_the_same_rows(tmp_path):
    """The correction of an empty answer is the ground truth, so both channels have the same segments."""
    rows = []
    for b_ratio in (Fraction(0), Fraction(1)):
        stepping = packing(Step(tmp_path, TRUTH, {name: Said("") for name in TRUTH}, b_ratio=b_ratio), 200)
        micro_steps = [stepping.collect_examples()[0] for _ in range(12)]
        assert {example.channel for row in micro_steps for example in row} == {"B" if b_ratio else "A"}
        rows.append([[(example.image, len(example)) for example in row] for row in micro_steps])
    assert rows[0] == rows[1]
    assert len({len(row) for row in rows[0]}) > 1


@pytest.mark.scenario("R06.C4", "R30.C3", on="fake")
def test_a_prompt_that_the_engine_reads_otherwise_is_refused_with_the_first_difference(tmp_path):
    for ids, first in (((11, 99, 13), 1), ((11, 12), 2), ((11, 12, 13, 14, 15), 3), ((12, 11, 13), 0)):
        step = Step(tmp_path, {"right.png": (CUP, DOG)}, SCRIPT, prompt_ids=ids)
        with pytest.raises(DataError, match=rf"right\.png.* token {first} "):
            step()
        assert step.metrics.report(steps=1).keys() <= {"time/sync", "time/rollout", "time/correct"}


@pytest.mark.scenario("R08.C2", "R08.C5", "R20.C1", on="fake")
def test_an_answer_of_other_weights_is_refused(tmp_path):
    step = Step(tmp_path, {"empty.png": (CUP,)}, SCRIPT, version=4)
    assert len(step(StepIndex(4, 0))) == 1
    with pytest.raises(RuntimeError, match=r"version 4\b.* version 5"):
        step(StepIndex(5, 0))


@pytest.mark.scenario("R06.C4", "R08.C5", "R30.C3", on="fake")
@pytest.mark.parametrize("change", [{"prompt_ids": (11, 99, 13)}, {"version": 4}])
def test_each_of_several_rollouts_of_a_sample_is_checked(tmp_path, monkeypatch, change):
    """The first one answers the prompt of training, with the weights of the step. The last one does not."""
    step = Step(tmp_path, {"empty.png": (CUP,)}, SCRIPT, cfg=SEVERAL)
    plain = step.backend.generate

    def spoil_the_last(requests):
        *others, last = plain(requests)
        return [*others, replace(last, **change)]

    monkeypatch.setattr(step.backend, "generate", spoil_the_last)
    with pytest.raises((DataError, EngineError)):
        step()


@pytest.mark.scenario("R39.C1", "R39.C3", "R39.C4", on="fake")
@pytest.mark.parametrize("rank", [0, 3])
def test_each_request_has_the_seed_of_its_place(tmp_path, rank):
    step = Step(tmp_path, TRUTH, SCRIPT, rank=rank)
    stepping = accumulating(step, micro_steps=2, samples=2)
    stepping.collect_examples()
    stepping.collect_examples()
    assert [[request.seed for request in call] for call in step.backend.calls] == [
        [request_seed(17, number, micro, rank, k) for micro in range(2) for k in range(2)] for number in range(2)
    ]
    assert [request.image.path.rpartition("/")[2] for request in step.backend.calls[0]] == list(TRUTH)


@pytest.mark.scenario("R08.C2", on="fake")
def test_weights_are_sent_once_a_step_and_before_its_first_answer(tmp_path):
    step = Step(tmp_path, TRUTH, SCRIPT)
    stepping = accumulating(step, micro_steps=3)
    for _ in range(2):
        stepping.collect_examples()
    assert step.backend.synced == [(weights, 0), (weights, 1)]


def accumulating(step: Step, micro_steps: int, samples: int = 4) -> OptimizerSteps:
    """Return a step that takes some samples, in file order, in each of several micro-steps."""
    order = SampleOrder(4, 0, 1, seed=0, shuffled=False)
    return step.collect.on(RowStream(order, samples, None, max_length=9999, accumulation=micro_steps))


SEVERAL = RolloutMatching(rollouts_per_sample=3, decoding={"temperature": 0.7})


@pytest.mark.scenario("R39.C4", "R39.S1", on="fake")
def test_several_rollouts_are_asked_for_in_one_call_and_the_best_is_trained_on(tmp_path):
    truth = {"a.png": (CUP, DOG), "b.png": (CUP,)}
    script = {
        "a.png": [Said(written(CUP)), Said(written(CUP, DOG)), Said("Sure!")],
        "b.png": [Said(written(CUP)), Said(written(CUP, DOG)), Said(written(CUP))],
    }
    step = Step(tmp_path, truth, script, cfg=SEVERAL)
    examples = step()
    (requests,) = step.backend.calls
    assert len({request.seed for request in requests}) == len(requests) == 6
    assert [choice.index for _, _, choice, _ in step.seen] == [1, 0]
    assert [len(answered.rollouts) for _, answered, *_ in step.seen] == [3, 3]
    assert len(examples) == 2
    report = step.metrics.report(1)
    assert (report["rollout/answers"], report["rollout/unused_answers"]) == (2, 4)
    assert report["rollout/tokens"] == 60 + 30
    assert report["rollout/unused_tokens"] == 30 + 2 + 60 + 30


def test_noise_answers_take_the_place_of_rollouts_and_ask_no_backend(tmp_path):
    settings = RolloutMatching(rollout_backend="hf", noise={"enabled": True, "drop": 1.0, "random": 0.0})
    step = Step(tmp_path, {"a.png": (CUP, DOG)}, {}, cfg=settings)
    (example,) = step()
    assert step.backend.calls == []
    assert step.metrics.report(1)["match/missed"] == 2
    assert answer_text(example.segment, QWEN) == written(CUP, DOG)


RATIOS = ["0", "1", "0.3", "0.001", "1/3"]


@pytest.mark.parametrize("ratio", RATIOS)
def test_of_the_first_n_steps_the_share_of_rollouts_is_exact_for_every_n(ratio):
    share, taken = Fraction(ratio), 0
    for step in range(1000):
        taken += takes_rollouts(step, share)
        assert taken == ((step + 1) * share.numerator) // share.denominator


def test_sums_are_sums_and_rates_are_ratios_of_sums_and_a_report_starts_anew():
    """Not means of rates: 1 of 2 and 9 of 90 are 10 of 92."""
    metrics = StepMetrics()
    metrics.add({"rollout/answers": 1, "match/matched": 1, "match/true": 2})
    metrics.add({"rollout/answers": 3, "match/matched": 9, "match/true": 90})
    report = metrics.report(steps=2)
    assert (report["rollout/answers"], report["match/matched"], report["match/true"]) == (4, 10, 92)
    assert report["match/recall"] == pytest.approx(10 / 92)
    assert "match/precision" not in report, "nothing was predicted, so there is none"
    assert metrics.report(steps=2) == {}
    metrics.add({"rollout/answers": 1, "match/true": 5})
    assert metrics.report(steps=1)["match/recall"] == 0


@pytest.mark.scenario("R29.C6", "R31.C7", on="fake")
def test_counters_depend_on_which_objects_match_and_not_on_how_well(tmp_path):
    """All counters of a hit in the middle and of one that is off by some bins are the same whole numbers. How well
    shapes overlap is measured by evaluation (D7)."""
    assert not [name for name in (*SUMS, *RATES) if "iou" in name or "distance" in name]
    counters = []
    for near in (CUP, TrueObject("cup", box(15, 20, 115, 120))):
        step = Step(tmp_path, {"a.png": (CUP, DOG)}, {"a.png": Said(written(near))})
        step()
        counters.append(dict(step.metrics._sums))
    assert counters[0] == counters[1]
    assert all(type(value) is int for value in counters[0].values())


def split_rows(lengths: list[int], *, cap: int = 10, packing: bool = False) -> list[list[int]]:
    contract = SimpleNamespace(packing=packing, packing_length=cap)
    step = SimpleNamespace(rollout_matching_cfg=contract, _add_waited=None)
    return [[len(part) for part in row] for row in OptimizerSteps._split_rows(step, tuple(map(range, lengths)))]


@pytest.mark.scenario("R05.C2", on="fake")
def test_without_packing_no_forward_pass_has_more_than_the_cap():
    assert split_rows([4, 6, 1]) == [[4, 6], [1]]
    assert split_rows([4, 6]) == [[4, 6]]
    assert split_rows([10, 10, 3]) == [[10], [10], [3]]


def test_a_packed_row_is_one_forward_pass():
    assert split_rows([4, 6], packing=True) == [[4, 6]]
