"""Dumps: the contents of a line, how many examples are dumped, and a full disk."""

import errno
import json
import logging
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from coordexp.config.rollout import RepeatTerminate
from coordexp.data import RecordFile
from coordexp.dumps import CORRECTION_SETTINGS, DumpFolder, remove_from_step, replay
from coordexp.rollout.backend import request_seed
from coordexp.train.encode import StepIndex, takes_rollouts
from tests.dumped import NEAR_CUP, SCRIPT, SMALL, TRUTH, dump_of, dumping
from tests.rollouts import PROMPT
from tests.scripted import Said
from tests.unit.answers.conftest import answer, box, entry
from tests.vocabularies import encode


def images(file: Path) -> list[str]:
    return [Path(json.loads(line)["picture"]["path"]).name for line in file.read_text().splitlines()]


OTHERS = (
    {"candidate_top_k": 1},
    {"maskiou_gate": 0.99},
    {"match_classes": "same"},
    {"maskiou_resolution": 16},
    {"fp_cost": 0.0, "fn_cost": 0.01},
    {"optimal_transport": {"epsilon": 1.0}},
    {"correction": {"insertion": "in_order"}},
)


@pytest.mark.parametrize("settings", OTHERS, ids=lambda settings: ",".join(settings))
def test_all_settings_that_correcting_reads_are_in_the_dump(tmp_path, settings):
    assert {*(name for settings in OTHERS for name in settings), "choice"} == set(CORRECTION_SETTINGS)
    renamed = Said(SCRIPT["partly.png"].text.replace('"roof"', '"tent"'))
    script = SCRIPT | {"partly.png": renamed}
    usual = json.loads(dump_of(tmp_path, script=script).read_text().splitlines()[0])
    line = dump_of(tmp_path, script=script, **settings).read_text().splitlines()[0]
    assert json.loads(line)["result"] != usual["result"], "the setting matters"
    assert replay(line, SMALL) == []


def test_a_dump_of_several_rollouts_has_the_choice_and_comes_out_the_same(tmp_path):
    agreed = entry("object_1", "lamp", box(850, 0, 950, 100))
    script = {
        name: [Said("Sure!"), said, Said(answer(agreed)), Said(answer(agreed))] for name, said in SCRIPT.items()
    }
    settings = {
        "rollouts_per_sample": 4,
        "decoding": {"temperature": 0.7},
        "choice": {"rule": "union", "pseudo_labels": True},
    }
    step, dumps = dumping(tmp_path, script=script, **settings)
    (example,) = step([0], StepIndex(0, 0))
    (line,) = (tmp_path / "dumps/step-000000.jsonl").read_text().splitlines()
    choice = json.loads(line)["choice"]
    assert choice["index"] == 1
    assert choice["texts"][1] == json.loads(line)["rollout"]["text"] == SCRIPT["partly.png"].text
    assert [thing["desc"] for thing in choice["agreed"]] == ["lamp"]
    assert choice["seed"] == request_seed(17, 0, 0, 0, 0) != json.loads(line)["seed"]
    assert replay(line, SMALL) == []
    without = json.loads(line) | {"choice": choice | {"agreed": []}}
    assert replay(json.dumps(without), SMALL) != []
    assert dumps.find(example.id) == ("step-000000.jsonl", 0)


def test_a_class_that_a_record_lists_as_exhaustive_has_no_extras_and_comes_out_the_same(tmp_path):
    step, dumps = dumping(tmp_path, correction={"extras": "remove_exhaustive"})
    records = tmp_path / "train.jsonl"
    records.write_text(records.read_text().replace('"space"', '"exhaustive": ["x"], "space"', 1))
    step = replace(step, training_set=replace(step.training_set, records=RecordFile(records)))
    step([0], StepIndex(0, 0))
    (line,) = dumps.folder.path.joinpath("step-000000.jsonl").read_text().splitlines()
    assert json.loads(line)["complete"] == ["x"]
    assert json.loads(line)["result"]["rebuilt"]["removed_extras"] == [2]
    assert replay(line, SMALL) == []
    assert replay(json.dumps(json.loads(line) | {"complete": []}), SMALL) != []


def test_a_line_says_what_was_asked_answered_and_made_of_it(tmp_path):
    example = json.loads(dump_of(tmp_path).read_text().splitlines()[0])
    text = SCRIPT["partly.png"].text
    assert example["place"] == {"step": 0, "micro": 0, "rank": 0, "record": 0}
    assert example["picture"] == {"path": str(tmp_path / "partly.png"), "width": 64, "height": 48}
    assert example["seed"] == request_seed(17, 0, 0, 0, 0)
    assert example["decode"]["mode"] == "greedy"
    assert example["decode"]["guard"] == RepeatTerminate().model_dump()
    assert example["rollout"]["ids"] == encode(text, SMALL)
    assert example["rollout"]["text"] == text
    assert example["rollout"]["prompt_ids"] == list(PROMPT)
    assert (example["rollout"]["finish_reason"], example["rollout"]["version"]) == ("stop", 0)
    assert [(true["desc"], tuple(true["bins"])) for true in example["truth"]] == [
        (true.desc, true.geometry.bins) for true in TRUTH["partly.png"]
    ]
    assert set(example["settings"]) == set(CORRECTION_SETTINGS)
    result = example["result"]
    assert [prediction["reason"] for prediction in result["objects"]] == [None] * 3
    assert result["objects"][0]["bins"] == list(NEAR_CUP.bins)
    assert (result["pairs"], result["missed"], result["extra"]) == ([[0, 0], [1, 2]], [1], [2])
    assert {len(stream) for stream in result["streams"].values()} == {len(result["streams"]["ids"])}


