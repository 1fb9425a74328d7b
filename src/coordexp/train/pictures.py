"""Some images of every evaluation in TensorBoard and Weights & Biases, with true and predicted objects.

They are always the same images, evenly spaced over those that are evaluated, so that steps can be compared.
"""

import html
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from transformers import TrainerCallback
from transformers.integrations import WandbCallback

from coordexp.data import DataError
from coordexp.evaluate.comparison import LabelledShape
from coordexp.evaluate.report import ImageReport
from coordexp.files import BestEffort
from coordexp.rollout.prompt import read_image
from coordexp.train.callbacks import TensorBoard, say

SIDES = (256, 512)  # pixels of the longer side: smaller images are enlarged, larger ones reduced
TRUE, MATCHED, EXTRA = "#1a7f37", "#0969da", "#cf222e"
COLUMNS = ("image", "question", "true", "predicted", "missed", "extra", "answer")


_MARKDOWN = {ord(character): f"&#{ord(character)};" for character in "\\`*_{}[]()#|~"}


class EvaluationPictures(TrainerCallback):
    """Shows at most `most` images of an evaluation in the trackers of the run. `add` is called with all images
    before transformers calls `on_evaluate`."""

    def __init__(self, most: int) -> None:
        self.most, self.trackers = most, list[TrainerCallback]()
        self._images: list[tuple[ImageReport, Path, str]] = []
        self._writes = BestEffort("images of an evaluation", say)

    def add(self, images: Sequence[tuple[ImageReport, Path, str]]) -> None:
        """Keep the images that are shown: each with its file and its question."""
        count = min(self.most, len(images))
        self._images = [images[k * len(images) // count] for k in range(count)]

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        shown = {TensorBoard: _write_to_tensorboard, WandbCallback: _write_to_wandb}
        for tracker in self.trackers if state.is_world_process_zero and self._images else ():
            for kind, write in shown.items():
                if isinstance(tracker, kind):
                    self._writes.attempt(partial(_write, write, tracker, self._images, state.global_step))
        self._images = []


Shown = tuple[Image.Image, ImageReport, str]


def _write(
    write: Callable[[Any, Sequence[Shown], int], None],
    tracker: TrainerCallback,
    images: Sequence[tuple[ImageReport, Path, str]],
    step: int,
) -> None:
    shown = []
    for report, path, question in images:
        try:
            shown.append((read_image(str(path), str(path)), report, question))
        except DataError:  # the evaluation has counted it
            continue
    write(tracker, shown, step)


def _write_to_tensorboard(tracker: TensorBoard, images: Sequence[Shown], step: int) -> None:
    writer = tracker.tb_writer
    if writer is None:
        return
    rows = []
    for number, (image, report, question) in enumerate(images):
        drawn = np.asarray(draw_objects(image, report))
        writer.add_image(f"evaluation/{number}", drawn, step, dataformats="HWC")
        cells = [f"evaluation/{number}", question, *describe(report)]
        rows.append(" | ".join(_escape_markdown(cell) for cell in cells))
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS), *rows]
    writer.add_text("evaluation", "\n".join(lines), step)
    writer.flush()


def _write_to_wandb(tracker: WandbCallback, images: Sequence[Shown], step: int) -> None:
    import wandb

    pictures, rows = [], []
    for image, report, question in images:
        scaled = _scale(image)
        sides = {"truth": report.comparison.true, "predictions": report.comparison.predicted}
        scale = scaled.width / report.comparison.record.width
        boxes = {name: _to_wandb_boxes(items, scale) for name, items in sides.items()}
        pictures.append(wandb.Image(scaled, boxes=boxes, caption=question))
        rows.append([pictures[-1], question, *describe(report)])
    table = wandb.Table(columns=list(COLUMNS), data=rows)
    wandb.log({"eval/images": pictures, "eval/answers": table, "train/global_step": step})


def _to_wandb_boxes(items: Sequence[LabelledShape], scale: float) -> dict[str, Any]:
    names = sorted({item.desc for item in items})
    data = []
    for item in items:
        x1, y1, x2, y2 = (value * scale for value in item.shape.box)
        data.append(
            {
                "position": {"minX": x1, "minY": y1, "maxX": x2, "maxY": y2},
                "domain": "pixel",
                "class_id": names.index(item.desc),
                "box_caption": item.desc,
                **({} if item.score is None else {"scores": {"score": item.score}}),
            }
        )
    return {"box_data": data, "class_labels": dict(enumerate(names))}


def describe(report: ImageReport) -> list[str]:
    """Return the objects of an image and the text of the answer, as the table has them."""
    true, predicted = report.comparison.true, report.comparison.predicted
    return [
        _join(true),
        _join(predicted),
        _join([true[j] for j in report.missed_objects]),
        _join([predicted[i] for i in report.false_positives]),
        report.comparison.answer.text,
    ]


def _join(items: Sequence[LabelledShape]) -> str:
    return ", ".join(item.desc for item in items)


def _escape_markdown(text: str) -> str:
    """Return the text for a cell of a table. An answer may contain anything."""
    return " ".join(html.escape(text).translate(_MARKDOWN).split())


def draw_objects(image: Image.Image, report: ImageReport) -> Image.Image:
    """Return a copy of the image with its true objects in wide lines, and on them the predicted ones."""
    scaled, comparison = _scale(image), report.comparison
    scale = scaled.width / comparison.record.width
    pen, extra = ImageDraw.Draw(scaled), set(report.false_positives)
    groups = [
        (TRUE, comparison.true),
        (MATCHED, [item for i, item in enumerate(comparison.predicted) if i not in extra]),
        (EXTRA, [item for i, item in enumerate(comparison.predicted) if i in extra]),
    ]
    for colour, items in groups:
        for item in items:
            points = [value * scale for value in item.shape.ring]
            pen.polygon(points, outline=colour, width=5 if colour == TRUE else 2)
            if colour != TRUE:
                left, top = item.shape.box[0] * scale, item.shape.box[1] * scale
                pen.text((left + 3, top + 2), item.desc, fill=colour)
    return scaled


def _scale(image: Image.Image) -> Image.Image:
    least, most = SIDES
    side = max(image.size)
    factor = min(most, max(least, side)) / side
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.NEAREST)
