"""Evaluations show images in TensorBoard and Weights & Biases. Both trackers are real; wandb writes offline."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from transformers.integrations import WandbCallback

from coordexp.evaluate import evaluate
from coordexp.train.callbacks import TensorBoard
from coordexp.train.pictures import EXTRA, MATCHED, TRUE, EvaluationPictures, draw_objects
from tests.unit.evaluate.scenes import BOX, FAR, answer, prediction, record

STATE = SimpleNamespace(is_world_process_zero=True, global_step=7)
ODD = "cat | <b>`*"


@pytest.fixture
def images(tmp_path):
    """Ten evaluated images, of which the fourth one cannot be read."""
    truth, answers, files = [], [], []
    for k in range(1, 11):
        name = f"{k}.png"
        truth.append((k, record(("cat", BOX), (ODD, FAR), image=name, width=100, height=100)))
        answers.append(answer(prediction("cat", BOX), prediction("dog", FAR), image_id=k, image=name, text=ODD))
        files.append(tmp_path / name)
        Image.new("RGB", (100, 100), (255, 255, 255 - k)).save(files[-1])
    files[3].write_bytes(b"not an image")
    report = evaluate(truth, answers)
    return [(image, file, "Detect.") for image, file in zip(report.images, files, strict=True)]


def show(images, tracker, most):
    pictures = EvaluationPictures(most)
    pictures.trackers = [tracker]
    pictures.add(images)
    pictures.on_evaluate(None, STATE, None)
    pictures.on_evaluate(None, STATE, None)  # an evaluation without images shows nothing again


def test_tensorboard_gets_the_images_and_a_table(images, tmp_path):
    tracker = TensorBoard()
    tracker.tb_writer = SummaryWriter(tmp_path / "events")
    show(images, tracker, most=10)
    tracker.tb_writer.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert events.Tags()["images"] == [f"evaluation/{k}" for k in range(9)]
    (shown,) = events.Images("evaluation/0")
    assert (shown.step, shown.width, shown.height) == (7, 256, 256)
    (text,) = events.Tensors("evaluation/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert len(lines) == 2 + 9
    cells = lines[2].split(" | ")
    assert cells[1:4] == ["Detect.", "cat, cat &#124; &lt;b&gt;&#96;&#42;", "cat, dog"]
    assert all(line.count(" | ") == 6 for line in lines)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # wandb leaves sockets open
def test_wandb_gets_a_table_of_images_with_boxes(images, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="test", dir=str(tmp_path))
    show(images, WandbCallback(), most=2)
    run.finish()
    (table,) = (tmp_path / "wandb").glob("offline-run*/files/media/table/eval/*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"][:3] == ["image", "question", "true"]
    assert len(content["data"]) == 2
    first = content["data"][0]
    assert first[1:5] == ["Detect.", f"cat, {ODD}", "cat, dog", ODD]
    pictures = sorted(table.parents[2].glob("images/eval/*.png"))
    assert [Image.open(file).size for file in pictures] == [(256, 256)] * 2
    boxes = [json.loads(file.read_text())["box_data"] for file in table.parents[2].rglob("*.boxes2D.json")]
    captions = sorted([item["box_caption"] for item in group] for group in boxes)
    assert captions == [["cat", ODD], ["cat", "dog"]]  # both images have the same ones


def test_true_matched_and_extra_objects_have_different_colours(images):
    drawn = np.asarray(draw_objects(Image.new("RGB", (100, 100), "white"), images[0][0])).reshape(-1, 3)
    colours = {tuple(pixel) for pixel in drawn.tolist()}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in (TRUE, MATCHED, EXTRA)} <= colours
