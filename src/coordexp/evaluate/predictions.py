"""Predictions on disk: `preds.json`, a COCO results list, and beside it `preds.answers.jsonl`, one line per image.

    preds.json           [{"image_id": 7, "category_id": 2, "desc": "cup", "bbox": [x, y, w, h], "score": 0.9,
                           "segmentation": [[x, y, ...]] of a polygon}, ...]
    preds.answers.jsonl  {"image_id": 7, "image": "images/7.png", "text": "{...", "finish_reason": "stop",
                          "tokens": 120, "objects": [{"desc", "kind", "bins", "score", "reason"}, ...],
                          "dropped": [objects that were dropped as duplicates], if there are any,
                          "answer_format": "native", unless the answer has coordinate tokens}
    preds.samples.jsonl  sampled answers, if there are any: lines like those above, with "sample": 1, 2, ...
    preds.images.json    of images without records: a COCO file without annotations, which says what image_id and
                         category_id stand for

The answers are complete, including objects that the parser refused. The detections are for other COCO tools, in
pixels. An image is named by the `image_id` of its record or, without one, by the number of its line. A class has
the `category_id` of its objects, or else a number of its own. Reading is strict: a file that breaks a rule is a
`DataError`.
"""

import itertools
import json
import reprlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from coordexp.data import Record, RecordObject, Records
from coordexp.data.export import number_classes
from coordexp.errors import DataError, explain
from coordexp.evaluate.answer import (
    AnswerObject,
    Detection,
    ImageAnswer,
    bins_to_pixels,
    parse_answer,
    parse_detection,
)
from coordexp.files import write_whole
from coordexp.tasks import ignore

Truth = Sequence[tuple[int, Record]]  # records with the numbers that name their images
NAMING_RULE = "an image_id is that of a record, or the number of its line if it has none"
OPTIONAL = ("dropped", "sample", "answer_format")  # fields of an answer that are written only if they have a value
T = TypeVar("T")


def answers_path(path: Path) -> Path:
    return path.with_suffix(".answers.jsonl")


def samples_path(path: Path) -> Path:
    return path.with_suffix(".samples.jsonl")


def images_path(path: Path) -> Path:
    return path.with_suffix(".images.json")


def read_truth(records: Records) -> Truth:
    """Return all records with the numbers that name their images. Raise DataError, before a model is asked
    anything, if two records have the same number or two classes the same `category_id`."""
    truth: list[tuple[int, Record]] = []
    number_all_classes(records, truth.append)
    return truth


def number_all_classes(records: Records, keep: Callable[[tuple[int, Record]], None] = ignore) -> dict[str, int]:
    """Read all records, one by one, and return the number of every class. Raise DataError like `read_truth`.
    `keep` gets every record with the number that names its image."""
    image_ids = array("Q")

    def read_objects() -> Iterator[RecordObject]:
        for index in range(len(records)):
            image_id, record = records.read_with_image_id(index)
            image_ids.append(image_id)
            keep((image_id, record))
            yield from record.objects

    classes = number_classes(read_objects())
    numbers, counts = np.unique(np.frombuffer(image_ids, dtype=np.uint64), return_counts=True)
    if len(numbers) < len(image_ids):
        raise DataError(
            f"{records}: {counts.max()} records have the image_id {numbers[counts.argmax()]} (a record without an "
            "image_id has the number of its line, or in several files its number in all of them)",
            "give every record an image_id of its own, or remove image_id from all of them",
        )
    return classes


def category_ids(truth: Truth) -> dict[str, int]:
    """Return the number of every class of the data, by its desc. Raise DataError if two classes share an id."""
    return number_classes(item for _, record in truth for item in record.objects)


def unknown_category_id(categories: dict[str, int]) -> int:
    """Return the `category_id` for a desc that no true object has: 0, or the next free number if 0 is a class."""
    return 0 if 0 not in categories.values() else max(categories.values()) + 1


def number_answered_classes(classes: Sequence[str], answers: Sequence[ImageAnswer]) -> dict[str, int]:
    """Return a number for every class of answers about images without labels, from 1: first the `classes` that
    were asked for, in their order, then all other names."""
    names = {item.desc for answer in answers for item in answer.valid if item.desc is not None}
    return {name: k for k, name in enumerate([*classes, *sorted(names - set(classes))], start=1)}


