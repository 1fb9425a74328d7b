"""Cards: the first lines of a data file, each with its record, its problems, and a thumbnail of its image."""

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.doctor import Problem, check_image, check_record
from coordexp.data.images import open_image_file, read_image_facts
from coordexp.data.records import Record, parse_record

SIDE = 480  # pixels of a thumbnail
LOSSLESS_SIDE = 128  # up to this side a thumbnail is a PNG: such a small image is a drawing, or a test


@dataclass(frozen=True, slots=True)
class Card:
    """`record` is None if the line is broken. `image` is a data URL, None if the image cannot be read."""

    line: int
    record: Record | None
    problems: tuple[Problem, ...]
    image: str | None


def read_cards(
    path: Path, limit: int, *, problems_only: bool = False, notify: Callable[[int], None] | None = None
) -> Iterator[Card]:
    """Yield at most `limit` cards; the rest of the file is not read. Call `notify` with the number of each
    line."""
    count = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if notify is not None:
                notify(number)
            if not line.strip():
                continue
            card = _make_card(path, number, line, problems_only)
            if card is not None:
                yield card
                count += 1
            if count == limit:
                return


def _make_card(path: Path, number: int, line: bytes, problems_only: bool) -> Card | None:
    try:
        record = parse_record(line)
    except (ValueError, RecursionError) as error:
        return Card(number, None, (Problem("broken-line", str(error)),), None)
    image = path.parent / record.image
    problems, is_readable = _find_problems(image, record)
    if problems_only and not problems:
        return None
    return Card(number, record, problems, make_thumbnail(image) if is_readable else None)


def _find_problems(image: Path, record: Record) -> tuple[tuple[Problem, ...], bool]:
    """Return the problems of the record and of its image, and whether the image can be shown."""
    try:
        facts = read_image_facts(image, decode=True)
    except FileNotFoundError:
        return (Problem("image-missing", repr(record.image)), *check_record(record)), False
    except (OSError, ValueError) as error:
        return (Problem("image-unreadable", f"{record.image!r}: {error}"), *check_record(record)), False
    return (*check_image(record, facts), *check_record(record)), True


def make_thumbnail(path: Path, side: int = SIDE) -> str:
    """Return a data URL of the image with sides of at most `side` pixels. Raise OSError if it is broken."""
    from PIL import ImageOps  # imported late: the page of a file without images does not need Pillow

    with open_image_file(path) as file:
        file.draft("RGB", (2 * side, 2 * side))
        image = ImageOps.exif_transpose(file).convert("RGB")
    image.thumbnail((side, side))
    kind = "PNG" if max(image.size) <= LOSSLESS_SIDE else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=82)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
