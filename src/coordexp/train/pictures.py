"""Images of an evaluation, with true and predicted objects, for TensorBoard and Weights & Biases."""

import html
from collections.abc import Sequence

from PIL import Image, ImageDraw

from coordexp.evaluate.comparison import LabelledShape
from coordexp.evaluate.report import ImageReport

Shown = tuple[Image.Image, ImageReport, str]  # an image, what was found in it, and the question

SIDES = (256, 512)  # pixels of the longer side: smaller images are enlarged, larger ones reduced
TRUE, MATCHED, EXTRA = "#1a7f37", "#0969da", "#cf222e"
COLUMNS = ("image", "question", "true", "predicted", "missed", "extra", "answer")

_MARKDOWN = {ord(character): f"&#{ord(character)};" for character in "\\`*_{}[]()#|~"}


def describe_objects(report: ImageReport) -> list[str]:
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


def escape_markdown(text: str) -> str:
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
