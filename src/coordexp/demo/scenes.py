"""Drawn scenes with exact boxes and polygons: up to dozens of coloured shapes on a pale background.

A scene depends on nothing but the seed and its index. Objects are listed in reading order (by top edge, then by
left edge), which is the order that a model learns to write them in. An object that is partly covered keeps its
whole outline. `write_scenes` writes images and records, the same objects as COCO files for other tools, and
questions about the scenes as chat records.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from PIL import Image, ImageDraw

from coordexp.config.settings import ClassRequests, Negatives
from coordexp.data import ChatRecord, GeometryKind, Record, RecordObject, draw_request

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
Naming = Literal["colour-shape", "shape", "colour"]
_OVERSAMPLING = 4  # Shapes are drawn this much larger and scaled down, so that edges can fall between pixels.


@dataclass(frozen=True)
class SceneSettings:
    """The look of the scenes.

    `objects` is the minimum and the maximum number of objects, and `overlap` the share of a box that another one
    may cover. `ask` is the share of scenes that ask for a list of classes: some of those that they show, and in
    half of the lists also absent ones. `names` says what a class is: "red circle", "circle" or "red". The other
    numbers, except `side`, are shares of scenes or objects.
    """

    side: int = 64
    objects: tuple[int, int] = (1, 4)
    empty: float = 0.0
    rare: float = 0.0
    polygons: float = 0.0
    rotated: float = 0.0
    overlap: float = 0.0
    ask: float = 0.0
    names: Naming = "colour-shape"

    def name(self, colour: str, shape: str) -> str:
        return {"colour-shape": f"{colour} {shape}", "shape": shape, "colour": colour}[self.names]

    def classes(self, shapes: Sequence[str] = (*COMMON, *RARE)) -> list[str]:
        """Return the names of all classes with these shapes, sorted."""
        return sorted({self.name(colour, shape) for colour in COLOURS for shape in shapes})


Points = list[tuple[float, float]]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class DrawnScene:
    image: Image.Image
    record: Record


@dataclass(frozen=True)
class _Shape:
    """An object of a scene: its entry in the record, and how it is drawn."""

    record: RecordObject
    outline: Points
    box: Box
    colour: tuple[int, int, int]

    @property
    def reading_order(self) -> tuple[float, float]:
        left, top, _, _ = self.box
        return top, left


def draw_scenes(count: int, settings: SceneSettings, *, seed: int, folder: str) -> Iterator[DrawnScene]:
    """Yield `count` scenes. Their records name the images `folder`/0000000.png and so on."""
    for index in range(count):
        chooser = random.Random(f"{seed} {index}")  # noqa: S311
        yield _draw_scene(chooser, settings, f"{folder}/{index:07d}.png")


def write_scenes(
    folder: Path,
    settings: SceneSettings,
    *,
    train: int,
    val: int,
    seed: int,
    questions: int = 0,
    advance: Callable[[], None] | None = None,
) -> None:
    """Write `train.jsonl`, `val.jsonl`, `*.coco.json` and `images/`, and with `questions`, up to that many about
    each scene to `*.questions.jsonl`. Call `advance` after every scene, if given.

    Training and held-out scenes are drawn with different seeds.
    """
    for part, count, own_seed in (("train", train, 2 * seed), ("val", val, 2 * seed + 1)):
        (folder / "images" / part).mkdir(parents=True)
        records = []
        for scene in draw_scenes(count, settings, seed=own_seed, folder=f"images/{part}"):
            scene.image.save(folder / scene.record.image)
            records.append(_draw_classes(scene.record, settings, f"{own_seed} {scene.record.image}"))
            if advance is not None:
                advance()
        lines = "".join(record.as_json() + "\n" for record in records)
        (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")
        (folder / f"{part}.coco.json").write_bytes(json.dumps(_to_coco(records, settings.classes())).encode())
        if questions:
            chat = [item for record in records for item in _ask_questions(record, questions, own_seed)]
            lines = "".join(record.as_json() + "\n" for record in chat)
            (folder / f"{part}.questions.jsonl").write_text(lines, encoding="utf-8")


def _draw_scene(chooser: random.Random, settings: SceneSettings, path: str) -> DrawnScene:
    side = settings.side
    count = 0 if chooser.random() < settings.empty else chooser.randint(*settings.objects)
    shapes: list[_Shape] = []
    for _ in range(40 * count):
        if len(shapes) == count:
            break
        shape = chooser.choice(RARE if chooser.random() < settings.rare else COMMON)
        colour = chooser.choice(tuple(COLOURS))
        outline = _place_outline(chooser, shape, settings, count)
        box = _bounding_box(outline)
        if all(_overlap(box, other.box) <= settings.overlap for other in shapes):
            kind: GeometryKind = "poly" if chooser.random() < settings.polygons else "bbox_2d"
            coords = tuple(v for point in outline for v in point) if kind == "poly" else box
            record = RecordObject(settings.name(colour, shape), kind, tuple(round(v, 2) for v in coords))
            shapes.append(_Shape(record, outline, box, COLOURS[colour]))
    image = _draw_shapes(chooser, side, shapes)
    ordered = sorted(shapes, key=attrgetter("reading_order"))
    return DrawnScene(image, Record(path, side, side, "pixel", tuple(shape.record for shape in ordered)))


def _draw_classes(record: Record, settings: SceneSettings, seed: str) -> Record:
    """Return the record with a list of classes, if it is to have one. All absent classes are equally likely."""
    chooser = random.Random(seed)  # noqa: S311
    lists, negatives = ClassRequests(rate=settings.ask), Negatives(rate=0.5)
    classes = settings.classes((*COMMON, *RARE) if settings.rare else COMMON)
    every_class = replace(record, objects=tuple(RecordObject(name, "bbox_2d", ()) for name in classes))
    return draw_request(record, chooser, lists, negatives, lambda _: every_class)


def _ask_questions(record: Record, most: int, seed: int) -> list[ChatRecord]:
    """Return up to `most` questions about a scene, each with one right answer: how many shapes there are, the
    colour of a shape that occurs once, and the shape of a colour that occurs once."""
    words = [item.desc.split() for item in record.objects]
    colours, shapes = Counter(colour for colour, _ in words), Counter(shape for _, shape in words)
    pairs = [("How many shapes are there?", str(len(words)))]
    for colour, shape in words:
        if shapes[shape] == 1:
            pairs.append((f"What colour is the {shape}?", colour))
        if colours[colour] == 1:
            pairs.append((f"What shape is {colour}?", shape))
    chooser = random.Random(f"{seed} {record.image} questions")  # noqa: S311
    chosen = chooser.sample(pairs, min(most, len(pairs)))
    return [ChatRecord(*pair, record.image, record.width, record.height) for pair in chosen]


def _place_outline(chooser: random.Random, shape: str, settings: SceneSettings, count: int) -> Points:
    """Return the outline of a shape at a random place inside the image. Shapes are smaller in crowded scenes."""
    side = settings.side
    scale = min(1.0, math.sqrt(5 / max(count, 1)))
    width, height = (chooser.uniform(0.16, 0.4) * side * scale for _ in range(2))
    height = width if chooser.random() < 0.5 else height
    angle = chooser.uniform(0, 2 * math.pi) if chooser.random() < settings.rotated else 0.0
    rotated = [
        (
            x * width / 2 * math.cos(angle) - y * height / 2 * math.sin(angle),
            x * width / 2 * math.sin(angle) + y * height / 2 * math.cos(angle),
        )
        for x, y in OUTLINES[shape]
    ]
    left, top, right, bottom = _bounding_box(rotated)
    x = chooser.uniform(-left, side - right)
    y = chooser.uniform(-top, side - bottom)
    return [(px + x, py + y) for px, py in rotated]


def _draw_shapes(chooser: random.Random, side: int, shapes: Sequence[_Shape]) -> Image.Image:
    background = tuple(chooser.randint(222, 255) for _ in range(3))
    image = Image.new("RGB", (side * _OVERSAMPLING, side * _OVERSAMPLING), background)
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        shade = tuple(min(255, max(0, channel + chooser.randint(-18, 18))) for channel in shape.colour)
        pen.polygon([(x * _OVERSAMPLING, y * _OVERSAMPLING) for x, y in shape.outline], fill=shade)
    return image.resize((side, side), Image.Resampling.BOX)


def _bounding_box(points: Points) -> Box:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return min(xs), min(ys), max(xs), max(ys)


def _overlap(first: Box, second: Box) -> float:
    """Return the intersection of two boxes as a share of the smaller one."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    smaller = min((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second))
    return width * height / smaller


