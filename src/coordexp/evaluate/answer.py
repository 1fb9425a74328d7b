"""What a model said to an image, and the detections that come of it. Values read from JSON are checked here.

An `Answer` holds all objects of the text, also those that the parser refused, in bins; a `Detection` is a valid
one in pixels, as COCO tools take it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordexp.correction import PredictedObject
from coordexp.data import BINS, GeometryKind, Record, degenerate, to_pixels
from coordexp.data.records import KINDS
from coordexp.data.sample import COUNT_RULE, count_fits

NO_IMAGE = "image_unreadable"


@dataclass(frozen=True, slots=True)
class AnswerObject:
    """One object of an answer; valid when `reason` is None. `bins` as in `Geometry`; `score` is a confidence."""

    desc: str | None
    kind: GeometryKind | None
    bins: tuple[int, ...] | None
    score: float | None
    reason: str | None

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"score {self.score} is not a finite number")
        if self.reason is not None:
            return
        if self.desc is None or self.kind is None or self.bins is None:
            raise ValueError("an object without desc, kind or bins needs a reason")
        if not count_fits(self.kind, len(self.bins)):
            raise ValueError(f"{self.kind} has {len(self.bins)} bins; {COUNT_RULE}")
        if not all(0 <= bin < BINS for bin in self.bins) or degenerate(self.kind, self.bins):
            raise ValueError(f"{self.kind} {self.bins} has no area, or leaves the bins 0 to {BINS - 1}")

    @classmethod
    def of(cls, found: PredictedObject, score: float | None) -> "AnswerObject":
        """An object as the parser gives it."""
        kind, bins = found.geometry or (None, None)
        reason = None if found.reason is None else found.reason.value
        return cls(found.desc, kind, bins, score, reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """`finish_reason` is stop when the model ended by itself, length when it was cut off, and `NO_IMAGE` when it
    was not asked, because the image cannot be read."""

    image_id: int
    image: str
    text: str
    finish_reason: str
    tokens: int
    objects: tuple[AnswerObject, ...]

    @property
    def valid(self) -> tuple[AnswerObject, ...]:
        return tuple(found for found in self.objects if found.reason is None)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def was_asked(self) -> bool:
        return self.finish_reason != NO_IMAGE


@dataclass(frozen=True, slots=True)
class Detection:
    """A COCO result: a box x, y, width, height in pixels; of a polygon also its rings."""

    image_id: int
    category_id: int
    desc: str
    bbox: tuple[float, float, float, float]
    segmentation: tuple[tuple[float, ...], ...] | None
    score: float

    def as_dict(self) -> dict[str, Any]:
        values = {
            "image_id": self.image_id,
            "category_id": self.category_id,
            "desc": self.desc,
            "bbox": self.bbox,
            "score": self.score,
        }
        return values if self.segmentation is None else values | {"segmentation": self.segmentation}


def in_pixels(bins: Sequence[int], record: Record) -> tuple[float, ...]:
    size = (record.width, record.height)
    return tuple(to_pixels(bin, size[k % 2]) for k, bin in enumerate(bins))


def parse_answer(line: str | bytes) -> Answer:
    """ValueError says what is wrong with the line."""
    value = json.loads(line)
    _keys(value, {"image_id", "image", "text", "finish_reason", "tokens", "objects"})
    if not isinstance(value["objects"], list):
        raise ValueError("objects is not a list")
    objects = []
    for k, found in enumerate(value["objects"]):
        try:
            objects.append(_answer_object(found))
        except ValueError as error:
            raise ValueError(f"objects[{k}]: {error}") from error
    return Answer(
        _whole(value, "image_id", at_least=0),
        _text(value, "image"),
        _text(value, "text"),
        _text(value, "finish_reason"),
        _whole(value, "tokens", at_least=0),
        tuple(objects),
    )


def parse_detection(value: Any) -> Detection:
    """From a dict of a COCO results list. ValueError says what is wrong with it."""
    _keys(value, {"image_id", "category_id", "desc", "bbox", "score"}, optional={"segmentation"})
    rings = value.get("segmentation")
    if rings is not None and not (isinstance(rings, list) and rings and all(map(_numbers, rings))):
        raise ValueError("segmentation is not a list of rings, each a list of numbers")
    if not _numbers(value["bbox"]) or len(value["bbox"]) != 4:
        raise ValueError(f"bbox {value['bbox']!r} is not four numbers x, y, width, height")
    if not _numbers([value["score"]]):
        raise ValueError(f"score {value['score']!r} is not a number")
    x, y, width, height = map(float, value["bbox"])
    return Detection(
        _whole(value, "image_id", at_least=0),
        _whole(value, "category_id", at_least=0),
        _text(value, "desc"),
        (x, y, width, height),
        None if rings is None else tuple(tuple(map(float, ring)) for ring in rings),
        float(value["score"]),
    )


def _answer_object(value: Any) -> AnswerObject:
    _keys(value, {"desc", "kind", "bins", "score", "reason"})
    for key in ("desc", "reason"):
        if value[key] is not None:
            _text(value, key)
    if value["kind"] is not None and value["kind"] not in KINDS:
        raise ValueError(f"kind {value['kind']!r} is not one of {', '.join(KINDS)}")
    bins, score = value["bins"], value["score"]
    if bins is not None and not (isinstance(bins, list) and all(type(bin) is int for bin in bins)):
        raise ValueError(f"bins {bins!r} is not a list of whole numbers")
    if score is not None and not _numbers([score]):
        raise ValueError(f"score {score!r} is not a number")
    return AnswerObject(
        value["desc"],
        value["kind"],
        None if bins is None else tuple(bins),
        None if score is None else float(score),
        value["reason"],
    )


def _keys(value: Any, needed: set[str], optional: frozenset[str] | set[str] = frozenset()) -> None:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    unknown, missing = sorted(set(value) - needed - optional), sorted(needed - set(value))
    parts = [f"{what} {', '.join(keys)}" for what, keys in (("unknown", unknown), ("no", missing)) if keys]
    if parts:
        raise ValueError("; ".join(parts))


def _text(value: dict[str, Any], key: str) -> str:
    if not isinstance(value[key], str):
        raise ValueError(f"{key} {value[key]!r} is not a text")
    return str(value[key])


def _whole(value: dict[str, Any], key: str, at_least: int) -> int:
    if type(value[key]) is not int or value[key] < at_least:
        raise ValueError(f"{key} {value[key]!r} is not a whole number from {at_least}")
    return int(value[key])


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) in (int, float) and math.isfinite(v) for v in values)