def to_detections(
    answers: Sequence[ImageAnswer], truth: Truth, categories: dict[str, int] | None = None
) -> Iterator[Detection]:
    """Yield the valid objects of the answers, in their order, in the pixels of the true images. `categories`
    replace the numbers of the true classes."""
    categories, records = category_ids(truth) if categories is None else categories, dict(truth)
    unknown = unknown_category_id(categories)
    for answer in answers:
        record = records.get(answer.image_id)
        if record is None:
            raise DataError(
                f"image_id {answer.image_id} ({answer.image}) is not in the data",
                f"give the file that was predicted on; {NAMING_RULE}",
            )
        check_same_image(answer, record)
        for item in answer.valid:
            yield _to_detection(item, answer.image_id, record, categories.get(item.desc or "", unknown))


def check_same_image(answer: ImageAnswer, record: Record) -> None:
    """Raise DataError if the answer and the record with its `image_id` name different image files."""
    if answer.image != record.image:
        raise DataError(
            f"image_id {answer.image_id} is {answer.image!r} in the answers and {record.image!r} in the data",
            "give the file that was predicted on; this one has changed, or is another one. Predictions with "
            "--images have no such file: predict again, with --data",
        )


def write_predictions(
    path: Path, answers: Sequence[ImageAnswer], truth: Truth, categories: dict[str, int] | None = None
) -> None:
    """Write both files. Every valid object needs a score, because every COCO result has one. `categories` replace
    the numbers of the true classes."""
    detections = [detection.as_dict() for detection in to_detections(answers, truth, categories)]
    write_whole(path, "[" + ",\n".join(map(to_json, detections)) + "]\n")
    write_whole(answers_path(path), "".join(map(to_line, answers)))


def write_images(path: Path, images: Truth, categories: dict[str, int]) -> None:
    """Write beside the predictions at `path` what their numbers stand for, as a COCO file without annotations."""
    content = {
        "images": [
            {"id": image_id, "file_name": record.image, "width": record.width, "height": record.height}
            for image_id, record in images
        ],
        "annotations": [],
        "categories": [{"id": number, "name": name} for name, number in categories.items()],
    }
    write_whole(images_path(path), f"{to_json(content)}\n")


def write_samples(path: Path, samples: Sequence[ImageAnswer]) -> None:
    """Write the sampled answers beside the predictions at `path`."""
    write_whole(samples_path(path), "".join(map(to_line, samples)))


def read_samples(path: Path, count: int, image_ids: Sequence[int]) -> list[list[ImageAnswer]]:
    """Return the first `count` sampled answers of these images, from the file beside the predictions at `path`.
    The first list has sample 1 of every image, in the order of `image_ids`. Raise DataError if an image has fewer,
    or if the file is about other images."""
    file = samples_path(path)
    if not file.is_file():
        raise DataError(f"{file}: no such file", f"make it with `coordexp predict --samples {count}`")
    by_image: dict[int, dict[int | None, ImageAnswer]] = {image_id: {} for image_id in image_ids}
    for answer in _read_answers(file):
        if answer.image_id not in by_image:
            raise DataError(
                f"{file} has samples of image_id {answer.image_id}, which the predictions do not have",
                "use files of the same run",
            )
        by_image[answer.image_id][answer.sample] = answer
    for image_id, samples in by_image.items():
        complete = next(k for k in itertools.count() if k + 1 not in samples)
        if complete < count:
            fix = f"predict again with --samples {count}"
            fix += f", or give --samples {complete}" if complete else ""
            raise DataError(
                f"{file} has {complete} samples of image_id {image_id}, and --samples asks for {count}", fix
            )
    return [[samples[k] for samples in by_image.values()] for k in range(1, count + 1)]


def read_results(path: Path, truth: Truth) -> list[Detection]:
    """Return the detections of a COCO results file of any detector. An image may be named by its `image_id`, or as
    Ultralytics does it: by a `file_name`, or by the name of its file without the ending, as a number if it is one.
    Raise DataError if an entry is wrong, or if two images may be meant."""
    entries = _read_list(path)
    ids = [item.get("image_id") for item in entries if isinstance(item, dict)]
    names = _ImageNames(truth, {id for id in ids if type(id) is int})
    results = []
    for k, item in enumerate(entries):
        with explain(ValueError, f"{path}: [{k}]", "give the data that the detections are about"):
            if isinstance(item, dict) and (image_id := names.find(item)) is not None:
                item = item | {"image_id": image_id}
        results.append(read_checked(parse_detection, item, f"{path}: [{k}]"))
    return results


