"""`predict --images`: which options exclude each other, and what they say."""

import pytest
from PIL import Image
from typer.testing import CliRunner

from coordexp.cli import app


@pytest.fixture
def words(tmp_path):
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    (tmp_path / "val.jsonl").write_text("{}")
    paths = {"IMAGE": str(tmp_path / "a.png"), "DATA": str(tmp_path / "val.jsonl")}

    def build(*options):
        given = ["--model", str(tmp_path), "--out", str(tmp_path / "preds.json")]
        return ["predict", *given, *(paths.get(option, option) for option in options)]

    return build


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--images", "IMAGE", "--data", "DATA"], "--data and --images exclude each other"),
        ([], "there is nothing to predict on"),
        (["IMAGE"], "an image without --images"),
        (["--data", "DATA", "IMAGE"], "an image without --images"),
        (["--data", "DATA", "--classes", "cup"], "--classes has no effect with --data"),
        (["--data", "DATA", "--expression", "the cup"], "--expression has no effect with --data"),
        (["--images", "IMAGE", "--classes", "cup", "--expression", "it"], "--expression exclude each other"),
        (["--images", "IMAGE", "--classes", " , "], "--classes names no class"),
        (["--images", "IMAGE", "--server", "http://h", "--backend", "vllm"], "--backend has no effect"),
        (["--images", "IMAGE", "--served-model", "mine"], "--served-model has no effect without --server"),
        (["--images", "IMAGE", "--page", "page.txt"], "a page is an .html file"),
        (["--images", "IMAGE", "IMAGE"], "has no config.json"),  # all else is right
    ],
)
def test_options_that_exclude_each_other_are_refused(words, options, message):
    result = CliRunner().invoke(app, words(*options))
    assert result.exit_code == 1 and message in result.output, result.output