def _regular_polygon(corners: int, inner: float = 1.0) -> Points:
    """Return corners on the unit circle. With `inner`, a star whose inner corners have this radius."""
    count = corners if inner == 1.0 else 2 * corners
    radii = [1.0 if k % 2 == 0 else inner for k in range(count)]
    angles = [2 * math.pi * k / count - math.pi / 2 for k in range(count)]
    return [(radius * math.cos(a), radius * math.sin(a)) for radius, a in zip(radii, angles, strict=True)]


_ARM = 0.34  # half the width of an arm of the cross
OUTLINES: dict[str, Points] = {
    "circle": _regular_polygon(24),
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1), (1, 1), (-1, 1)],
    "star": _regular_polygon(5, 0.45),
    "cross": [
        *[(-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM)],
        *[(_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM)],
    ],
}


def _to_coco(records: Sequence[Record], classes: Sequence[str]) -> dict[str, Any]:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, record in enumerate(records, start=1):
        images.append({"id": number, "file_name": record.image, "width": record.width, "height": record.height})
        for item in record.objects:
            category = classes.index(item.desc) + 1
            annotations.append(_annotation(len(annotations) + 1, number, category, record, item))
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, start=1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _annotation(number: int, image: int, category: int, record: Record, item: RecordObject) -> dict[str, Any]:
    coords = record.in_pixels(item)
    xs, ys = coords[::2], coords[1::2]
    x, y, width, height = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
    ring = list(coords) if item.kind == "poly" else [x, y, x + width, y, x + width, y + height, x, y + height]
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": [x, y, width, height],
        "segmentation": [ring] if item.kind == "poly" else [],
        "area": _area(ring),
        "iscrowd": 0,
    }


def _area(ring: Sequence[float]) -> float:
    xs, ys = ring[::2], ring[1::2]
    edges = zip(xs, ys, [*xs[1:], xs[0]], [*ys[1:], ys[0]], strict=True)
    return abs(sum(x * next_y - next_x * y for x, y, next_x, next_y in edges)) / 2
