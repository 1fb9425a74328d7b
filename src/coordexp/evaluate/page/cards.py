"""The worst images, each as a card: a thumbnail with the objects drawn over it, the numbers and the raw answer.

Four kinds of outlines differ in dashes as well as in colour: matched, the true shape of a match, missed and extra.
If an image cannot be read, its place stays empty and a remark says why.
"""

import base64
import io
from collections.abc import Sequence
from html import escape
from operator import itemgetter
from pathlib import Path

from PIL import ImageOps

from coordexp.data import Record
from coordexp.data.images import open_image_file
from coordexp.evaluate.comparison import LabelledShape
from coordexp.evaluate.report import ImageReport

SIDE = 480  # pixels of a thumbnail, at most
MAX_HEIGHT = 380  # of an image on the page, so that an upright one does not take two rows
MAX_LABELS = 12  # errors up to which each has its name in the image; otherwise names are in tooltips only


def choose_worst_images(images: Sequence[ImageReport], most: int) -> list[ImageReport]:
    """Return the images with the lowest F1 and those with the most errors, ordered by F1."""
    wrong = [image for image in images if image.errors or image.comparison.answer.is_truncated]
    by_f1 = sorted(wrong, key=lambda image: (_f1(image), -image.errors))
    by_errors = sorted(wrong, key=lambda image: (-image.errors, _f1(image)))
    ranks = {id(image): rank for rank, image in enumerate(by_errors)}
    chosen = sorted(enumerate(by_f1), key=lambda item: min(item[0], ranks[id(item[1])]))[:most]
    return [image for _, image in sorted(chosen, key=itemgetter(0))]


def render_card(image: ImageReport, folder: Path) -> str:
    counts = f"{len(image.pairs)} matched, {len(image.missed_objects)} missed, {len(image.false_positives)} extra"
    counts += f", {image.invalid} invalid" if image.invalid else ""
    flags = " ".join(name for name, applies in _flags(image).items() if applies)
    return f"""<article class="card" data-flags="{flags}" data-f1="{_f1(image):.6f}" data-errors="{image.errors}">
{_render_image(image, folder)}
<h3>{escape(image.comparison.record.image)} <small>image_id {image.comparison.image_id}</small></h3>
<p><b>F1 {_f1(image):.2f}</b> &middot; {counts}</p>
{_render_answer(image)}
</article>"""


def _render_image(image: ImageReport, folder: Path) -> str:
    record = image.comparison.record
    width, height = _size_on_page(record)
    source, remark = _make_thumbnail(folder / record.image, record, (width, height))
    inner = f'<img alt="" src="{source}" width="{width}" height="{height}">' if source else ""
    inner += draw_overlay(image, (width, height))
    below = f'<p class="remark">{escape(remark)}</p>' if remark else ""
    most = round(width * min(1.0, MAX_HEIGHT / height))
    return f'<div class="picture" style="max-width:{most}px;aspect-ratio:{width}/{height}">{inner}</div>{below}'


def _render_answer(image: ImageReport) -> str:
    answer = image.comparison.answer
    reasons = ", ".join(obj.reason for obj in answer.objects if obj.reason is not None)
    ended = f"{answer.tokens} tokens, ended by {answer.finish_reason}"
    ended += f"; invalid: {reasons}" if reasons else ""
    ended += f"; dropped as duplicates: {len(answer.dropped)}" if answer.dropped else ""
    summary = f"<summary>Raw answer <small>{escape(ended)}</small></summary>"
    return f"<details>{summary}<pre>{escape(answer.text)}</pre></details>"


def draw_overlay(image: ImageReport, size: tuple[int, int]) -> str:
    """Draw the matches first, so that errors are drawn over them."""
    scene, labelled = image.comparison, image.counts.errors <= MAX_LABELS
    scale = size[0] / scene.record.width, size[1] / scene.record.height
    parts = []
    for i, j in image.pairs:
        parts.append(_draw_outline("true", scene.true[j], scale))
        parts.append(_draw_outline("matched", scene.predicted[i], scale))
    wrong = [("missed", scene.true[j]) for j in image.missed_objects] + [
        ("extra", scene.predicted[i]) for i in image.false_positives
    ]
    for kind, obj in wrong:
        parts.append(_draw_outline(kind, obj, scale, _draw_label(kind, obj, scale, size[0]) if labelled else ""))
    return f'<svg class="overlay" viewBox="0 0 {size[0]} {size[1]}">{"".join(parts)}</svg>'


def _draw_outline(kind: str, obj: LabelledShape, scale: tuple[float, float], label: str = "") -> str:
    numbers = [value * scale[k % 2] for k, value in enumerate(obj.shape.ring)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(numbers[::2], numbers[1::2], strict=True))
    score = "" if obj.score is None else f" {obj.score:.2f}"
    name = escape(f"{kind}: {obj.desc}{score}")
    shapes = f'<polygon class="halo" points="{points}"/><polygon points="{points}"/>'
    return f'<g class="{kind}"><title>{name}</title>{shapes}{label}</g>'


def _draw_label(kind: str, obj: LabelledShape, scale: tuple[float, float], width: int) -> str:
    """Write `- cat` above a missed object and `+ cat` inside an extra one, so that both can be read in one
    place."""
    x1, y1, x2, y2 = obj.shape.box
    y = max(12.0, (y1 if kind == "missed" else y2) * scale[1] - 4)
    at_right = x1 * scale[0] > width * 0.6
    x, anchor = (x2 * scale[0] - 3, "end") if at_right else (x1 * scale[0] + 3, "start")
    text = obj.desc if len(obj.desc) <= 24 else obj.desc[:22] + "..."
    sign = "-" if kind == "missed" else "+"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(f"{sign} {text}")}</text>'


def _flags(image: ImageReport) -> dict[str, bool]:
    return {
        "misses": bool(image.missed_objects),
        "extras": bool(image.false_positives),
        "invalid": bool(image.invalid),
        "truncated": image.comparison.answer.is_truncated,
    }


def _f1(image: ImageReport) -> float:
    """Return 1 for an image without objects and without predictions: it is right."""
    return 1.0 if image.counts.f1 is None else image.counts.f1


def _size_on_page(record: Record) -> tuple[int, int]:
    scale = min(1.0, SIDE / max(record.width, record.height))
    return max(1, round(record.width * scale)), max(1, round(record.height * scale))


def _make_thumbnail(path: Path, record: Record, size: tuple[int, int]) -> tuple[str, str]:
    """Return a data URL of the image, empty if it cannot be read, and a remark, empty if all is well."""
    try:
        with open_image_file(path) as opened:
            upright = ImageOps.exif_transpose(opened)
            file_size = upright.size
            image = upright.convert("RGB").resize(size)
    except OSError as error:
        return "", f"image not shown: {error.strerror or error}"
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    remark = ""
    if file_size != (record.width, record.height):
        remark = (
            f"the file is {file_size[0]} x {file_size[1]}, but its record says {record.width} x {record.height}"
        )
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}", remark