class _ImageNames:
    """The images of the data by the names that other detectors give them."""

    def __init__(self, truth: Truth, used: set[int]) -> None:
        self._files, self._stems = dict[str, list[int]](), dict[str, list[int]]()
        for image_id, record in truth:
            name = PurePosixPath(record.image)
            self._files.setdefault(name.name, []).append(image_id)
            self._stems.setdefault(name.stem, []).append(image_id)
        self._numbers = self._choose_numbers(truth, used)

    def find(self, entry: dict[str, Any]) -> int | None:
        """Return the image of a detection that names its file, or None if its `image_id` says it. Raise ValueError
        unless one image has this name."""
        name, number = entry.get("file_name"), entry.get("image_id")
        if isinstance(name, str):
            images = self._files.get(PurePosixPath(name).name, [])
        elif isinstance(number, str):
            name, images = number, self._stems.get(number, [])
        else:
            return self._numbers.get(number) if type(number) is int else None
        if len(images) != 1:
            raise ValueError(f"{len(images) or 'no'} records have an image file called {name!r}")
        return images[0]

    def _choose_numbers(self, truth: Truth, used: set[int]) -> dict[int, int]:
        """Return the images by numbers that are names of files, or nothing if the numbers are those of the data.
        Raise DataError if they may be both."""
        unique = {stem: images[0] for stem, images in self._stems.items() if len(images) == 1}
        by_file = {int(stem): image_id for stem, image_id in unique.items() if stem.isdecimal()}
        differing = sorted(number for number in used if by_file.get(number) != number)
        if not differing or not used <= by_file.keys():
            return {}
        if not used <= {image_id for image_id, _ in truth}:
            return by_file
        if any(record.image_id is None for _, record in truth):
            raise DataError(
                f"image_id {differing[0]} of the detections may be the line of a record or the name of a file",
                "give every record an image_id, as the detections have it",
            )
        return {}


def read_predictions(path: Path, truth: Truth) -> tuple[ImageAnswer, ...]:
    """Return the answers of predictions. Raise DataError if one of the two files is missing or wrong, or if they
    do not belong to each other and to this data."""
    if not path.is_file():
        raise DataError(f"{path}: no such file", "give the file that `coordexp predict --out` wrote")
    if not answers_path(path).is_file():
        raise DataError(
            f"{answers_path(path)}: no such file",
            f"keep both files of the predictions together, {path.name} and {answers_path(path).name}",
        )
    detections, answers = _read_list(path), tuple(_read_answers(answers_path(path)))
    expected = [to_json(detection.as_dict()) for detection in to_detections(answers, truth)]
    if len(expected) != len(detections):
        raise DataError(
            f"{path}: {len(detections)} detections, but {len(expected)} valid objects in the answers",
            "use two files of the same run",
        )
    for k, (listed, derived) in enumerate(zip(detections, expected, strict=True)):
        if listed != json.loads(derived):
            raise DataError(
                f"{path}: detection [{k}] is {reprlib.repr(listed)}, but according to the answers and the data it "
                f"is {derived}",
                "give the data that was predicted on; these files do not belong together",
            )
    return answers


def _read_list(path: Path) -> list[Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such file", "give a COCO results file, e.g. one of `coordexp predict`")
    listed = read_checked(json.loads, path.read_bytes(), str(path))
    if not isinstance(listed, list):
        raise DataError(f"{path}: not a list", "give a COCO results file, which is a list of detections")
    return listed


def _to_detection(item: AnswerObject, image_id: int, record: Record, category: int) -> Detection:
    assert item.desc is not None and item.bins is not None
    if item.score is None:
        raise DataError(
            f"image_id {image_id}: {item.desc!r} has no score",
            "score objects by their token probabilities, or give all of them 1.0; a COCO result needs a score",
        )
    ring = bins_to_pixels(item.bins, record)
    xs, ys = ring[::2], ring[1::2]
    box = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
    rings = [list(ring)] if item.kind == "poly" else None
    return Detection(image_id, category, box, item.score, rings, item.desc)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def to_line(answer: ImageAnswer) -> str:
    """Return an answer as a line of JSON."""
    values = {name: value for name, value in asdict(answer).items() if value or name not in OPTIONAL}
    return f"{to_json(values)}\n"


def _read_answers(path: Path) -> Iterator[ImageAnswer]:
    first: dict[tuple[int, int | None], int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            answer = read_checked(parse_answer, line, f"{path}:{number}")
            key = (answer.image_id, answer.sample)
            if key in first:
                name = f"image_id {answer.image_id}"
                name = name if answer.sample is None else f"sample {answer.sample} of {name}"
                raise DataError(
                    f"{path}:{number}: {name} is already on line {first[key]}", "remove one of the two lines"
                )
            first[key] = number
            yield answer


def read_checked(reader: Callable[[Any], T], value: Any, where: str) -> T:
    """Return what a reader makes of a value. Raise DataError, which begins with `where`, if it is wrong."""
    with explain((ValueError, RecursionError), where, "write predictions with `coordexp predict`"):
        return reader(value)
