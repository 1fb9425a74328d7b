"""Predictions on disk: `preds.json`, a COCO results list, and beside it `preds.answers.jsonl`, a line an image.

    preds.json           [{"image_id": 7, "category_id": 2, "desc": "cup", "bbox": [x, y, w, h], "score": 0.9,
                           "segmentation": [[x, y, ...]] of a polygon}, ...]
    preds.answers.jsonl  {"image_id": 7, "image": "images/7.png", "text": "{...", "finish_reason": "stop",
                          "tokens": 120, "objects": [{"desc", "kind", "bins", "score", "reason"}, ...]}

The answers say everything, also what the parser refused; the detections are what other COCO tools read, in pixels.
An image is named by the line number of its record. Reading is strict: what breaks a rule is a `PredictionError`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from coordexp.data import Record
from coordexp.evaluate.answer import Answer, AnswerObject, Detection, in_pixels, parse_answer, parse_detection

__all__ = [
    "UNKNOWN_CATEGORY",
    "Answer",
    "AnswerObject",
    "Detection",
    "PredictionError",
    "Predictions",
    "Truth",
    "answers_path",
    "category_ids",
    "check_image",
    "check_predictions",
    "detections_of",
    "read_predictions",
    "write_predictions",
]

UNKNOWN_CATEGORY = 0  # of a desc that no true object has

Truth = Sequence[tuple[int, Record]]  # line numbers with their records, as `read_records` gives them
T = TypeVar("T")


class PredictionError(ValueError):
    """Predictions that cannot be used as they stand."""


@dataclass(frozen=True, slots=True)
class Predictions:
    detections: tuple[Detection, ...]
    answers: tuple[Answer, ...]


def answers_path(path: Path) -> Path:
    return path.with_suffix(".answers.jsonl")


def category_ids(truth: Truth) -> dict[str, int]:
    """From 1, by the sorted desc of all true objects."""
    names = sorted({found.desc for _, record in truth for found in record.objects})
    return {name: number for number, name in enumerate(names, start=1)}


def detections_of(answers: Sequence[Answer], truth: Truth) -> Iterator[Detection]:
    """The valid objects of the answers, in their order, in the pixels of the true images."""
    categories, records = category_ids(truth), dict(truth)
    for answer in answers:
        record = records.get(answer.image_id)
        if record is None:
            raise PredictionError(
                f"image_id {answer.image_id} ({answer.image}) is not in the data\n"
                "  an image_id is the line number of a record; give the file that was predicted on"
            )
        check_image(answer, record)
        for found in answer.valid:
            yield _detection(found, answer.image_id, record, categories)


def check_image(answer: Answer, record: Record) -> None:
    if answer.image != record.image:
        raise PredictionError(
            f"image_id {answer.image_id} is {answer.image!r} in the answers and {record.image!r} in the data\n"
            "  the data has changed, or is another file; give the one that was predicted on"
        )


def write_predictions(path: Path, answers: Sequence[Answer], truth: Truth) -> None:
    """Writes both files. Every valid object needs a score: COCO results have no detection without one."""
    detections = [detection.as_dict() for detection in detections_of(answers, truth)]
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, "[" + ",\n".join(map(_json, detections)) + "]\n")
    _write(answers_path(path), "".join(f"{_json(asdict(answer))}\n" for answer in answers))


def read_predictions(path: Path) -> Predictions:
    """Both files, each line checked by itself; `check_predictions` compares them with the data."""
    for file in (path, answers_path(path)):
        if not file.is_file():
            raise PredictionError(
                f"{file}: no such file\n  predictions are two files, {path.name} and {answers_path(path).name}"
            )
    listed = _read(json.loads, path.read_bytes(), str(path))
    if not isinstance(listed, list):
        raise PredictionError(f"{path}: not a list\n  a COCO results file is a list of detections")
    detections = tuple(_read(parse_detection, item, f"{path}: [{k}]") for k, item in enumerate(listed))
    return Predictions(detections, tuple(_read_answers(answers_path(path))))


def check_predictions(predictions: Predictions, truth: Truth) -> None:
    """The two files must say the same, and be about this data."""
    expected = list(detections_of(predictions.answers, truth))
    if len(expected) != len(predictions.detections):
        raise PredictionError(
            f"{len(predictions.detections)} detections, but {len(expected)} valid objects in the answers\n"
            "  the two files are of different runs; write both with one run"
        )
    for k, (listed, said) in enumerate(zip(predictions.detections, expected, strict=True)):
        if not _same(listed, said):
            raise PredictionError(
                f"detection [{k}] is {_json(listed.as_dict())}\n"
                f"  and by the answers and the data it is {_json(said.as_dict())}\n"
                "  the files do not belong together; give the data that was predicted on"
            )


def _detection(found: AnswerObject, image_id: int, record: Record, categories: dict[str, int]) -> Detection:
    assert found.desc is not None and found.bins is not None
    if found.score is None:
        raise PredictionError(
            f"image_id {image_id}: {found.desc!r} has no score\n"
            "  a COCO result needs one; score objects by their token probabilities, or all alike by 1.0"
        )
    ring = in_pixels(found.bins, record)
    xs, ys = ring[::2], ring[1::2]
    box = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
    category = categories.get(found.desc, UNKNOWN_CATEGORY)
    return Detection(image_id, category, found.desc, box, (ring,) if found.kind == "poly" else None, found.score)


def _same(left: Detection, right: Detection) -> bool:
    """To a hundredth of a pixel."""
    names = [(one.image_id, one.category_id, one.desc, one.score) for one in (left, right)]
    numbers = [[*one.bbox, *(v for ring in one.segmentation or () for v in ring)] for one in (left, right)]
    if names[0] != names[1] or len(numbers[0]) != len(numbers[1]):
        return False
    return all(abs(a - b) < 0.01 for a, b in zip(*numbers, strict=True))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write(path: Path, text: str) -> None:
    """Half a character, which UTF-8 cannot say, becomes its JSON escape."""
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _read_answers(path: Path) -> Iterator[Answer]:
    first: dict[int, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            answer = _read(parse_answer, line, f"{path}:{number}")
            if answer.image_id in first:
                raise PredictionError(
                    f"{path}:{number}: image_id {answer.image_id} is on line {first[answer.image_id]} already\n"
                    "  an image has one answer; remove one of the lines"
                )
            first[answer.image_id] = number
            yield answer


def _read(reader: Callable[[Any], T], value: Any, where: str) -> T:
    try:
        return reader(value)
    except ValueError as error:
        raise PredictionError(f"{where}: {error}\n  write predictions with `coordexp predict`") from error
