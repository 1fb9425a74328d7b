"""The worst images, each as a card: a thumbnail with its objects drawn over it, the numbers and the raw answer.

Four kinds of outlines differ in dashes as well as in colour: matched, the true shape of a match, missed and extra.
An image that cannot be read leaves its place empty and says so.
"""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from PIL import ImageOps

from coordexp.data import Record
from coordexp.data.images import opened_image
from coordexp.evaluate.report import ImageReport
from coordexp.evaluate.scene import Labelled

SIDE = 480  # pixels of a thumbnail, at most
TALLEST = 380  # of a picture on the page, so that an upright one does not take two rows
LABELS = 12  # errors up to which each is named in the picture; the others in tooltips only


def worst_images(images: Sequence[ImageReport], most: int) -> list[ImageReport]:
    """Those that are among the lowest by F1 or among the highest by errors; the lowest F1 first."""
    wrong = [image for image in images if image.errors or image.scene.answer.truncated]
    by_f1 = sorted(wrong, key=lambda image: (_f1(image), -image.errors))
    by_errors = sorted(wrong, key=lambda image: (-image.errors, _f1(image)))
    ranks = {id(image): rank for rank, image in enumerate(by_errors)}
    chosen = sorted(enumerate(by_f1), key=lambda each: min(each[0], ranks[id(each[1])]))[:most]
    return [image for _, image in sorted(chosen, key=lambda each: each[0])]


def card(image: ImageReport, folder: Path) -> str:
    counts = f"{len(image.pairs)} matched, {len(image.missed)} missed, {len(image.extra)} extra"
    counts += f", {image.invalid} invalid" if image.invalid else ""
    flags = " ".join(name for name, wanted in _flags(image).items() if wanted)
    return f"""<article class="card" data-flags="{flags}" data-f1="{_f1(image):.6f}" data-errors="{image.errors}">
{_picture(image, folder)}
<h3>{escape(image.scene.record.image)} <small>image_id {image.scene.image_id}</small></h3>
<p><b>F1 {_f1(image):.2f}</b> &middot; {counts}</p>
{_answer(image)}
</article>"""


def _picture(image: ImageReport, folder: Path) -> str:
    record = image.scene.record
    width, height = _shown_size(record)
    source, remark = _thumbnail(folder / record.image, record, (width, height))
    inner = f'<img alt="" src="{source}" width="{width}" height="{height}">' if source else ""
    inner += overlay(image, (width, height))
    below = f'<p class="remark">{escape(remark)}</p>' if remark else ""
    most = round(width * min(1.0, TALLEST / height))
    return f'<div class="picture" style="max-width:{most}px;aspect-ratio:{width}/{height}">{inner}</div>{below}'


def _answer(image: ImageReport) -> str:
    answer = image.scene.answer
    reasons = ", ".join(one.reason for one in answer.objects if one.reason is not None)
    ended = f"{answer.tokens} tokens, ended by {answer.finish_reason}" + (
        f"; invalid: {reasons}" if reasons else ""
    )
    summary = f"<summary>Raw answer <small>{escape(ended)}</small></summary>"
    return f"<details>{summary}<pre>{escape(answer.text)}</pre></details>"


def overlay(image: ImageReport, size: tuple[int, int]) -> str:
    """Matches first, so that errors are drawn over them."""
    scene, labelled = image.scene, image.tally.errors <= LABELS
    scale = size[0] / scene.record.width, size[1] / scene.record.height
    parts = []
    for i, j in image.pairs:
        parts.append(_outline("true", scene.true[j], scale))
        parts.append(_outline("matched", scene.found[i], scale))
    wrong = [("missed", scene.true[j]) for j in image.missed] + [("extra", scene.found[i]) for i in image.extra]
    for kind, one in wrong:
        parts.append(_outline(kind, one, scale, _label(kind, one, scale, size[0]) if labelled else ""))
    return f'<svg class="overlay" viewBox="0 0 {size[0]} {size[1]}">{"".join(parts)}</svg>'


def _outline(kind: str, one: Labelled, scale: tuple[float, float], label: str = "") -> str:
    numbers = [value * scale[k % 2] for k, value in enumerate(one.shape.ring)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(numbers[::2], numbers[1::2], strict=True))
    score = "" if one.score is None else f" {one.score:.2f}"
    name = escape(f"{kind}: {one.desc}{score}")
    shapes = f'<polygon class="halo" points="{points}"/><polygon points="{points}"/>'
    return f'<g class="{kind}"><title>{name}</title>{shapes}{label}</g>'


def _label(kind: str, one: Labelled, scale: tuple[float, float], width: int) -> str:
    """`- cat` over a missed one, `+ cat` inside of an extra one, so that two in one place can be read."""
    x1, y1, x2, y2 = one.shape.box
    y = max(12.0, (y1 if kind == "missed" else y2) * scale[1] - 4)
    at_right = x1 * scale[0] > width * 0.6
    x, anchor = (x2 * scale[0] - 3, "end") if at_right else (x1 * scale[0] + 3, "start")
    text = one.desc if len(one.desc) <= 24 else one.desc[:22] + "..."
    sign = "-" if kind == "missed" else "+"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(f"{sign} {text}")}</text>'


def _flags(image: ImageReport) -> dict[str, bool]:
    return {
        "misses": bool(image.missed),
        "extras": bool(image.extra),
        "invalid": bool(image.invalid),
        "truncated": image.scene.answer.truncated,
    }


def _f1(image: ImageReport) -> float:
    """An empty image with an empty answer is right."""
    return 1.0 if image.tally.f1 is None else image.tally.f1


def _shown_size(record: Record) -> tuple[int, int]:
    scale = min(1.0, SIDE / max(record.width, record.height))
    return max(1, round(record.width * scale)), max(1, round(record.height * scale))


def _thumbnail(path: Path, record: Record, size: tuple[int, int]) -> tuple[str, str]:
    """The image as a data address, and what is to be remarked about it."""
    try:
        with opened_image(path) as opened:
            turned = ImageOps.exif_transpose(opened)
            found = turned.size
            picture = turned.convert("RGB").resize(size)
    except OSError as error:
        return "", f"image not shown: {error.strerror or error}"
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    remark = "" if found == (record.width, record.height) else _other_size(found, record)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}", remark


def _other_size(found: tuple[int, int], record: Record) -> str:
    return f"the file is {found[0]} x {found[1]}, its record says {record.width} x {record.height}"
