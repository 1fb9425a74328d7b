"""Predictions on disk: `preds.json`, a COCO results list, and beside it `preds.answers.jsonl`, a line an image.

    preds.json           [{"image_id": 7, "category_id": 2, "desc": "cup", "bbox": [x, y, w, h], "score": 0.9,
                           "segmentation": [[x, y, ...]] of a polygon}, ...]
    preds.answers.jsonl  {"image_id": 7, "image": "images/7.png", "text": "{...", "finish_reason": "stop",
                          "tokens": 120, "objects": [{"desc", "kind", "bins", "score", "reason"}, ...]}

    preds.unfinished.jsonl  while predictions are made: what is asked of which model, then the answers so far

The answers say everything, also what the parser refused; the detections are what other COCO tools read, in pixels.
An image is named by the `image_id` of its record, and without one by the number of its line; a class has the
`category_id` of its objects, or else a number of its own. Reading is strict: what breaks a rule is a
`PredictionError`.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from coordexp.data import Record, RecordFile
from coordexp.errors import UserError
from coordexp.evaluate.answer import Answer, AnswerObject, Detection, in_pixels, parse_answer, parse_detection
from coordexp.files import write_whole

__all__ = [
    "Answer",
    "AnswerObject",
    "Detection",
    "PredictionError",
    "Predictions",
    "Truth",
    "Unfinished",
    "answers_path",
    "category_ids",
    "check_image",
    "check_predictions",
    "detections_of",
    "read_predictions",
    "read_truth",
    "unknown_category",
    "write_predictions",
]

Truth = Sequence[tuple[int, Record]]  # records with the numbers that name their images
HOW_NAMED = "an image_id is that of a record, or the number of its line if it has none"
T = TypeVar("T")


class PredictionError(UserError, ValueError):
    """Predictions that cannot be used as they stand."""


@dataclass(frozen=True, slots=True)
class Predictions:
    detections: tuple[Detection, ...]
    answers: tuple[Answer, ...]


def answers_path(path: Path) -> Path:
    return path.with_suffix(".answers.jsonl")


def read_truth(records: RecordFile) -> Truth:
    """Return all records with the numbers that name their images. PredictionError, before anything is asked of a
    model, if two records have the same number or two classes the same `category_id`."""
    truth = [records.numbered(index) for index in range(len(records))]
    counted = Counter(number for number, _ in truth)
    if len(counted) < len(truth):
        number = next(number for number, count in counted.items() if count > 1)
        raise PredictionError(
            f"{records.path}: {counted[number]} records have the image_id {number} (a record without an image_id "
            "has the number of its line)\n"
            "  give every record an image_id of its own, or remove image_id from all of them"
        )
    category_ids(truth)
    return truth


def category_ids(truth: Truth) -> dict[str, int]:
    """Return the number of every class of the data, by its desc: the smallest `category_id` that its objects have.
    A class without one gets the next number that is free, in the order of the descs; so a file without any is
    numbered from 1."""
    objects = [found for _, record in truth for found in record.objects]
    given: dict[str, int] = {}
    for found in objects:
        if found.category_id is not None:
            given[found.desc] = min(found.category_id, given.get(found.desc, found.category_id))
    descs: dict[int, str] = {}
    for desc, number in given.items():
        if descs.setdefault(number, desc) != desc:
            raise PredictionError(
                f"category_id {number} is the class {descs[number]!r} and the class {desc!r}\n"
                "  an id names one class: correct the records, or remove category_id from all of them"
            )
    free = itertools.count(max(descs, default=0) + 1)
    return {desc: given[desc] if desc in given else next(free) for desc in sorted({o.desc for o in objects})}


def unknown_category(categories: dict[str, int]) -> int:
    """Return the `category_id` of a desc that no true object has: 0, or the next free number if 0 is a class."""
    return 0 if 0 not in categories.values() else max(categories.values()) + 1


def detections_of(answers: Sequence[Answer], truth: Truth) -> Iterator[Detection]:
    """The valid objects of the answers, in their order, in the pixels of the true images."""
    categories, records = category_ids(truth), dict(truth)
    unknown = unknown_category(categories)
    for answer in answers:
        record = records.get(answer.image_id)
        if record is None:
            raise PredictionError(
                f"image_id {answer.image_id} ({answer.image}) is not in the data\n"
                f"  {HOW_NAMED}; give the file that was predicted on"
            )
        check_image(answer, record)
        for found in answer.valid:
            yield _detection(found, answer.image_id, record, categories.get(found.desc or "", unknown))


def check_image(answer: Answer, record: Record) -> None:
    if answer.image != record.image:
        raise PredictionError(
            f"image_id {answer.image_id} is {answer.image!r} in the answers and {record.image!r} in the data\n"
            "  the data has changed, or is another file; give the one that was predicted on"
        )


class Unfinished:
    """The answers of predictions that are being made, on disk after every batch. The first line says what is asked
    of which model, so that only the same predictions are resumed."""

    def __init__(self, predictions: Path, asked: dict[str, Any]) -> None:
        self.predictions, self.asked = predictions, asked
        self.path = predictions.with_suffix(".unfinished.jsonl")

    def begin(self) -> None:
        """Write the first line. PredictionError if answers of an interrupted run are there."""
        if self.path.exists() and self.path.read_bytes().count(b"\n") > 1:
            raise PredictionError(
                f"{self.path} has the answers of predictions that were interrupted\n"
                "  add --resume to go on from there, or remove the file to begin again"
            )
        self.keep(())

    def resume(self) -> list[Answer]:
        """Return the answers that are there, without a last line that was not written to its end. PredictionError
        if they are answers to something else."""
        whole, _, _ = self.path.read_bytes().rpartition(b"\n")
        lines = whole.split(b"\n")
        asked = _read(json.loads, lines[0] or b"null", f"{self.path}:1")
        if asked != self.asked:
            before = asked if isinstance(asked, dict) else {}
            names = sorted(name for name in self.asked if before.get(name) != self.asked[name])
            values = [
                f"{name} {before.get(name)!r} is now {self.asked[name]!r}"
                for name in names
                if name in ("prompt", "max_new_tokens")
            ]
            raise PredictionError(
                f"{self.path} was made with another {' and another '.join(names)}"
                f"{': ' if values else ''}{', '.join(values)}\n"
                "  give the same as before, or remove the file to begin again"
            )
        return [_read(parse_answer, line, f"{self.path}:{k}") for k, line in enumerate(lines[1:], start=2)]

    def keep(self, answers: Sequence[Answer]) -> None:
        """Write the file with these answers only, whole or not at all."""
        _write(self.path, f"{_json(self.asked)}\n" + "".join(map(_line, answers)))

    def add(self, answers: Sequence[Answer]) -> None:
        with self.path.open("ab") as file:
            file.write("".join(map(_line, answers)).encode("utf-8", errors="backslashreplace"))

    def remove(self) -> None:
        self.path.unlink()


def write_predictions(path: Path, answers: Sequence[Answer], truth: Truth) -> None:
    """Writes both files. Every valid object needs a score: COCO results have no detection without one."""
    detections = [detection.as_dict() for detection in detections_of(answers, truth)]
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, "[" + ",\n".join(map(_json, detections)) + "]\n")
    _write(answers_path(path), "".join(map(_line, answers)))


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


def _detection(found: AnswerObject, image_id: int, record: Record, category: int) -> Detection:
    assert found.desc is not None and found.bins is not None
    if found.score is None:
        raise PredictionError(
            f"image_id {image_id}: {found.desc!r} has no score\n"
            "  a COCO result needs one; score objects by their token probabilities, or all alike by 1.0"
        )
    ring = in_pixels(found.bins, record)
    xs, ys = ring[::2], ring[1::2]
    box = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
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


def _line(answer: Answer) -> str:
    return f"{_json(asdict(answer))}\n"


def _write(path: Path, text: str) -> None:
    """Half a character, which UTF-8 cannot say, becomes its JSON escape."""
    write_whole(path, text.encode("utf-8", "backslashreplace"))


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
