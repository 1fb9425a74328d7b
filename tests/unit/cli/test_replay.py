"""`coordexp replay` reports that dumped answers come out the same, or where they differ."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordexp.train.encode import StepIndex
from tests.command import run
from tests.dumped import dump_of, dumping


def change(file: Path, number: int, edit) -> None:
    """Edit one example of a dump."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    edit(lines[number])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_file_and_a_folder_come_out_the_same(tmp_path):
    step, _ = dumping(tmp_path, samples=2)
    for number in range(3):
        step([0, 1, 2], StepIndex(number, 0))
    whole, single = (run("replay", tmp_path / name) for name in ("dumps", "dumps/step-000001.jsonl"))
    assert whole.stdout == "6 examples of 3 steps come out the same\n"
    assert single.stdout == "2 examples of 1 steps come out the same\n"


def test_replay_needs_no_model_and_no_torch(tmp_path):
    file = dump_of(tmp_path)
    code = (
        "import sys; from coordexp.cli import main\n"
        f"try: main(['replay', {str(file)!r}])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'vllm'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def truth_bin(whole):
    whole["truth"][1]["bins"][3] += 1  # of the dog, which was missed: what is appended differs


def role(whole):
    whole["result"]["streams"]["roles"][7] += 1


def gate(whole):
    whole["settings"]["maskiou_gate"] = 0.99


def matched_truth(whole):
    whole["truth"][0]["bins"][0] += 1


def order(whole):
    whole["order"] = "geometry_first"


def answer_id(whole):
    whole["rollout"]["ids"] = whole["rollout"]["ids"][:-3]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (truth_bin, "result.streams.coord_targets[141]: 500.0 in the dump, 501.0 now"),
        (role, "result.streams.roles[7]: 2 in the dump, 1 now"),
        (gate, "result.pairs: [[0, 0], [1, 2]] in the dump, [] now"),
        (matched_truth, "in the dump, 11.0 now"),
        (order, "result.streams.ids: [11, 12, 13, "),
        (answer_id, "result.truncated: false in the dump, true now"),
    ],
)
def test_what_comes_out_differently_is_named_and_exits_1(tmp_path, edit, words):
    file = dump_of(tmp_path)
    change(file, 0, edit)
    result = run("replay", file, code=1)
    shown = result.stderr.splitlines()
    assert shown[-1] == "1 of 3 examples come out differently"
    assert all(line.startswith(f"{file}, line 1: result.") for line in shown[:-1])
    assert any(words in line for line in shown), shown
    assert result.stdout == ""


def test_every_example_is_looked_at_and_every_difference_counted(tmp_path):
    file = dump_of(tmp_path)
    change(file, 1, role)
    change(file, 2, role)
    shown = run("replay", tmp_path / "dumps", code=1).stderr
    assert f"{file}, line 2: result.streams.roles[7]" in shown
    assert f"{file}, line 3: result.streams.roles[7]" in shown
    assert shown.endswith("2 of 3 examples come out differently\n")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"format": 1, "pla',
        b"[]",
        b"null",
        b"{}",
        b'{"format": 2}',
        b'{"format": 1}',
        b"\xff\xfe",
        b'{"format": 1, "truth": [{"desc": "a", "kind": "bbox_2d", "bins": [1]}], "rollout": {}}',
    ],
)
def test_a_broken_line_is_named(tmp_path, line):
    file = dump_of(tmp_path)
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([lines[0], line, *lines[1:]]) + b"\n")
    assert f"{file}, line 2: not a dumped example: " in run("replay", file, code=1).stderr


def test_a_dump_of_another_format_says_which_this_version_reads(tmp_path):
    file = dump_of(tmp_path)
    change(file, 0, lambda whole: whole.update(format=7))
    assert "a dump of format 7; this version reads 1" in run("replay", file, code=1).stderr


def test_without_a_tokenizer_it_says_which_to_copy(tmp_path):
    file = dump_of(tmp_path)
    (tmp_path / "dumps/tokenizer.json").unlink()
    shown = run("replay", file, code=1).stderr
    assert f"{tmp_path / 'dumps/tokenizer.json'}: no such file" in shown
    assert "copy the tokenizer.json" in shown


def test_a_folder_without_dumps_says_how_to_get_them(tmp_path):
    assert "stage2.dump_every" in run("replay", tmp_path, code=1).stderr
