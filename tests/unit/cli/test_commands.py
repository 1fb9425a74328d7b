"""The commands as a user runs them."""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import huggingface_hub.constants
import jsonschema
import pytest
import typer
import yaml

from coordexp import __version__
from coordexp.cli import app, doctor
from tests.command import run

TEN_MISTAKES = "examples/check/ten-mistakes.yaml"


def test_version():
    assert run("--version").stdout.startswith(f"coordexp {__version__}")


def test_check_of_a_wrong_config_lists_everything_and_exits_2():
    result = run("check", "--config", TEN_MISTAKES, code=2)
    lines = result.stdout.splitlines()
    assert lines[-1] == f"{TEN_MISTAKES}: 7 problems"
    places = [line for line in lines[:-1] if not line.startswith("  ")]
    assert len(places) == 7
    assert len(lines) == 15
    unknown = "error rollout_matching.vllm.server.servers[0].unknown_flag: unknown key"
    assert any(line.startswith(unknown) for line in places)


def test_check_of_a_sound_config_shows_each_value_with_its_origin():
    result = run("check", "--config", "configs/stage2-colocate.yaml", "--world-size", "2")
    shown = [line.split("  ") for line in result.stdout.splitlines()]
    rows = {line[0] or next(filter(None, line)): line[-1].strip() for line in shown}
    assert rows["dtype: bfloat16"] == "configs/base.yaml:3"
    assert rows["decode_batch_size: 16"].startswith("configs/stage2-colocate.yaml:")
    assert rows["gpu_memory_utilization: 0.45"].startswith("configs/stage2-colocate.yaml:")
    assert rows["max_model_len: 16000"] == "derived: from global_max_length"
    assert "fp_cost" not in result.stdout and "adam_beta1" not in result.stdout
    assert result.stdout.endswith("configs/stage2-colocate.yaml: sound, but 3 files are missing\n")
    assert "--world-size N" in run("check", "--config", "configs/demo/stage2-vllm.yaml").stdout
    everything = run("check", "--all", "--config", "configs/stage2-colocate.yaml").stdout
    assert "adam_beta1: 0.9" in everything and "fp_cost: 1.0" in everything


def test_check_counts_the_records_of_all_files_and_notes_patterns_without_files(tmp_path):
    for name in ("v-0.jsonl", "v-1.jsonl", "a.jsonl"):
        (tmp_path / name).write_text("{}\n{}\n")
    sets = [
        {"path": [str(tmp_path / "a.jsonl"), str(tmp_path / "none-*.jsonl")], "weight": 0.75},
        {"path": "b.jsonl"},
    ]
    custom = {"train_jsonl": None, "train_data": sets, "val_jsonl": str(tmp_path / "v-*.jsonl")}
    custom["eval_data"] = [{"name": "asked", "path": str(tmp_path / "asked.jsonl"), "max_new_tokens": 8}]
    tree = {"extends": [os.path.relpath("configs/stage2-colocate.yaml", tmp_path)], "custom": custom}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    shown = " ".join(run("check", "--config", tmp_path / "run.yaml").stdout.split())
    assert f"custom.train_data[0].path: no file matches {tmp_path}/none-*.jsonl" in shown
    assert "custom.train_data[1].path: b.jsonl does not exist" in shown
    assert "weight: 0.75" in shown
    assert f"{tmp_path}/a.jsonl does not exist" not in shown and f"matches {tmp_path}/v-" not in shown


def test_check_says_that_files_are_missing_and_exits_1_if_it_is_strict(tmp_path):
    names = ["custom.train_jsonl", "custom.val_jsonl", "model.path"]
    here = [f"--set={name}={tmp_path}" if name == "model.path" else f"--set={name}={tmp_path}/a" for name in names]
    record = {"image": "a", "width": 8, "height": 8, "space": "pixel", "objects": []}
    (tmp_path / "a").write_text(f"{json.dumps(record)}\n")
    for count, words in (
        (0, "sound ("),
        (1, "sound, but 1 file is missing ("),
        (2, "sound, but 2 files are missing ("),
    ):
        command = ["check", "--config", "configs/stage2-colocate.yaml", *here[count:]]
        assert f"configs/stage2-colocate.yaml: {words}" in run(*command).stdout
        run(*command, "--strict", code=min(count, 1))
        strict = run(*command, "--strict", "--json", code=min(count, 1))
        missing = {finding["subject"] for finding in json.loads(strict.stdout)["findings"]}
        assert missing == set(names[:count])


