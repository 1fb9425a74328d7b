"""The objects of an image, in pixels, as `Detector` returns them. Imports neither torch nor Pillow."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordexp.errors import UserError
from coordexp.evaluate.answer import Detection, ImageAnswer, bins_to_pixels
from coordexp.evaluate.predictions import unknown_category_id

if TYPE_CHECKING:
    from coordexp.data import Record

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class DetectedObject:
    """An object: its name, its box (left, top, right, bottom) in pixels, and its score, a probability. `polygon`
    has the vertices (x, y) if the model outlined the object; `box` is then the box around them."""

    name: str
    box: Box
    score: float
    polygon: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class Detections:
    """The objects of one image, in the order in which the model wrote them.

    `width` and `height` are the size of the image after the rotation that its EXIF data ask for, and all
    coordinates are in these pixels. `text` is the raw answer. `finish_reason` is stop if the model ended it, and
    length if it was cut off at the token limit. `refused` has the reason for each object of the text that is not
    valid."""

    objects: tuple[DetectedObject, ...]
    text: str
    finish_reason: str
    width: int
    height: int
    refused: tuple[str, ...] = ()

    @classmethod
    def of(cls, answer: ImageAnswer, record: "Record") -> "Detections":
        objects = []
        for item in answer.valid:
            assert item.desc is not None and item.bins is not None and item.score is not None
            ring = bins_to_pixels(item.bins, record)
            xs, ys = ring[::2], ring[1::2]
            polygon = tuple(zip(xs, ys, strict=True)) if item.kind == "poly" else None
            objects.append(DetectedObject(item.desc, (min(xs), min(ys), max(xs), max(ys)), item.score, polygon))
        refused = tuple(item.reason for item in answer.objects if item.reason is not None)
        return cls(tuple(objects), answer.text, answer.finish_reason, record.width, record.height, refused)

    def __iter__(self) -> Iterator[DetectedObject]:
        return iter(self.objects)

    def __len__(self) -> int:
        return len(self.objects)

    @property
    def is_truncated(self) -> bool:
        """True if the answer was cut off at the token limit, so that objects may be missing."""
        return self.finish_reason == "length"

    def to_coco(self, image_id: int, category_ids: Mapping[str, int]) -> list[dict[str, Any]]:
        """Return the objects as entries of a COCO results list. A name that `category_ids` does not have gets the
        number 0, or the next free number if 0 is one of the classes."""
        unknown = unknown_category_id(dict(category_ids))
        results = []
        for item in self.objects:
            left, top, right, bottom = item.box
            ring = [value for point in item.polygon or () for value in point]
            category_id = category_ids.get(item.name, unknown)
            box = (left, top, right - left, bottom - top)
            detection = Detection(image_id, category_id, box, item.score, [ring] if ring else None, item.name)
            results.append(detection.as_dict())
        return results

    def to_supervision(self, classes: Sequence[str] | None = None) -> Any:
        """Return `supervision.Detections`, for drawing, tracking and counting with the package supervision.
        `class_id` is the position of the name in `classes`, or -1; without `classes`, in the sorted names of this
        image. Objects have masks if one of them is a polygon."""
        if importlib.util.find_spec("supervision") is None:
            raise UserError("to_supervision needs the package supervision", "pip install supervision")
        import numpy as np
        import supervision

        if not self.objects:
            return supervision.Detections.empty()
        names = [item.name for item in self.objects]
        numbers = {name: k for k, name in enumerate(sorted(set(names)) if classes is None else classes)}
        masks = None
        if any(item.polygon for item in self.objects):
            masks = np.stack([self._draw_mask(item) for item in self.objects])
        return supervision.Detections(
            xyxy=np.array([item.box for item in self.objects], dtype=np.float32),
            mask=masks,
            confidence=np.array([item.score for item in self.objects], dtype=np.float32),
            class_id=np.array([numbers.get(name, -1) for name in names]),
            data={"class_name": np.array(names)},
        )

    def _draw_mask(self, item: DetectedObject) -> Any:
        """Return the inside of an object as a boolean array of the size of the image."""
        from pycocotools import mask as rle

        from coordexp.evaluate.comparison import Shape, encode_mask

        ring = tuple(value for point in item.polygon or () for value in point)
        shape = Shape("poly", ring) if ring else Shape("bbox_2d", item.box)
        return rle.decode(encode_mask(shape, self.width, self.height)).astype(bool)
