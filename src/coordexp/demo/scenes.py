"""Drawn scenes with exact boxes and polygons: coloured shapes on a pale ground, from none to dozens.

Everything follows from one seed. Objects are listed in reading order (by top edge, then left edge), which is the
order that a model is taught to write them in. An object that others cover keeps its whole outline.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

from coordexp.data import GeometryKind, Record, RecordObject

COLOURS = {
    "red": (214, 48, 49),
    "green": (39, 174, 96),
    "blue": (41, 98, 255),
    "yellow": (241, 196, 15),
    "purple": (142, 68, 173),
    "orange": (230, 126, 34),
}
COMMON = ("circle", "square", "triangle")
RARE = ("star", "cross")
_SMOOTH = 4  # shapes are drawn this much larger and scaled down, so that edges fall between pixels


@dataclass(frozen=True)
class SceneSettings:
    """`objects` is the least and the most of them, `overlap` the share of a box that others may cover."""

    side: int = 64
    objects: tuple[int, int] = (1, 4)
    empty: float = 0.0
    rare: float = 0.0
    polygons: float = 0.0
    rotated: float = 0.0
    overlap: float = 0.0


Points = list[tuple[float, float]]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Scene:
    image: Image.Image
    record: Record


def scenes(count: int, settings: SceneSettings, *, seed: int, folder: str) -> Iterator[Scene]:
    """`count` scenes whose images are to be saved as `folder`/0000000.png and so on."""
    for index in range(count):
        chooser = random.Random(f"{seed} {index}")  # noqa: S311
        yield draw(chooser, settings, f"{folder}/{index:07d}.png")


def draw(chooser: random.Random, settings: SceneSettings, path: str) -> Scene:
    side = settings.side
    wanted = 0 if chooser.random() < settings.empty else chooser.randint(*settings.objects)
    placed: list[tuple[RecordObject, Points, tuple[int, int, int], Box]] = []
    for _ in range(40 * wanted):
        if len(placed) == wanted:
            break
        shape = chooser.choice(RARE if chooser.random() < settings.rare else COMMON)
        colour = chooser.choice(tuple(COLOURS))
        outline = _placed(chooser, shape, settings, wanted)
        box = _box(outline)
        if all(_covered(box, other) <= settings.overlap for *_, other in placed):
            kind: GeometryKind = "poly" if chooser.random() < settings.polygons else "bbox_2d"
            coords = tuple(v for point in outline for v in point) if kind == "poly" else box
            found = RecordObject(f"{colour} {shape}", kind, tuple(round(v, 2) for v in coords))
            placed.append((found, outline, COLOURS[colour], box))
    image = _drawn(chooser, side, [(outline, colour) for _, outline, colour, _ in placed])
    ordered = sorted(placed, key=lambda each: (each[3][1], each[3][0]))
    return Scene(image, Record(path, side, side, "pixel", tuple(found for found, *_ in ordered)))


def _placed(chooser: random.Random, shape: str, settings: SceneSettings, count: int) -> Points:
    """An outline somewhere inside of the picture; smaller where there are to be many."""
    side = settings.side
    scale = min(1.0, math.sqrt(5 / max(count, 1)))
    width, height = (chooser.uniform(0.16, 0.4) * side * scale for _ in range(2))
    height = width if chooser.random() < 0.5 else height
    angle = chooser.uniform(0, 2 * math.pi) if chooser.random() < settings.rotated else 0.0
    turned = [
        (
            x * width / 2 * math.cos(angle) - y * height / 2 * math.sin(angle),
            x * width / 2 * math.sin(angle) + y * height / 2 * math.cos(angle),
        )
        for x, y in OUTLINES[shape]
    ]
    left, top, right, bottom = _box(turned)
    x = chooser.uniform(-left, side - right)
    y = chooser.uniform(-top, side - bottom)
    return [(px + x, py + y) for px, py in turned]


def _drawn(chooser: random.Random, side: int, shapes: list[tuple[Points, tuple[int, int, int]]]) -> Image.Image:
    ground = tuple(chooser.randint(222, 255) for _ in range(3))
    image = Image.new("RGB", (side * _SMOOTH, side * _SMOOTH), ground)
    pen = ImageDraw.Draw(image)
    for outline, colour in shapes:
        shade = tuple(min(255, max(0, channel + chooser.randint(-18, 18))) for channel in colour)
        pen.polygon([(x * _SMOOTH, y * _SMOOTH) for x, y in outline], fill=shade)
    return image.resize((side, side), Image.Resampling.BOX)


def _box(points: Points) -> Box:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return min(xs), min(ys), max(xs), max(ys)


def _covered(one: Box, other: Box) -> float:
    """The larger share of either box that lies in both."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    smaller = min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return width * height / smaller


def _regular(corners: int, inner: float = 1.0) -> Points:
    """Corners on the unit circle; with `inner`, every other one pulled in, as in a star."""
    count = corners if inner == 1.0 else 2 * corners
    radii = [1.0 if k % 2 == 0 else inner for k in range(count)]
    turn = [2 * math.pi * k / count - math.pi / 2 for k in range(count)]
    return [(radius * math.cos(a), radius * math.sin(a)) for radius, a in zip(radii, turn, strict=True)]


_A = 0.34
OUTLINES: dict[str, Points] = {
    "circle": _regular(24),
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1), (1, 1), (-1, 1)],
    "star": _regular(5, 0.45),
    "cross": [
        *[(-_A, -1), (_A, -1), (_A, -_A), (1, -_A), (1, _A), (_A, _A)],
        *[(_A, 1), (-_A, 1), (-_A, _A), (-1, _A), (-1, -_A), (-_A, -_A)],
    ],
}