def test_check_warns_of_questions_that_no_loss_trains_on_and_of_files_in_the_wrong_place(tmp_path):
    question = '{"question": "Why?", "answer": "so"}\n'
    scene = '{"image": "a.png", "width": 9, "height": 9, "space": "bin", "objects": []}\n'
    for name, text in (("train", scene + question), ("val", question), ("asked", scene)):
        (tmp_path / f"{name}.jsonl").write_text(text)
    custom = {f"{name}_jsonl": str(tmp_path / f"{name}.jsonl") for name in ("train", "val")}
    custom["eval_data"] = [{"name": "asked", "path": str(tmp_path / "asked.jsonl"), "max_new_tokens": 8}]
    tree = {"extends": [os.path.relpath("configs/stage2-colocate.yaml", tmp_path)], "custom": custom}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    shown = " ".join(run("check", "--config", tmp_path / "run.yaml").stdout.split())
    assert "train.jsonl: it has questions and answers, which no loss of this run trains on" in shown
    assert "name it in custom.eval_data" in shown and "name it in custom.val_jsonl" in shown


def test_check_reads_the_world_size_that_torchrun_sets():
    result = run("check", "--json", "--config", "configs/demo/stage2-vllm.yaml", env={"WORLD_SIZE": "8"})
    details = json.loads(result.stdout)["details"]
    assert details["settings"]["rollout_matching"]["vllm"]["tensor_parallel_size"] == 4
    origin = details["origins"]["rollout_matching.vllm.tensor_parallel_size"]
    assert origin == "derived: common divisor of 4 and the learner world size 8"


def test_check_takes_little_time_of_the_processor():
    """It takes half a second; a busy machine needs up to three times as long for the same work."""
    command = [sys.executable, "-m", "coordexp", "check", "--config", "configs/stage2-server-3v1.yaml"]
    before = os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    assert sum(after[2:4]) - sum(before[2:4]) < 3.0


def test_the_schema_for_editors_is_json_schema():
    jsonschema.Draft202012Validator.check_schema(json.loads(run("check", "--schema").stdout))


def test_all_commands_fit_a_screen_and_are_at_most_28(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("--help").output.splitlines()
    assert len(shown) <= 40 and max(map(len, shown)) <= 80
    groups = [typer.main.get_command(app)]
    groups += [command for command in groups[0].commands.values() if hasattr(command, "commands")]
    commands = [name for group in groups for name, command in group.commands.items() if command not in groups]
    assert len(groups) == 5 and 20 < len(commands) <= 28
    for name in commands[:3]:
        assert any(line.split()[1:2] == [name] for line in shown)


@pytest.mark.parametrize("command", [["-m", "src.sft"], ["-m", "coordexp", "train"]])
def test_train_refuses_a_wrong_config_under_both_names(command):
    result = subprocess.run([sys.executable, *command, "--config", TEN_MISTAKES], capture_output=True, text=True)
    assert result.returncode == 2
    assert "7 problems" in result.stderr


def test_the_resolved_settings_are_a_sound_config(tmp_path):
    answer = json.loads(run("check", "--json", "--config", "configs/stage2-hf.yaml").stdout)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(answer["details"]["settings"]))
    repeated = json.loads(run("check", "--json", "--config", again).stdout)
    assert repeated["details"]["settings"] == answer["details"]["settings"]


def test_output_in_a_narrow_pipe_is_not_wrapped():
    result = subprocess.run(
        [sys.executable, "-m", "coordexp", "check", "--config", TEN_MISTAKES],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "40"},
    )
    assert len(result.stdout.splitlines()) == 15


