"""`coordexp predict`: answers with scores from transformers and from a real vLLM engine, and files to evaluate."""

import json
import signal
import time
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoProcessor

from coordexp.data import DataError
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.rollout.prompt import PromptBuilder
from tests.command import run
from tests.integration.leavings import leavings
from tests.integration.stage2_runs import finish, started

pytestmark = pytest.mark.timeout(480)
TRAINED_MODEL = Path("examples/scenes-cpu/model")


@pytest.mark.scenario("R30.C1", on="model")
def test_a_prompt_has_the_tokens_that_the_processor_makes(lively_model):
    processor = AutoProcessor.from_pretrained(lively_model)
    prompts = PromptBuilder(processor, "Detect all objects.")
    for size in ((64, 64), (96, 96), (96, 160)):
        inputs = processor(text=[prompts.text()], images=[Image.new("RGB", size)], return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == prompts.ids(*size)


def test_an_image_of_another_size_than_its_record_is_refused(lively_model, tmp_path):
    """This includes an image that is only rotated, which has the same number of tokens."""
    stored = Image.new("RGB", (96, 32))
    exif = stored.getexif()
    exif[0x0112] = 6  # to be rotated by a quarter turn
    stored.save(tmp_path / "turned.jpg", exif=exif)
    prompts = PromptBuilder(AutoProcessor.from_pretrained(lively_model), "Detect all objects.")
    with pytest.raises(DataError, match="the record says 96 x 32, the image is 32 x 96"):
        prompts.pixels(tmp_path / "turned.jpg", (96, 32))
    assert prompts.pixels(tmp_path / "turned.jpg", (32, 96))[1].tolist() == [[1, 6, 2]]


def command(model, folder, *more):
    paths = {"--model": model, "--data": folder / "s/val.jsonl", "--out": folder / "preds.json"}
    words = [str(word) for option in paths.items() for word in option]
    return ["predict", *words, "--max-new-tokens", "24", "--batch", "2", *more]


@pytest.fixture
def eight_scenes(tmp_path):
    write_scenes(tmp_path / "s", SceneSettings(), train=1, val=8, seed=0)
    return tmp_path


def test_the_answer_to_an_image_that_is_unreadable_or_of_an_impossible_size_says_so(lively_model, eight_scenes):
    run(*command(lively_model, eight_scenes))
    undisturbed = (eight_scenes / "preds.answers.jsonl").read_text().splitlines()

    broken = sorted((eight_scenes / "s/images/val").iterdir())[2]
    broken.write_bytes(broken.read_bytes()[:40])
    file = eight_scenes / "s/val.jsonl"
    *others, last = file.read_text().splitlines()
    odd = json.loads(last) | {"width": 3000, "height": 10, "objects": []}
    file.write_text("\n".join([*others, json.dumps(odd)]) + "\n")
    result = run(*command(lively_model, eight_scenes))
    assert f"{broken}: " in result.output and "2 of 8 images" in result.output
    lines = (eight_scenes / "preds.answers.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["finish_reason"] for line in lines]
    assert [k for k, reason in enumerate(reasons) if reason == "image_unreadable"] == [2, 7]
    assert all(line == undisturbed[k] for k, line in enumerate(lines) if k not in (2, 7))
    result = run("evaluate", "--data", file, "--preds", eight_scenes / "preds.json")
    assert "2 images could not be read" in result.output

    for image in (eight_scenes / "s/images/val").iterdir():
        image.unlink()
    result = run(*command(lively_model, eight_scenes), code=1)
    assert "8 of 8 images" in result.output


@pytest.mark.cold
@pytest.mark.engine
def test_an_engine_of_vllm_makes_the_predictions_of_transformers_and_ends_with_the_command(
    lively_model, eight_scenes
):
    """The command runs in a process of its own, and leaves no temporary file."""

    def predicted():
        answers = read_lines(eight_scenes / "preds.answers.jsonl")
        return [answer["text"] for answer in answers], len(json.loads((eight_scenes / "preds.json").read_text()))

    run(*command(lively_model, eight_scenes))
    expected = predicted()
    with leavings() as places:
        words = ["-m", "coordexp", *command(lively_model, eight_scenes, "--backend", "vllm")]
        finish(words, **places.variables)
        assert places.left() == []
    assert predicted() == expected


# The command, in which the second batch takes a minute, so that a signal comes before its answers.
WITH_SLOW_BATCH = """
import sys, time
from coordexp.cli import app
from coordexp.detect.answering import Answering
answer_batch, batches = Answering.answer_batch, []
def answer_slowly(*arguments):
    batches.append(arguments)
    if len(batches) > 1:
        time.sleep(60)
    return answer_batch(*arguments)
Answering.answer_batch = answer_slowly
app(sys.argv[1:])
"""
ALL_OPTIONS = ["--stop-bias", "10", "--dedup", "0.5", "--samples", "2", "--temperature", "1.5", "--top-p", "0.9"]


def scene_options(folder, name, *more):
    files = ["--data", str(folder / "s/val.jsonl"), "--out", str(folder / name)]
    return ["predict", "--model", str(TRAINED_MODEL), *files, "--max-new-tokens", "120", "--batch", "2", *more]


def predict_scenes(folder, name, *more, code=0):
    return run(*scene_options(folder, name, *more), code=code)


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_all(folder, name):
    return [(folder / f"{name}{suffix}").read_text() for suffix in (".json", ".answers.jsonl", ".samples.jsonl")]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A folder with four scenes and, as `preds.json`, what a command with all options predicts."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder / "s", SceneSettings(), train=1, val=4, seed=3)
    whole = predict_scenes(folder, "preds.json", *ALL_OPTIONS)
    (folder / "shown").write_text(whole.output)
    return folder


def test_all_options_work_together(scenes):
    predict_scenes(scenes, "plain.json")
    # The bias makes answers longer, and what is then written twice is dropped but stays visible.
    answers = read_lines(scenes / "preds.answers.jsonl")
    pairs = zip(read_lines(scenes / "plain.answers.jsonl"), answers, strict=True)
    assert all(len(before["text"]) < len(after["text"]) for before, after in pairs)
    dropped = sum(len(answer.get("dropped", ())) for answer in answers)
    assert dropped > 0 and f"{dropped} objects dropped as duplicates" in (scenes / "shown").read_text()
    valid = [item for answer in answers for item in answer["objects"] if item["reason"] is None]
    assert len(json.loads((scenes / "preds.json").read_text())) == len(valid)
    assert sum(answer["text"].count('"bbox_2d"') for answer in answers) >= len(valid) + dropped

    samples = read_lines(scenes / "preds.samples.jsonl")
    assert [(line["image_id"], line["sample"]) for line in samples] == [
        (i, k) for i in (1, 2, 3, 4) for k in (1, 2)
    ]
    assert all(first["text"] != second["text"] for first, second in zip(samples[::2], samples[1::2], strict=True))
    result = run("evaluate", "--data", scenes / "s/val.jsonl", "--preds", scenes / "preds.json")
    assert f"dropped {dropped} objects as duplicates" in result.output
    stale = predict_scenes(scenes, "preds.json", code=1)
    assert "preds.samples.jsonl has samples of earlier predictions" in stale.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_predictions_that_were_killed_or_interrupted_are_resumed(scenes, number, code):
    name, unfinished = f"again-{number.name}", scenes / f"again-{number.name}.unfinished.jsonl"
    with started(["-c", WITH_SLOW_BATCH, *scene_options(scenes, f"{name}.json", *ALL_OPTIONS)]) as run:
        # Wait for the first line and one batch: two images with three answers each.
        while not (unfinished.is_file() and unfinished.read_bytes().count(b"\n") >= 7):
            assert run.process.poll() is None and run.seconds < 120, run.shown
            time.sleep(0.02)
        run.process.send_signal(number)
        assert run.wait(60) == code
        assert code < 0 or "interrupted after 2 of 4 images" in run.shown
        assert "Loading weights" not in run.shown  # the progress bars of transformers do not belong into a log
    assert not (scenes / f"{name}.json").exists()
    fewer = predict_scenes(scenes, f"{name}.json", *ALL_OPTIONS, "--resume", "--limit", "1", code=1)
    assert "--limit asks for 1" in fewer.output
    resumed = predict_scenes(scenes, f"{name}.json", *ALL_OPTIONS, "--resume")
    assert "2 of 4 images have been answered already" in resumed.output
    assert read_all(scenes, name) == read_all(scenes, "preds") and not unfinished.exists()
    again = predict_scenes(scenes, f"{name}.json", *ALL_OPTIONS, "--resume", "--limit", "2")
    assert f"{name}.json is complete: nothing to do" in again.output
    assert read_all(scenes, name) == read_all(scenes, "preds")
