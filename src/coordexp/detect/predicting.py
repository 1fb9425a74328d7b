"""What `coordexp predict` does: the images that are asked about, what identifies a prediction, and the answers so
far on disk, from which an interrupted run goes on.

    preds.unfinished.jsonl  while predictions are being made: the request and the model, then the answers so far.
                            The greedy answer of an image is followed by its sampled ones.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordexp.data import Record, RecordFile
from coordexp.data.addresses import join_address
from coordexp.data.images import read_image_size
from coordexp.data.shards import check_same_request
from coordexp.data.stores import read_ahead
from coordexp.detect.answering import Answering, AnswerOptions, AskedModel, make_record
from coordexp.errors import DataError, UserError, describe_exception
from coordexp.files import both_ends, open_file, write_whole
from coordexp.tasks import ignore

if TYPE_CHECKING:
    from coordexp.evaluate import ImageAnswer
    from coordexp.evaluate.predictions import Truth

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
END = 2**20  # bytes at both ends of a file of weights that distinguish it from another


@dataclass(frozen=True)
class Source:
    """The images to answer, and where they come from. Image paths are relative to `folder`. `sha256` changes with
    the records or the list of images. `classes` are those that images without labels are asked for; it is None if
    the images have records. `skipped` are files that are not images, each with the reason."""

    images: "Truth"
    folder: Path
    sha256: str
    classes: tuple[str, ...] | None = None
    skipped: tuple[tuple[Path, str], ...] = ()


def read_records(records: RecordFile) -> Source:
    from coordexp.evaluate import read_truth

    return Source(read_truth(records), records.path.parent, records.sha256)


def read_images(
    sources: Sequence[Path],
    classes: tuple[str, ...] | None,
    expression: str | None,
    prompt: str | None,
    notify: Callable[[int], None] = ignore,
) -> Source:
    """Return the images of folders (and their subfolders, by name) and of single files, each file once, and what
    they are asked for. Only headers are read. `notify` gets the number of files so far. Raise UserError if a
    source does not exist, or if there is no image."""
    images, skipped, seen = list[tuple[int, Record]](), list[tuple[Path, str]](), set[Path]()
    for number, path in enumerate(_list_files(sources), start=1):
        notify(number)
        if (resolved := path.resolve()) in seen:
            continue
        seen.add(resolved)
        if path.suffix.lower() not in SUFFIXES:
            skipped.append((path, f"its name does not end in {', '.join(SUFFIXES)}"))
            continue
        try:
            size = read_image_size(path)
        except OSError as error:
            skipped.append((path, describe_exception(error)))
        else:
            images.append((len(images) + 1, make_record(str(path), size, classes, expression, prompt)))
    if not images:
        names = ", ".join(str(source) for source in sources[:3])
        raise UserError(f"no image in {names}", f"give images or folders with images ({', '.join(SUFFIXES)})")
    digest = hashlib.sha256("\n".join(record.as_json() for _, record in images).encode("utf-8", "replace"))
    return Source(images, Path(), digest.hexdigest(), classes or (), tuple(skipped))


def _list_files(sources: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of all sources. In folders, hidden files and folders are left out, and links to folders are
    not followed."""
    for source in sources:
        if not source.exists():
            raise UserError(f"{source} does not exist", "give images or folders with images")
        if not source.is_dir():
            yield source
            continue
        for parent, folders, names in os.walk(source):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def identify(model: AskedModel, source: Source, options: AnswerOptions, server: str | None) -> dict[str, Any]:
    """Return everything that decides the predictions. The names of the parts appear in error messages. Weights are
    hashed by their size and both ends: a copy has the same hash."""
    hashes, answer_format = [], model.answer_format.name
    for file in sorted(model.folder.glob("*.safetensors")):
        with open_file(file) as opened:
            head, tail, size = both_ends(opened, END)
        hashes.append(hashlib.sha256(head + tail + size.to_bytes(8, "big")).hexdigest())
    return {
        "model": hashes,
        "data": source.sha256,
        **asdict(model.questions),
        **({} if answer_format == "coord_tokens" else {"answer_format": answer_format}),
        **options.identity(),
        **({} if server is None else {"server": server}),
    }


