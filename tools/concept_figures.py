"""Draw the figures of docs/concepts.md and docs/operations.md, from what the project's own functions compute.

python tools/concept_figures.py
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

import torch
import yaml

from coordexp.answers.correct import Correction, correct
from coordexp.answers.match import match_objects
from coordexp.answers.segment import Role
from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.data import Geometry, TrueObject, to_bin
from coordexp.objective.carry import CarryBuffer
from coordexp.objective.modules import soft_target

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
VOCABULARY = ROOT / "examples/scenes-cpu/model"

INK, FAINT, PAPER, FRAME = "#1f2328", "#6e7781", "#ffffff", "#d1d9e0"
BLUE, GREEN, RED, AMBER, GREY = "#0969da", "#1a7f37", "#cf222e", "#9a6700", "#eaeef2"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
Box = tuple[int, int, int, int]


def text(x: float, y: float, words: str, colour: str = INK, **style: object) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{attributes}>{escape(words)}</text>'


def head(x: float, y: float, words: str) -> str:
    return text(x, y, words, font_size=15, font_weight=600)


def rect(x: float, y: float, width: float, height: float, stroke: str, fill: str = "none", **style: object) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" stroke="{stroke}" fill="{fill}"'
        f"{attributes}/>"
    )


def line(points: str, colour: str = FAINT, **style: object) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<path d="{points}" fill="none" stroke="{colour}"{attributes}/>'


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return an SVG on paper with a frame, which can be read in light and in dark mode."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-size="13" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(title)}">'
        f"{rect(0.5, 0.5, width - 1, height - 1, FRAME, PAPER, rx=10)}{''.join(parts)}</svg>\n"
    )


def write_object(name: str, number: int, box: Box) -> str:
    coordinates = ", ".join(f'"<|coord_{value}|>"' for value in box)
    return f'"object_{number}": {{"desc": "{name}", "bbox_2d": [{coordinates}]}}'


def correct_boxes(
    written: Sequence[tuple[str, Box]], labels: Sequence[tuple[str, Box]], **policy: str
) -> Correction:
    """Return the correction of an answer with these boxes."""
    table = VocabularyTable.from_folder(VOCABULARY)
    answer = ", ".join(write_object(name, k, box) for k, (name, box) in enumerate(written, start=1))
    return correct(
        [],
        table.encode(f"{{{answer}}}".encode()),
        [TrueObject(name, Geometry("bbox_2d", box)) for name, box in labels],
        table=table,
        order="desc_first",
        settings=RolloutMatching(correction=policy),
    )


def draw_coordinate_tokens() -> str:
    """Return an edge of a box, its token, and the target over the neighbouring bins with the settings of
    configs/stage1.yaml."""
    width, edge = 640, 287.4  # pixels
    target = edge / width * 999
    modules = yaml.safe_load((ROOT / "configs/stage1.yaml").read_text())["stage1"]["pipeline"]["objective"]
    (settings,) = (module["config"] for module in modules if module["name"] == "coord_reg")
    shares = soft_target(torch.tensor([target]), settings["target_sigma"], settings["target_truncate"])[0].tolist()
    token = to_bin(edge, width)
    parts = [
        head(28, 38, "An edge of a box"),
        rect(28, 56, 240, 160, FRAME, "#f3efe6", rx=6),
        rect(28 + 240 * edge / width, 92, 84, 84, BLUE, "#ddf4ff", stroke_width=2),
        line(f"M{28 + 240 * edge / width:.1f} 56V228", BLUE, stroke_dasharray="4 3"),
        text(28 + 240 * edge / width, 244, f"x1 = {edge:g} of {width} pixels", BLUE, text_anchor="middle"),
        line("M28 262H268M28 257V267M268 257V267", INK),
        text(28, 284, "bin 0", FAINT),
        text(268, 284, "bin 999", FAINT, text_anchor="end"),
        head(320, 38, "Its token"),
        rect(320, 56, 150, 30, BLUE, "#ddf4ff", rx=6),
        text(395, 76, f"<|coord_{token}|>", BLUE, text_anchor="middle", font_family=MONO),
        text(484, 76, f"{edge:g} / {width} · 999 = {target:.1f}, to the nearest bin", FAINT),
        head(320, 122, "What its loss compares the model with"),
    ]
    bins = range(token - 10, token + 11)
    for k, bin in enumerate(bins):
        height, x = 110 * shares[bin] / max(shares), 326 + 22 * k
        parts.append(rect(x, 252 - height, 16, height, "none", BLUE, fill_opacity=0.75))
        if k % 5 == 0:
            parts.append(text(x + 8, 270, str(bin), FAINT, text_anchor="middle", font_size=11))
    parts += [
        line("M320 252H790", INK),
        text(
            555,
            290,
            "a distribution over neighbouring bins: being one off costs little",
            FAINT,
            text_anchor="middle",
        ),
    ]
    return picture(820, 308, "An edge of a box becomes a bin, a token, and a distribution over bins", parts)


ROLES = {
    Role.masked_prefix: ("kept, no loss", FAINT, "#f6f8fa"),
    Role.matched_coord: ("matched coordinate", BLUE, "#ddf4ff"),
    Role.tail_structure: ("added structure", GREEN, "#dafbe1"),
    Role.tail_desc: ("added name", "#8250df", "#fbefff"),
    Role.tail_coord: ("added coordinate", AMBER, "#fff8c5"),
    Role.end_of_turn: ("end of turn", RED, "#ffebe9"),
}


def draw_token_roles() -> str:
    """Return the tokens of a corrected answer, as the specified policy makes it, in the colours of their roles."""
    written: list[tuple[str, Box]] = [("cup", (12, 8, 111, 108))]
    labels: list[tuple[str, Box]] = [("red cup", (10, 10, 110, 110)), ("dog", (300, 300, 500, 500))]
    segment = correct_boxes(written, labels).segment
    table = VocabularyTable.from_folder(VOCABULARY)
    parts = [head(28, 38, "The model wrote the cup and missed the dog. Every token has one role:")]
    x, y = 28.0, 60
    for id, role, target in zip(segment.ids, segment.roles, segment.coord_targets, strict=True):
        piece = table.pieces[id].decode()
        _, colour, fill = ROLES[Role(role)]
        shown = piece.removeprefix("<|coord_").removesuffix("|>") if "coord_" in piece else piece
        if role == Role.matched_coord and int(shown) != target:
            shown = f"{shown} → {target:g}"
        width = 7.4 * max(1, len(shown)) + 8
        if x + width > 790:
            x, y = 28.0, y + 34
        parts.append(rect(x, y, width, 25, colour, fill, rx=4, stroke_opacity=0.6))
        parts.append(
            text(
                x + width / 2,
                y + 17,
                shown.replace(" ", "\u00a0"),
                colour,
                text_anchor="middle",
                font_family=MONO,
                font_size=12,
            )
        )
        x += width + 3
    y += 58
    left = 28.0
    for name, colour, fill in ROLES.values():
        parts += [rect(left, y - 12, 14, 14, colour, fill, rx=3), text(left + 20, y, name, colour, font_size=12)]
        left += 6.3 * len(name) + 44
    return picture(820, y + 22, "The tokens of a corrected answer and their roles", parts)


def draw_matching() -> str:
    """Return a match of four predictions with four true boxes: the image, and the matrix of overlaps."""
    true: dict[str, Box] = {
        "a": (60, 80, 380, 420),
        "b": (330, 120, 620, 430),
        "c": (640, 560, 940, 930),
        "d": (90, 600, 330, 900),
    }
    predicted: dict[str, Box] = {
        "1": (80, 100, 400, 430),
        "2": (300, 100, 580, 410),
        "3": (560, 450, 860, 830),
        "4": (700, 90, 900, 300),
    }
    settings = RolloutMatching()
    shapes = [[Geometry("bbox_2d", box) for box in boxes.values()] for boxes in (predicted, true)]
    result = match_objects(*shapes, settings)
    parts = [head(28, 38, "Predictions and labels"), head(400, 38, "Mask IoU of every pair")]
    parts.append(rect(28, 56, 300, 270, FRAME, "#f6f8fa", rx=6))
    for boxes, colour, dashes in ((true, GREEN, "6 4"), (predicted, BLUE, "none")):
        for name, (left, top, right, bottom) in boxes.items():
            x, y, width, height = 28 + 0.3 * left, 56 + 0.27 * top, 0.3 * (right - left), 0.27 * (bottom - top)
            parts.append(rect(x, y, width, height, colour, stroke_width=2, stroke_dasharray=dashes))
            corner = (x + 5, y + 16) if boxes is true else (x + width / 2, y + height - 6)
            parts.append(text(*corner, name, colour, font_weight=600))
    for j, name in enumerate(true):
        parts.append(text(470 + 74 * j, 76, f"label {name}", GREEN, text_anchor="middle"))
    for i, name in enumerate(predicted):
        top = 90 + 44 * i
        parts.append(text(404, top + 24, name, BLUE, font_weight=600))
        for j in range(len(true)):
            iou, is_pair = result.iou[i, j], (i, j) in result.pairs
            colour = GREEN if is_pair else RED if 0 < iou < settings.maskiou_gate else FAINT
            fill = "#dafbe1" if is_pair else PAPER
            parts.append(
                rect(
                    436 + 74 * j,
                    top,
                    68,
                    36,
                    colour if is_pair else FRAME,
                    fill,
                    rx=4,
                    stroke_width=2 if is_pair else 1,
                )
            )
            parts.append(text(470 + 74 * j, top + 23, f"{iou:.2f}" if iou else "0", colour, text_anchor="middle"))
    names = [list(predicted), list(true)]
    pairs = ", ".join(f"{names[0][i]} with {names[1][j]}" for i, j in result.pairs)
    missed = ", ".join(names[1][j] for j in result.missed)
    extra = ", ".join(names[0][i] for i in result.false_positives)
    parts += [
        text(400, 290, f"matched: {pairs}", GREEN),
        text(400, 309, f"below the gate of {settings.maskiou_gate:g}, so no pair: red", RED),
        text(400, 328, f"missed: {missed}, extra: {extra}", INK),
    ]
    return picture(760, 346, "Predictions are matched with labels one to one by mask IoU", parts)


def draw_policies() -> str:
    """Return one answer and what four policies make of it."""
    labels: list[tuple[str, Box]] = [
        ("cup", (0, 0, 100, 100)),
        ("dog", (300, 300, 400, 400)),
        ("cat", (600, 600, 700, 700)),
    ]
    written: list[tuple[str, Box]] = [
        *(("cat", (600, 600, 700, 700)), ("cup", (0, 0, 100, 100))),
        *(("cup again", (5, 5, 105, 105)), ("lamp", (800, 400, 900, 500))),
    ]
    policies = {
        "the defaults": {},
        "duplicates: remove": {"duplicates": "remove"},
        "+ insertion: in_order": {"duplicates": "remove", "insertion": "in_order"},
        "+ extras: remove": {"duplicates": "remove", "insertion": "in_order", "extras": "remove"},
    }
    parts = [
        head(28, 38, "The model wrote"),
        *draw_chips(200, 22, [(name, INK) for name, _ in written]),
        text(640, 38, "labels: cup, dog, cat", FAINT),
        line("M28 58H790", FRAME),
    ]
    known = {name for name, _ in labels}
    for k, (title, policy) in enumerate(policies.items()):
        top = 72 + 38 * k
        correction = correct_boxes(written, labels, **policy)
        if correction.rebuilt is None:
            names = [name for name, _ in written] + [labels[j][0] for j in correction.match.missed]
        else:
            names = [item.desc for item in correction.rebuilt.items]
        missed = {labels[j][0] for j in correction.match.missed}
        colours = [GREEN if name in missed else BLUE if name in known else FAINT for name in names]
        parts.append(text(28, top + 17, title, font_family=MONO, font_size=12))
        parts += draw_chips(200, top, list(zip(names, colours, strict=True)))
    parts += [
        text(28, 246, "blue: found", BLUE, font_size=12),
        text(120, 246, "green: missed, so it is added", GREEN, font_size=12),
        text(310, 246, "grey: no label, no loss", FAINT, font_size=12),
    ]
    return picture(820, 262, "One answer under four correction policies", parts)


def draw_chips(left: float, top: float, names: Sequence[tuple[str, str]]) -> Iterator[str]:
    for name, colour in names:
        width = 7.5 * len(name) + 20
        yield rect(left, top, width, 25, colour, PAPER, rx=12)
        yield text(left + width / 2, top + 17, name, colour, text_anchor="middle")
        left += width + 8


LENGTHS = (310, 120, 540, 260, 90, 430, 180, 350, 700, 150, 240, 400, 110, 330)


def draw_packing() -> str:
    """Return the same segments as a padded batch and as packed rows, with those that wait for the next row."""
    capacity, scale = 1024, 0.32
    buffer: CarryBuffer[range] = CarryBuffer(capacity, limit=len(LENGTHS))
    for length in LENGTHS:
        buffer.add(range(length))
    rows = [[len(item) for item in buffer.draw().items] for _ in range(3)]
    waiting = [len(item) for item, _ in buffer.waiting]
    batches = [LENGTHS[k : k + 4] for k in range(0, len(LENGTHS), 4)]
    padded = sum(max(batch) * len(batch) for batch in batches)
    parts = [
        head(28, 38, "Padded batches of four"),
        text(28, 60, f"{sum(LENGTHS) / padded:.0%} of {padded:,} tokens are used", FAINT),
        head(400, 38, f"Packed rows of {capacity:,} tokens"),
        text(400, 60, f"filled by {', '.join(f'{sum(row) / capacity:.1%}' for row in rows)}", FAINT),
    ]
    y = 76.0
    for batch in batches:
        for length in batch:
            parts.append(rect(28, y, scale * max(batch), 11, FRAME, GREY))
            parts.append(rect(28, y, scale * length, 11, PAPER, BLUE, fill_opacity=0.75))
            y += 13
        y += 8
    for k, row in enumerate([*rows, waiting]):
        x, top, fill = 400.0, 76 + 40 * k + (26 if row is waiting else 0), PAPER if row is waiting else BLUE
        if row is waiting:
            parts.append(text(400, top - 8, "wait in the carry buffer for the next rows:", FAINT))
        else:
            parts.append(rect(x, top, scale * capacity, 26, FRAME, GREY))
        for length in row:
            stroke, ink = (BLUE, BLUE) if row is waiting else (PAPER, PAPER)
            parts.append(rect(x, top, scale * length, 26, stroke, fill, fill_opacity=0.75, stroke_width=1.5))
            parts.append(
                text(x + scale * length / 2, top + 17, str(length), ink, text_anchor="middle", font_size=11)
            )
            x += scale * length + (4 if row is waiting else 0)
    return picture(800, round(y) + 12, "Padded batches waste tokens; packed rows do not", parts)


def draw_weight_sync() -> str:
    """Return two time lines: rollouts before each step, and rollouts ahead of time."""
    parts: list[str] = [
        "<defs>",
        *(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
            for name, colour in (("m", FAINT), ("n", BLUE))
        ),
        "</defs>",
    ]
    # By staleness: where the answers of a step begin, how far the next ones are, and the versions that wrote them.
    for top, staleness, stride, versions in ((20, 0, 344, (0, 1)), (186, 1, 172, (0, 0, 1))):
        parts += [head(28, top + 18, f"stage2.max_staleness: {staleness}")]
        parts += [text(28, top + 54, "learner"), text(28, top + 118, "engine")]
        for step, version in enumerate(versions):
            left = 100 + stride * step
            parts.append(rect(left, top + 98, 150, 30, GREEN, "#dafbe1", rx=5))
            words = f"step {step}, version {version}"
            parts.append(text(left + 75, top + 118, words, GREEN, text_anchor="middle"))
            if staleness and step == 2:
                break
            parts.append(rect(left + 172, top + 34, 150, 30, AMBER, "#fff8c5", rx=5))
            parts.append(text(left + 247, top + 54, f"trains step {step}", AMBER, text_anchor="middle"))
            parts.append(line(f"M{left + 150} {top + 104}L{left + 172} {top + 60}", FAINT, marker_end="url(#m)"))
            if staleness or not step:
                start, end = (left + 180, left + 190) if staleness else (left + 322, left + 344)
                parts.append(
                    line(f"M{start} {top + 64}L{end} {top + 98}", BLUE, stroke_width=2, marker_end="url(#n)")
                )
                parts.append(text(end + 4, top + 84, f"weights, version {versions[step + 1]}", BLUE, font_size=12))
    note = "Version N: the weights after N updates. A sync brings all or nothing. Every answer has its version."
    parts.append(text(28, 340, note, FAINT))
    return picture(820, 358, "When weights are sent, and when answers are made", parts)


FIGURES: dict[str, Callable[[], str]] = {
    "coordinate-tokens": draw_coordinate_tokens,
    "token-roles": draw_token_roles,
    "matching": draw_matching,
    "correction-policies": draw_policies,
    "packing": draw_packing,
    "weight-sync": draw_weight_sync,
}


if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (IMAGES / f"concept-{name}.svg").write_text(draw())
