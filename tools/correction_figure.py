"""Draw the first figure of the README: an answer of a model, and what it is trained on after the correction.

    python tools/correction_figure.py

The answer and the labels are written here. The correction is computed, with the policy of configs/stage2.yaml.
"""

import math
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import yaml

from coordexp.answers.correct import correct
from coordexp.answers.segment import Role
from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.data import Geometry, TrueObject

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs/images/correction.svg"
VOCABULARY = ROOT / "examples/scenes-cpu/model"
POLICY = ROOT / "configs/stage2.yaml"

Box = tuple[int, int, int, int]
LABELS: dict[str, Box] = {"red cup": (90, 330, 360, 760), "blue bowl": (400, 590, 660, 800)}
WRITTEN: tuple[tuple[str, Box], ...] = (
    ("red cup", (80, 350, 340, 775)),
    ("red cup", (125, 300, 400, 715)),
    ("lamp", (705, 130, 930, 770)),
)

INK, FAINT, PAPER, FRAME = "#1f2328", "#8a929b", "#ffffff", "#d1d9e0"
FOUND, MISSED, REPEATED = "#0969da", "#1a7f37", "#cf222e"
WIDTH, HEIGHT, PICTURE, CHARACTER, NUMBER = 1010, 322, 270, 7.25, 34
LEFT, NOTES_LEFT = 326, 822


@dataclass(frozen=True)
class Line:
    """One object of an answer: its text up to its numbers, the numbers, and how it is drawn."""

    text: str
    numbers: tuple[int, ...]
    colour: str
    note: str = ""
    is_removed: bool = False


def write_object(name: str, number: int, box: Box) -> str:
    coordinates = ", ".join(f'"<|coord_{value}|>"' for value in box)
    return f'"object_{number}": {{"desc": "{name}", "bbox_2d": [{coordinates}]}}'


def correct_answer() -> list[Line]:
    """Return the objects of the corrected answer, with the colours of their roles and the targets of their
    coordinates."""
    table = VocabularyTable.from_folder(VOCABULARY)
    policy = yaml.safe_load(POLICY.read_text())["rollout_matching"]["correction"]
    written = ", ".join(write_object(name, k, box) for k, (name, box) in enumerate(WRITTEN, start=1))
    segment = correct(
        [],
        table.encode(f"{{{written}}}".encode()),
        [TrueObject(name, Geometry("bbox_2d", box)) for name, box in LABELS.items()],
        table=table,
        order="desc_first",
        settings=RolloutMatching(correction=policy),
    ).segment
    lines: list[Line] = []
    for id, role, target in zip(segment.ids, segment.roles, segment.coord_targets, strict=True):
        piece = table.pieces[id].decode()
        if piece == "object":
            lines.append(Line('"', (), FAINT if role == Role.masked_prefix else MISSED))
        if not lines:
            continue
        line = lines[-1]
        if not piece.startswith("<|coord_"):
            lines[-1] = line if line.numbers else replace(line, text=line.text + piece)
            continue
        number = int(piece[8:-2]) if math.isnan(target) else round(target)
        colour = FOUND if role == Role.matched_coord else line.colour
        lines[-1] = replace(line, numbers=(*line.numbers, number), colour=colour)
    return [replace(line, text=line.text.removesuffix('"')) for line in lines]


def list_written() -> list[Line]:
    return [
        Line(f'"object_{k}": {{"desc": "{name}", "bbox_2d": [', box, INK)
        for k, (name, box) in enumerate(WRITTEN, start=1)
    ]


