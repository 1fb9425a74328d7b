"""The training arguments that are mirrored from transformers, and those that are refused."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.config import training_arguments
from coordexp.config.legacy import REFUSED
from coordexp.config.training_arguments import TransformersArguments
from tests.unit.config.trees import apply_changes, load, only_problem, stage1, stage2

# Arguments that were accepted and then ignored before, each with a value that differs from the default.
ONCE_IGNORED = {
    "dataloader_pin_memory": False,
    "dataloader_drop_last": True,
    "dataloader_persistent_workers": True,
    "dataloader_in_order": False,
    "remove_unused_columns": False,
    "disable_tqdm": True,
    "prediction_loss_only": True,
    "eval_accumulation_steps": 4,
    "eval_do_concat_batches": False,
    "batch_eval_metrics": True,
    "include_for_metrics": ["inputs"],
    "eval_use_gather_object": True,
    "bf16_full_eval": True,
    "label_names": ["labels"],
    "length_column_name": "tokens",
    "do_eval": True,
    "do_predict": True,
    "average_tokens_across_devices": False,
}


def test_the_mirror_is_what_the_installed_transformers_has():
    spec = importlib.util.spec_from_file_location("mirror", "tools/mirror_training_arguments.py")
    mirror = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mirror)
    assert Path(training_arguments.__file__).read_text() == mirror.render(), (
        "stale: run python tools/mirror_training_arguments.py"
    )


def test_transformers_accepts_every_default_of_the_mirror(tmp_path):
    from transformers import TrainingArguments

    defaults = TransformersArguments().model_dump()
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    arguments = TrainingArguments(**values | {"output_dir": str(tmp_path), "use_cpu": True})
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert arguments.learning_rate == 5e-5
    assert set(values) < names


def test_every_argument_of_transformers_is_either_mirrored_or_refused():
    from transformers import TrainingArguments

    arguments = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    mirrored = set(TransformersArguments.model_fields)
    assert mirrored | set(REFUSED) == arguments
    assert not mirrored & set(REFUSED)


def test_check_refuses_each_refused_argument_with_its_problem_and_fix(tmp_path):
    for name, refused in REFUSED.items():
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(stage2(**{f"training__{name}": None})))
        result = CliRunner().invoke(app, ["check", "--json", "--config", str(config)])
        assert result.exit_code == 2, name
        (finding,) = json.loads(result.stdout)["findings"]
        assert finding["subject"] == f"training.{name}"
        assert (finding["problem"], finding["fix"]) == (refused.problem, refused.fix)
        assert [place["file"] for place in finding["places"]] == [str(config)]


def test_each_refused_argument_has_a_reason_and_a_fix():
    for name, (problem, fix) in REFUSED.items():
        verdict, _, reason = problem.partition(": ")
        assert verdict in ("has no effect", "is not supported", "is not accepted"), name
        assert len(reason.split()) > 3, name
        assert fix.startswith(("remove it", "set ")), name


@pytest.mark.parametrize(("name", "value"), ONCE_IGNORED.items())
def test_an_argument_that_nothing_reads_is_refused(name, value):
    path, message = only_problem(stage2(**{f"training__{name}": value}))
    assert path == f"training.{name}"
    assert "has no effect: " in message
    assert "remove it" in message


def test_all_refused_arguments_of_a_file_are_reported_at_once(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(apply_changes(stage1(), training=stage1()["training"] | ONCE_IGNORED)))
    result = CliRunner().invoke(app, ["check", "--json", "--config", str(config)])
    subjects = [finding["subject"] for finding in json.loads(result.stdout)["findings"]]
    assert sorted(subjects) == sorted(f"training.{name}" for name in ONCE_IGNORED)


@pytest.mark.parametrize(
    ("idle", "switch"),
    [
        ({"eval_steps": 10}, {"eval_strategy": "steps"}),
        ({"eval_delay": 10}, {"eval_strategy": "steps"}),
        ({"metric_for_best_model": "ap"}, {"eval_strategy": "steps"}),
        ({"save_strategy": "no", "save_steps": 10}, {"save_strategy": "steps"}),
        ({"max_steps": 10, "num_train_epochs": 2.0}, {"max_steps": -1}),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, {"gradient_checkpointing": True}),
        ({"fsdp_config": {"version": 2}}, {"fsdp": True}),
        ({"optim_target_modules": ["attn"]}, {"optim": "galore_adamw"}),
        ({"use_cpu": True, "ddp_timeout": 60}, {"use_cpu": False}),
        ({"report_to": "tensorboard", "run_name": "x"}, {"report_to": "wandb"}),
        ({"report_to": ["wandb"], "trackio_space_id": "x"}, {"report_to": ["wandb", "trackio"]}),
    ],
)
def test_a_note_names_an_argument_that_another_one_makes_ineffective(idle, switch):
    tree = stage2(custom__val_jsonl="val.jsonl")
    name = list(idle)[-1]
    (note,) = load(apply_changes(tree, **{f"training__{key}": value for key, value in idle.items()})).notes
    assert str(note).startswith(f"training.{name}: not used: ")
    assert load(apply_changes(tree, **{f"training__{key}": value for key, value in switch.items()})).notes == ()


@pytest.mark.parametrize("tree", [stage1(), stage2()])
def test_a_note_says_that_the_evaluation_batch_size_is_not_used(tree):
    """The specification has runs with this argument, so it is accepted (R10)."""
    (note,) = load(apply_changes(tree, training__per_device_eval_batch_size=2)).notes
    assert str(note).startswith(
        "training.per_device_eval_batch_size: not used: rollout_matching.decode_batch_size"
    )


def test_the_trainer_is_given_the_arguments_of_the_file_and_filters_no_loss(tmp_path):
    from coordexp.train.run import training_arguments

    given = {"output_dir": str(tmp_path), "use_cpu": True, "adam_beta2": 0.98, "max_steps": 3, "optim": "sgd"}
    settings = load(stage2(training=given)).settings
    arguments = training_arguments(settings, samples=8)
    assert {name: getattr(arguments, name) for name in given} == given
    assert arguments.logging_nan_inf_filter is False


def test_half_precision_without_a_gpu_names_the_settings_to_change(tmp_path, monkeypatch):
    import torch

    from coordexp.cli.train import _check_device
    from coordexp.errors import UserError

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    settings = load(stage2(training={"output_dir": str(tmp_path), "bf16": True, "max_steps": 3})).settings
    with pytest.raises(UserError, match=r"training.bf16: true needs a GPU[\s\S]*training.use_cpu: true"):
        _check_device(settings.training)


def test_deepspeed_is_refused_also_if_accelerate_asks_for_it(tmp_path, monkeypatch):
    from coordexp.errors import UserError
    from coordexp.train.run import training_arguments

    assert (
        only_problem(stage2(training={"output_dir": "runs/test", "deepspeed": "ds.json"}))[0]
        == "training.deepspeed"
    )
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    settings = load(stage2(training={"output_dir": str(tmp_path), "use_cpu": True, "max_steps": 3})).settings
    with pytest.raises(UserError, match=r"DeepSpeed is not supported[\s\S]*training\.fsdp"):
        training_arguments(settings, samples=8)
