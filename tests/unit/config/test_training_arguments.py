"""The mirror of transformers' arguments."""

import dataclasses
import importlib.util
from pathlib import Path

from coordexp.config import training_arguments
from coordexp.config.training_arguments import TransformersArguments


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