def draw_line(line: Line, top: float) -> str:
    """Return an object of an answer at this height. Its coordinates are numbers in frames."""
    left = LEFT + CHARACTER * len(line.text)
    parts = [f'<text x="{LEFT}" y="{top}" fill="{line.colour}" xml:space="preserve">{escape(line.text)}</text>']
    for number in line.numbers:
        parts.append(
            f'<rect x="{left + 2:.1f}" y="{top - 13}" width="{NUMBER - 4}" height="18" rx="4" '
            f'fill="{line.colour}" fill-opacity="0.1" stroke="{line.colour}" stroke-opacity="0.5"/>'
            f'<text x="{left + NUMBER / 2:.1f}" y="{top}" fill="{line.colour}" '
            f'text-anchor="middle">{number}</text>'
        )
        left += NUMBER
    parts.append(f'<text x="{left + 2:.1f}" y="{top}" fill="{line.colour}">]}}</text>')
    if line.is_removed:
        parts.append(f'<path d="M{LEFT} {top - 4}H{left + 18:.1f}" stroke="{line.colour}" stroke-width="1.5"/>')
    parts.append(f'<text class="note" x="{NOTES_LEFT}" y="{top}" fill="{line.colour}">{escape(line.note)}</text>')
    return "".join(parts)


def draw_box(box: Box, colour: str, dashes: str = "none") -> str:
    """Return a rectangle in the picture. The numbers of its box are thousandths of the picture's sides."""
    left, top, right, bottom = (value * PICTURE / 1000 for value in box)
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" fill="none" '
        f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
    )


def draw_picture() -> str:
    """Return a table with a cup, a bowl and a lamp, with the boxes of the answer and the one that it missed."""
    shapes = (
        f'<rect width="{PICTURE}" height="{PICTURE}" rx="8" fill="#f3efe6"/>'
        f'<path d="M0 196H{PICTURE}V262q0 8-8 8H8q-8 0-8-8z" fill="#d9c7a5"/>'
        '<path d="M28 94h48v98q0 12-12 12H40q-12 0-12-12z" fill="#c8453b"/>'
        '<path d="M76 114q18 0 18 26t-18 28" fill="none" stroke="#c8453b" stroke-width="7"/>'
        '<path d="M110 164h66q-2 50-33 50t-33-50z" fill="#3f72af"/>'
        '<path d="M205 40h32l12 58h-56z" fill="#e0b13c"/><path d="M217 98h8v98h-8z" fill="#77706a"/>'
        '<path d="M198 196h46v8h-46z" fill="#77706a"/>'
    )
    found, repeated, unlabelled = (box for _, box in WRITTEN)
    boxes = draw_box(repeated, REPEATED, "2 3") + draw_box(found, FOUND) + draw_box(unlabelled, "#57606a")
    return shapes + boxes + draw_box(LABELS["blue bowl"], MISSED, "6 4")


def draw_figure() -> str:
    """Return the figure as SVG."""
    found, repeated, unlabelled = list_written()
    written = (
        replace(found, note="found"),
        replace(repeated, note="the same cup again", colour=REPEATED, is_removed=True),
        replace(unlabelled, note="has no label"),
    )
    notes = {FOUND: "trained towards its label", MISSED: "missed, so it is added", FAINT: "may be right: no loss"}
    trained = [replace(line, note=notes[line.colour]) for line in correct_answer()]
    rows = [draw_heading("What the model wrote", 44)]
    rows += [draw_line(line, 74 + 28 * k) for k, line in enumerate(written)]
    rows += [draw_heading("What it is trained on", 192)]
    rows += [draw_line(line, 222 + 28 * k) for k, line in enumerate(trained)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" role="img" '
        'aria-label="A model wrote a cup, the same cup again and a lamp, and missed a bowl. '
        'The corrected answer has the lamp, the cup and the bowl.">'
        "<style>.note,.head{font-family:system-ui,sans-serif}.head{font-size:15px;font-weight:600}</style>"
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" '
        f'fill="{PAPER}" stroke="{FRAME}"/>'
        f'<g transform="translate(26 26)">{draw_picture()}</g>{"".join(rows)}</svg>\n'
    )


def draw_heading(text: str, top: int) -> str:
    return f'<text class="head" x="{LEFT}" y="{top}" fill="{INK}">{escape(text)}</text>'


if __name__ == "__main__":
    FIGURE.write_text(draw_figure())