def count_answers(answers: "Sequence[ImageAnswer]") -> dict[str, int]:
    """Return what is in the greedy answers, and how many of them are incomplete."""
    greedy = [answer for answer in answers if answer.sample is None]
    return {
        "images": len(greedy),
        "objects": sum(len(answer.valid) for answer in greedy),
        "dropped": sum(len(answer.dropped) for answer in greedy),
        "truncated": sum(answer.is_truncated for answer in greedy),
        "unreadable": sum(not answer.was_asked for answer in greedy),
    }


def refuse_leftovers(predictions: Path, *, samples: bool, records: bool) -> None:
    """Raise UserError if files of earlier predictions would stay beside new ones, which have samples or are about
    records."""
    from coordexp.evaluate.predictions import images_path, samples_path

    if samples_path(predictions).is_file() and not samples:
        raise UserError(
            f"{samples_path(predictions)} has samples of earlier predictions, which would not fit the new ones",
            "remove it, give another --out, or add --samples to replace it",
        )
    if images_path(predictions).is_file() and records:
        raise UserError(
            f"{images_path(predictions)} has the numbers of earlier predictions on --images, which would not fit "
            "the new ones",
            "remove it, or give another --out",
        )


class UnfinishedPredictions:
    """The answers of predictions that are being made, written to disk after every batch. The first line holds the
    request: what identifies the model, the data and the prompt. Only the same request can be resumed."""

    def __init__(self, predictions: Path, request: dict[str, Any]) -> None:
        self.predictions, self.request = predictions, request
        self.path = predictions.with_suffix(".unfinished.jsonl")

    def begin(self) -> None:
        """Write the first line. Raise DataError if the file has answers of an interrupted run."""
        if self.path.exists() and self.path.read_bytes().count(b"\n") > 1:
            raise DataError(
                f"{self.path} has the answers of predictions that were interrupted",
                "add --resume to continue, or remove the file to start again",
            )
        self.keep(())

    def resume(self) -> "list[ImageAnswer]":
        """Return the answers in the file, without an incomplete last line. Raise DataError if they are answers to
        another request."""
        from coordexp.evaluate.answer import parse_answer
        from coordexp.evaluate.predictions import read_checked

        complete, _, _ = self.path.read_bytes().rpartition(b"\n")
        lines = complete.split(b"\n")
        before = read_checked(json.loads, lines[0] or b"null", f"{self.path}:1")
        check_same_request(self.path, before, self.request)
        return [read_checked(parse_answer, line, f"{self.path}:{k}") for k, line in enumerate(lines[1:], start=2)]

    def resume_batches(self, images: int, batch: int, options: AnswerOptions) -> "list[ImageAnswer]":
        """Return the answers in the file. Only whole batches are kept, so that the other images are asked in the
        same batches as without the interruption."""
        answers = self.resume()
        answered = len(answers) // options.answers_per_image
        if answered > images:
            raise UserError(
                f"{self.path} has answers for {answered} images, and --limit asks for {images}",
                "raise --limit, or give another --out",
            )
        if answered < images:
            answered = answered // batch * batch
        answers = answers[: answered * options.answers_per_image]
        self.keep(answers)
        return answers

    def keep(self, answers: "Sequence[ImageAnswer]") -> None:
        """Replace the file by one with only these answers, whole or not at all."""
        from coordexp.evaluate.predictions import to_json, to_line

        write_whole(self.path, f"{to_json(self.request)}\n" + "".join(map(to_line, answers)))

    def answer(
        self,
        answers: "list[ImageAnswer]",
        images: "Truth",
        answering: Answering,
        folder: Path,
        batch: int,
        warn: Callable[[str], None],
    ) -> Iterator[int]:
        """Answer the images that `answers` does not have yet, and add their answers to it and to the file, batch
        by batch. Yield the number of images of each batch."""
        for start in range(len(answers) // answering.options.answers_per_image, len(images), batch):
            of_batch = images[start : start + batch]
            soon = images[start : start + 2 * batch]  # the next batch is read during this one
            read_ahead(join_address(folder, record.image) for _, record in soon)
            new = answering.answer_batch(of_batch, folder, warn)
            self.add(new)
            answers += new
            yield len(of_batch)

    def add(self, answers: "Sequence[ImageAnswer]") -> None:
        from coordexp.evaluate.predictions import to_line

        with self.path.open("ab") as file:
            file.write("".join(map(to_line, answers)).encode("utf-8", errors="backslashreplace"))
