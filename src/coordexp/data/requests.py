"""The request of a record: the classes or the expression that it asks for, its question, and the objects that are
the right answer to it, in their order.

Training may draw a request anew in every step, with absent classes on the list (`draw_request`). A draw depends
only on the seeds, the step and the record, so it is the same after a resume.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordexp.config.settings import ClassRequests, Custom, Negatives, ObjectOrder, TrainingData
from coordexp.data.records import Record

# How a prompt says the order, in place of {order}. The other orders have no words.
ORDER_WORDS: dict[ObjectOrder, str] = {
    "reading": "from top to bottom and from left to right",
    "left_to_right": "from left to right",
    "large_first": "from the largest to the smallest",
}
Box = tuple[float, float, float, float]
# What objects are sorted by, for the orders that can be seen in the image.
VISIBLE_ORDERS: dict[ObjectOrder, Callable[[Box], tuple[float, ...]]] = {
    "reading": lambda box: (box[1], box[0]),
    "left_to_right": lambda box: (box[0], box[1]),
    "large_first": lambda box: (-_area(box),),
}
CLASSES, EXPRESSION, ORDER = "{classes}", "{expression}", "{order}"  # fields of prompts
DRAWS = 20  # other records that are looked at for each absent class


@dataclass(frozen=True)
class Questions:
    """The texts of a run or of a set: for a record without a request, with classes, and with an expression."""

    prompt: str
    class_prompt: str
    expression_prompt: str
    object_order: ObjectOrder = "file"

    @classmethod
    def of(cls, custom: Custom, data: TrainingData | None = None) -> "Questions":
        """Return the texts of the run, or those of one of its data sets."""
        names = ("prompt", "class_prompt", "expression_prompt")
        texts = {name: getattr(data, name, None) or getattr(custom, name) for name in names}
        return cls(**texts, object_order=custom.object_order)

    @property
    def of_run(self) -> str:
        """The question of a record without a request of its own."""
        return self._fill(self.prompt)

    def ask(self, record: Record) -> str:
        """Return the question of a record."""
        classes = {} if record.classes is None else {CLASSES: ", ".join(record.classes)}
        expression = {} if record.expression is None else {EXPRESSION: record.expression}
        if record.prompt is not None:
            return self._fill(record.prompt, classes | expression)
        if record.classes is not None:
            return self._fill(self.class_prompt, classes)
        return self._fill(self.prompt if record.expression is None else self.expression_prompt, expression)

    def _fill(self, text: str, values: Mapping[str, str] | None = None) -> str:
        """Replace the fields of a text. What is put in is not searched for fields again."""
        words = ORDER_WORDS.get(self.object_order)
        replacements = dict(values or {}) | ({ORDER: words} if words else {})
        return re.sub("{[a-z]+}", lambda match: replacements.get(match[0], match[0]), text)


def draw_request(
    record: Record,
    draw: random.Random,
    lists: ClassRequests,
    negatives: Negatives,
    other_record: Callable[[random.Random], Record],
) -> Record:
    """Return the record with the list of classes that one training sample asks for. Absent classes come from
    `exhaustive`, if the record has it, and else from other records of the data, which `other_record` draws: a
    frequent class is asked for often."""
    classes = record.classes
    if not record.has_request and draw.random() < lists.rate:
        classes = _choose_present(record, draw, lists.keep)
    if classes is None or draw.random() >= negatives.rate:
        return record if classes is record.classes else replace(record, classes=classes)
    absent = _draw_absent(record, classes, draw, negatives.most, other_record)
    if not absent:
        return replace(record, classes=classes)
    asked = absent if draw.random() < negatives.alone else [*classes, *absent]
    draw.shuffle(asked)
    return replace(record, classes=tuple(asked))


def _choose_present(record: Record, draw: random.Random, keep: float) -> tuple[str, ...] | None:
    """Return some of the classes of a record, at least one of them, or None if it has no object."""
    present = list(dict.fromkeys(item.desc for item in record.objects))
    if not present:
        return None
    chosen = [desc for desc in present if draw.random() < keep] or [draw.choice(present)]
    draw.shuffle(chosen)
    return tuple(chosen)


def _draw_absent(
    record: Record,
    asked: Sequence[str],
    draw: random.Random,
    most: int,
    other_record: Callable[[random.Random], Record],
) -> list[str]:
    """Return 1 to `most` classes that the record certainly does not show, fewer if there are not as many."""
    excluded = {*asked, *(item.desc for item in record.objects)}
    count = draw.randint(1, most)
    if record.exhaustive is not None:
        candidates = [desc for desc in record.exhaustive if desc not in excluded]
        return draw.sample(candidates, min(count, len(candidates)))
    absent: list[str] = []
    for _ in range(count):
        for _ in range(DRAWS):
            descs = [item.desc for item in other_record(draw).objects]
            if descs and (desc := draw.choice(descs)) not in excluded:
                absent.append(desc)
                excluded.add(desc)
                break
    return absent


def order_objects(record: Record, order: ObjectOrder, draw: random.Random) -> Record:
    """Return the record with its objects in this order. Objects that are equal in it keep the order of the
    file."""
    if order == "file" or (order == "asked" and record.classes is None):
        return record
    objects = list(record.objects)
    if order == "random":
        draw.shuffle(objects)
    elif order == "asked":
        places = {desc: place for place, desc in enumerate(record.classes or ())}
        objects.sort(key=lambda item: places.get(item.desc, len(places)))
    else:
        objects.sort(key=lambda item: VISIBLE_ORDERS[order](bounds(record.in_pixels(item))))
    return replace(record, objects=tuple(objects))


def bounds(coords: Sequence[float]) -> Box:
    """Return the bounding box of an object."""
    xs, ys = coords[::2], coords[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