def test_a_reader_that_goes_away_causes_no_message():
    command = f"{sys.executable} -m coordexp check --schema | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("import", "yolo", "README.md", "--images", "docs", "--crowd", "keep"), "--crowd has no effect for yolo"),
        (("import", "coco", "README.md"), "add --images"),
        (("import", "voc", "README.md"), "labelme"),
        (("export", "coco", "README.md", "--val", "README.md"), "--val has no effect for coco"),
    ],
)
def test_a_format_is_refused_if_it_is_unknown_or_an_option_does_not_fit(words, option, tmp_path):
    assert option in run("data", *words, "--out", tmp_path / "new", code=1).output


def test_a_missing_file_is_one_problem_with_a_fix():
    result = run("check", "--config", "none.yaml", code=2)
    assert result.stdout.splitlines()[0] == "error: none.yaml: no such file"


def test_for_a_model_named_as_on_the_hub_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    result = run("model", "add-coords", "--model", "Qwen/Qwen3-VL-4B-Instruct", "--out", tmp_path / "new", code=1)
    assert "hf download Qwen/Qwen3-VL-4B-Instruct --local-dir DIR" in result.output
    config = tmp_path / "run.yaml"
    demo = os.path.relpath("configs/demo/stage1-cpu.yaml", tmp_path)
    config.write_text(yaml.safe_dump({"extends": [demo], "model": {"path": "Qwen/Qwen3-VL-4B-Instruct"}}))
    assert "hf download Qwen/Qwen3-VL-4B-Instruct" in run("train", "--config", config, code=1).output
    result = run("check", "--config", config)
    assert "warning model.path: Qwen/Qwen3-VL-4B-Instruct is neither a folder here nor" in result.output


def test_a_demo_command_without_its_engine_says_what_to_install(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install '.[train]'" in run("demo", "model", "--out", "nowhere", code=1).output
    assert not Path("nowhere").exists()


def test_a_run_folder_that_cannot_be_written_is_reported_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "data.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    words = [f"training.output_dir={tmp_path}/file/run", f"custom.train_jsonl={tmp_path}/data.jsonl"]
    words += [f"model.path={tmp_path}/model", "custom.val_jsonl=null", "training.eval_strategy=no"]
    options = [part for word in words for part in ("--set", word)]
    result = run("train", "--config", "configs/demo/stage1-cpu.yaml", *options, code=1)
    assert f"training.output_dir: {tmp_path}/file/run cannot be written: Not a directory" in result.output
    assert "loading" not in result.output


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torchvision_of_another_build_is_an_error_with_a_way_out(tmp_path):
    """-S leaves out what the development environment does to load a torchvision that was built for CUDA."""
    code = "from coordexp.cli import main; main(['predict', *__import__('sys').argv[1:]])"
    options = [
        "--model",
        "examples/scenes-cpu/model",
        "--images",
        "examples/scenes-cpu",
        "--out",
        tmp_path / "a.json",
    ]
    path = f"src:{sysconfig.get_path('purelib')}"
    command = [sys.executable, "-S", "-c", code, *options]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert result.returncode == 1
    assert "torchvision cannot be loaded" in result.stderr and "from one index" in result.stderr
    versions = {name: f"{name}=={tested}.0" for name, tested in doctor.TRAIN.items() if name.startswith("torch")}
    assert f"--torch-backend cpu {' '.join(versions.values())}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_before_anything_is_loaded(tracker, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == tracker else find_spec(name))
    words = ["train", "--config", "configs/demo/stage1-cpu.yaml", "--set", f"training.report_to=[{tracker}]"]
    assert f"training.report_to: {tracker} needs {tracker}" in run(*words, code=1).stderr


def test_the_doctor_is_content_without_vllm(monkeypatch):
    monkeypatch.setattr("coordexp.cli.doctor.distributions", lambda name: iter(()))
    vllm, torch = (doctor._check_package(name, "1.0", "vllm") for name in ("vllm", "torch"))
    assert vllm.state == "not checked" and "pip install" in vllm.measured
    assert torch.state == "failed"


def test_the_paragraphs_of_a_help_text_fill_their_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    lines = run("train", "--help").output.splitlines()
    assert any("Rollouts are made" in line and "not finite." in line for line in lines)
