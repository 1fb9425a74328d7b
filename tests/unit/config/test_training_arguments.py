"""The training arguments that are mirrored from transformers, and those that are refused."""

import dataclasses
import importlib.util

import pytest

from coordexp.config.training import REFUSED, UNUSED, TransformersArguments
from tests.unit.config.trees import apply_changes, load, only_problem, problems, stage1, stage2


def test_the_mirror_is_what_the_installed_transformers_has():
    spec = importlib.util.spec_from_file_location("mirror", "tools/mirror_training_arguments.py")
    mirror = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mirror)
    assert mirror.TARGET.read_text() == mirror.render(), "stale: run python tools/mirror_training_arguments.py"


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


def test_all_refused_arguments_of_a_file_are_reported_at_once_with_problem_and_fix():
    messages = problems(stage2(**{f"training__{name}": None for name in REFUSED}))
    assert messages == {f"training.{name}": f"{problem}\n{fix}" for name, (problem, fix) in REFUSED.items()}


def test_an_argument_that_users_expect_to_work_has_a_reason_of_its_own():
    for name in ("label_smoothing_factor", "load_best_model_at_end", "resume_from_checkpoint", "deepspeed"):
        assert REFUSED[name] != UNUSED
    for problem, fix in REFUSED.values():
        verdict, _, reason = problem.partition(": ")
        assert verdict in ("has no effect", "is not supported", "is not accepted")
        assert len(reason.split()) > 3 and fix.startswith(("remove it", "set "))


@pytest.mark.parametrize(
    ("name", "value"), [("eval_strategy", "epoch"), ("optim", "lomo"), ("learning_rate", -1.0)]
)
def test_a_value_that_rows_cannot_honour_is_not_one_of_the_argument(name, value):
    assert only_problem(stage2(**{f"training__{name}": value}))[0] == f"training.{name}"


@pytest.mark.parametrize("tree", [stage1(), stage2()])
def test_a_note_says_that_the_evaluation_batch_size_is_not_used(tree):
    """The specification has runs with this argument, so it is accepted (R10)."""
    (note,) = load(apply_changes(tree, training__per_device_eval_batch_size=2)).notes
    assert note.subject == "training.per_device_eval_batch_size"


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
