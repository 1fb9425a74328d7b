"""`predict` uses the prompts that the model was trained with, unless another one is given."""

import inspect
import json

from coordexp.cli.predict import predict
from coordexp.detect.answering import NATIVE_PROMPTS, read_questions


def test_the_prompts_are_those_saved_with_the_model_or_the_defaults_of_the_format(tmp_path):
    assert read_questions(tmp_path, answer_format="coord_tokens").of_run == "Detect all objects."
    native = read_questions(tmp_path, answer_format="native")
    assert (native.of_run, native.class_prompt) == NATIVE_PROMPTS[:2]
    (tmp_path / "coordexp.json").write_text(json.dumps({"prompt": "Find the cups.", "class_prompt": "{classes}?"}))
    for answer_format in ("coord_tokens", "native"):
        questions = read_questions(tmp_path, answer_format=answer_format)
        assert (questions.of_run, questions.class_prompt) == ("Find the cups.", "{classes}?")
    assert inspect.signature(predict).parameters["prompt"].default is None


def test_a_prompt_of_the_command_replaces_the_one_of_the_run_only(tmp_path):
    (tmp_path / "coordexp.json").write_text(json.dumps({"prompt": "Find the cups.", "class_prompt": "{classes}?"}))
    questions = read_questions(tmp_path, "Find forks.")
    assert (questions.of_run, questions.class_prompt) == ("Find forks.", "{classes}?")
