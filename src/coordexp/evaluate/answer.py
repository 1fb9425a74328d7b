"""A model's answer about an image, and the detections in it. JSON from files is checked here.

An `ImageAnswer` has all objects of the text, in bins, including those that the parser refused. A `Detection` is a
valid object in pixels, as COCO tools read it.

The score of an object is the probability of its words: of its description and of the structure before it, and so
of the choice to continue the answer at all. Coordinates are left out: the probability of one bin of a soft
distribution shows how soft the training targets were, and on the demo model it did not improve the ranking.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, ConfigDict, Field, Strict, TypeAdapter

from coordexp.answers.entries import PredictedObject
from coordexp.answers.formats import AnswerFormat, is_readable
from coordexp.answers.match import find_duplicates
from coordexp.data import Geometry, GeometryKind, Record, to_pixels
from coordexp.data.geometry import check_bins
from coordexp.data.records import check_value
from coordexp.rollout.backend import Rollout

NO_IMAGE = "image_unreadable"
NO_TEXT = "no_text"  # of detections by another detector, which wrote no answer

# Types that pydantic checks when JSON is read. Nothing is converted, except a list to a tuple.
_Count = Annotated[int, Strict(), Field(ge=0)]
_Ordinal = Annotated[int, Strict(), Field(ge=1)]
_Text = Annotated[str, Strict()]
_Number = Annotated[float, Strict(), AllowInfNan(False)]
_Length = Annotated[float, Strict(), AllowInfNan(False), Field(ge=0)]
_Bin = Annotated[int, Strict()]


@dataclass(frozen=True, slots=True)
class AnswerObject:
    """An object of an answer. It is valid if `reason` is None, and refused by the parser for that reason
    otherwise. `bins` are as in `Geometry`; `score` is a confidence."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    desc: _Text | None
    kind: GeometryKind | None
    bins: tuple[_Bin, ...] | None
    score: _Number | None
    reason: _Text | None

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"score {self.score} is not a finite number")
        if self.reason is not None:
            return
        if self.desc is None or self.kind is None or self.bins is None:
            raise ValueError("an object without desc, kind or bins needs a reason")
        check_bins(self.kind, self.bins)

    @property
    def geometry(self) -> Geometry:
        """The shape of a valid object."""
        assert self.kind is not None and self.bins is not None
        return Geometry(self.kind, self.bins)

    @classmethod
    def from_parsed(cls, parsed: PredictedObject, score: float | None) -> "AnswerObject":
        kind, bins = parsed.geometry or (None, None)
        reason = None if parsed.reason is None else parsed.reason.value
        return cls(parsed.desc, kind, bins, score, reason)


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """An answer about one image. `finish_reason` is stop if the model ended it, length if it was cut off at the
    token limit, and `NO_IMAGE` if the model was not asked because the image cannot be read.

    `dropped` are the valid objects of the text that were dropped as duplicates; `objects` are all others. `sample`
    is the number of a sampled answer, from 1, and None for the greedy one. `answer_format` is None for answers
    with coordinate tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    image_id: _Count
    image: _Text
    text: _Text
    finish_reason: _Text
    tokens: _Count
    objects: tuple[AnswerObject, ...]
    dropped: tuple[AnswerObject, ...] = ()
    sample: _Ordinal | None = None
    answer_format: Literal["native"] | None = None

    @property
    def valid(self) -> tuple[AnswerObject, ...]:
        return tuple(item for item in self.objects if item.reason is None)

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def is_readable(self) -> bool:
        return is_readable(self.text, self.answer_format or "coord_tokens")

    @property
    def was_asked(self) -> bool:
        return self.finish_reason != NO_IMAGE

    @property
    def has_text(self) -> bool:
        return self.finish_reason != NO_TEXT


@dataclass(frozen=True, slots=True)
class Detection:
    """A COCO result: a box x, y, width, height in pixels, and for a polygon also its rings. Results of other
    detectors may have masks as run lengths, and no `desc`; their other keys are ignored."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    image_id: _Count
    category_id: _Count
    bbox: tuple[_Number, _Number, _Length, _Length]
    score: _Number
    segmentation: list[list[_Number]] | dict[str, Any] | None = None
    desc: _Text | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the result as it stands in a file."""
        ids = {"image_id": self.image_id, "category_id": self.category_id}
        desc = {} if self.desc is None else {"desc": self.desc}
        shapes = {"segmentation": self.segmentation} if self.segmentation else {}
        return ids | desc | {"bbox": self.bbox, "score": self.score} | shapes


_ANSWER = TypeAdapter(ImageAnswer)
_DETECTION = TypeAdapter(Detection)


def parse_answer(line: str | bytes) -> ImageAnswer:
    """Return the answer of a JSON line. Raise ValueError if it is wrong.

    The line is not read with pydantic's own JSON parser, because that one refuses a lone surrogate in the text."""
    return check_value(_ANSWER, json.loads(line))


def parse_detection(value: Any) -> Detection:
    """Return an entry of the results list of any detector. Raise ValueError if it is wrong."""
    return check_value(_DETECTION, value)


def bins_to_pixels(bins: Sequence[int], record: Record) -> tuple[float, ...]:
    size = (record.width, record.height)
    return tuple(to_pixels(bin, size[k % 2]) for k, bin in enumerate(bins))


def build_answer(image_id: int, image: str, rollout: Rollout, answers: AnswerFormat) -> ImageAnswer:
    """Read the generated tokens strictly and score every valid object."""
    parsed = answers.read(rollout.ids)
    objects = tuple(
        AnswerObject.from_parsed(item, _score(item, rollout.logprobs, tokens) if item.is_valid else None)
        for item, tokens in zip(parsed.objects, parsed.tokens, strict=True)
    )
    answer = ImageAnswer(image_id, image, rollout.text, rollout.finish_reason, len(rollout.ids), objects)
    return replace(answer, answer_format="native") if answers.name == "native" else answer


def drop_duplicates(answer: ImageAnswer, iou: float) -> ImageAnswer:
    """Return the answer without the valid objects that overlap an earlier kept one by at least `iou`, whatever
    their descs are. They are in `dropped`."""
    valid = [k for k, item in enumerate(answer.objects) if item.reason is None]
    duplicates = find_duplicates([answer.objects[k].geometry for k in valid], iou)
    dropped = {valid[i] for i in duplicates}
    return replace(
        answer,
        objects=tuple(item for k, item in enumerate(answer.objects) if k not in dropped),
        dropped=tuple(item for k, item in enumerate(answer.objects) if k in dropped),
    )


def _score(item: PredictedObject, logprobs: Sequence[float], tokens: range) -> float:
    coords = set(item.coord_indices)
    return math.exp(sum(logprobs[k] for k in tokens if k not in coords))
