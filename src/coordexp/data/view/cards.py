"""The first lines of a file, each with its record, what is wrong with it, and a thumbnail of its image."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.doctor import Problem, check_image, check_record
from coordexp.data.images import image_facts
from coordexp.data.records import Record, parse_record
from coordexp.data.view.thumbnail import thumbnail


@dataclass(frozen=True, slots=True)
class Card:
    """`record` is None for a broken line, `picture` (a data address) for an image that cannot be read."""

    line: int
    record: Record | None
    problems: tuple[Problem, ...]
    picture: str | None


def read_cards(
    path: Path, limit: int, *, problems_only: bool = False, tell: Callable[[int], None] = lambda line: None
) -> Iterator[Card]:
    """At most `limit`; the rest of the file is not read. `tell` hears the number of each line."""
    given = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            tell(number)
            if not line.strip():
                continue
            card = _card(path, number, line, problems_only)
            if card is not None:
                yield card
                given += 1
            if given == limit:
                return


def _card(path: Path, number: int, line: bytes, problems_only: bool) -> Card | None:
    try:
        record = parse_record(line)
    except (ValueError, RecursionError) as error:
        return Card(number, None, (Problem("broken-line", str(error)),), None)
    problems, readable = _problems(path.parent / record.image, record)
    if problems_only and not problems:
        return None
    return Card(number, record, problems, thumbnail(path.parent / record.image) if readable else None)


def _problems(image: Path, record: Record) -> tuple[tuple[Problem, ...], bool]:
    """Of the record and of its image, and whether the image can be shown."""
    try:
        facts = image_facts(image, decode=True)
    except FileNotFoundError:
        return (Problem("image-missing", repr(record.image)), *check_record(record)), False
    except (OSError, ValueError) as error:
        return (Problem("image-unreadable", f"{record.image!r}: {error}"), *check_record(record)), False
    return (*check_image(record, facts), *check_record(record)), True
