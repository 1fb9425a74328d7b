"""`predict` uses the prompt that the model was trained with, unless another one is given."""

import inspect
import json

from coordexp.cli.predict import _prompt_of_training, predict


def test_the_prompt_is_the_one_saved_with_the_model_or_the_default(tmp_path):
    assert _prompt_of_training(tmp_path) == "Detect all objects."
    (tmp_path / "coordexp.json").write_text(json.dumps({"prompt": "Find the cups."}))
    assert _prompt_of_training(tmp_path) == "Find the cups."
    assert inspect.signature(predict).parameters["prompt"].default is None