def test_at_most_so_many_examples_of_a_step_and_only_of_chosen_steps(tmp_path):
    step, _ = dumping(tmp_path, every=3, samples=4)
    for number in range(8):
        for micro in range(2):
            step([0, 1, 2], StepIndex(number, micro))
    files = sorted((tmp_path / "dumps").glob("*.json*"))
    assert [file.name for file in files] == [f"step-{number:06d}.jsonl" for number in (0, 3, 6)] + [
        "tokenizer.json"
    ]
    for file in files[:-1]:
        assert images(file) == ["partly.png", "garbage.png", "cut.png", "partly.png"]
        places = [json.loads(line)["place"] for line in file.read_text().splitlines()]
        assert [place["micro"] for place in places] == [0, 0, 0, 1]
        assert {place["step"] for place in places} == {int(file.stem.partition("-")[2])}


def test_what_was_dumped_after_the_checkpoint_is_forgotten_with_its_traces(tmp_path):
    first, _ = dumping(tmp_path, every=2)
    for step in range(6):
        first([0], StepIndex(step, 0))
    for file in list((tmp_path / "dumps").rglob("step-*")):
        file.with_name(file.name.replace("step", "trained")).write_text("{}\n")
    remove_from_step(tmp_path / "dumps", 3)
    left = sorted(str(path.relative_to(tmp_path / "dumps")) for path in (tmp_path / "dumps").rglob("*.jsonl"))
    assert left == [f"{name}-00000{step}.jsonl" for name in ("step", "trained") for step in (0, 2)]
    remove_from_step(tmp_path / "dumps", 0)
    remove_from_step(tmp_path / "nothing", 0)
    assert list((tmp_path / "dumps").rglob("*.jsonl")) == []


def places(writer, examples) -> list[str]:
    """Return file and line of each example, or an empty text if it is not dumped."""
    return ["{}:{}".format(*place) if (place := writer.find(example.id)) else "" for example in examples]


def test_the_writer_knows_where_it_has_dumped_an_example(tmp_path):
    step, writer = dumping(tmp_path, every=2, samples=2)
    examples = [example for micro in range(2) for example in step([0, 0], StepIndex(2, micro))]
    assert places(writer, examples) == ["step-000002.jsonl:0", "step-000002.jsonl:1", "", ""]


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_stop_the_run_and_is_said_once(tmp_path, monkeypatch, caplog):
    step, _ = dumping(tmp_path)
    plain, disk = Path.open, {"full": True}

    def opened(path, mode="r", *options, **more):
        if disk["full"] and path.parent.name == "dumps":
            full()
        return plain(path, mode, *options, **more)

    monkeypatch.setattr(Path, "open", opened)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert len(step([0, 1, 2], StepIndex(number, 0))) == 3
    (warning,) = caplog.records
    assert str(tmp_path / "dumps/tokenizer.json") in warning.message
    assert list((tmp_path / "dumps").glob("step-*")) == []
    disk["full"] = False
    step([0, 1, 2], StepIndex(3, 0))
    assert images(tmp_path / "dumps/step-000003.jsonl") == list(TRUTH)


def test_a_line_that_the_disk_took_half_of_does_not_spoil_the_next(tmp_path, monkeypatch):
    folder = DumpFolder(tmp_path / "dumps", tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert folder.add("step-000000.jsonl", "one") == 0
    plain, asked = os.write, []

    def half(file, data):
        asked.append(data)
        return plain(file, data[: len(data) // 2]) if len(asked) == 1 else full()

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        assert folder.add("step-000000.jsonl", "two") is None
        assert folder.add("trained-000000.jsonl", "of one") is None
    assert folder.add("step-000000.jsonl", "three") == 1
    assert folder.add("trained-000000.jsonl", "of three") == 0
    assert (tmp_path / "dumps/step-000000.jsonl").read_text() == "one\nthree\n"
    assert (tmp_path / "dumps/trained-000000.jsonl").read_text() == "of three\n"


def test_with_two_channels_the_first_rollout_step_of_every_window_is_dumped(tmp_path):
    """The steps that `dump_every` divides are all ground truth when every second step is."""
    step, _ = dumping(tmp_path, every=4)
    for number in range(12):
        if takes_rollouts(number, Fraction("0.5")):
            step([0], StepIndex(number, 0))
    assert [file.stem for file in sorted((tmp_path / "dumps").glob("step-*"))] == [
        "step-000001",
        "step-000005",
        "step-000009",
    ]
