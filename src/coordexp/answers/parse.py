"""Parse the token ids of a rollout: return its objects in order, and the prefix that an answer can be continued
from.

The ids become symbol text (`answers.table`), and the text is read entry by entry in one pass. The kept prefix ends
after the last entry whose value is a complete JSON object, whether that object is valid or not. If there is no
such entry, it ends after the opening brace. The ids before that point are never changed.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from coordexp.answers.entries import Coords, PredictedObject, Reason, Span, read_any_entry, read_canonical_run
from coordexp.answers.json_text import Broken, expect, read_pair, skip_space
from coordexp.answers.table import PLACEHOLDER, STOP, UNKNOWN, VocabularyTable
from coordexp.data import BINS, Geometry


@dataclass(frozen=True, slots=True)
class ParsedRollout:
    """The objects of a rollout and its kept prefix.

    `prefix_ids` are the rollout's own ids. If the cut falls inside the next token, `remainder` is the kept part of
    that token. Together they end in `{` or `}`, so that an answer can be continued there.
    """

    objects: tuple[PredictedObject, ...]
    prefix_ids: tuple[int, ...]
    remainder: bytes
    desc_spans: tuple[Span, ...]  # positions of the desc values in the symbol text of the prefix
    highest_number: int
    truncated: bool  # the text was valid up to its end, but the outer brace was not closed
    fallback: bool  # no outer brace to continue: the prefix is `{` and nothing of the rollout is used
    unread: int  # number of objects in text that could not be read, counted by their keys

    @property
    def valid(self) -> tuple[PredictedObject, ...]:
        return tuple(prediction for prediction in self.objects if prediction.is_valid)

    @property
    def shapes(self) -> list[Geometry]:
        """Return the shapes of the valid objects."""
        return [prediction.geometry for prediction in self.objects if prediction.geometry is not None]

    @property
    def names(self) -> list[str]:
        """Return the `desc` of the valid objects."""
        return [str(prediction.desc) for prediction in self.valid]


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """The objects of an answer in order, and the positions of each one's tokens among the ids. They begin with the
    token that decides that there is another object."""

    objects: tuple[PredictedObject, ...]
    tokens: tuple[range, ...]


# Every part is possessive, so that counting takes one pass over the text.
_OBJECT_KEY = re.compile(r'"object_[0-9]{1,18}+"[ \t\n\r]*+:')

LARGEST = 10**17  # numbers from here on are not continued, because keys may have at most 18 digits
# Only the last object can have one of these reasons.
LOST = frozenset({Reason.truncated, Reason.syntax, Reason.placeholder})

FALLBACK = ParsedRollout((), (), b"{", (), 0, truncated=False, fallback=True, unread=0)


def parse_rollout(ids: Sequence[int], table: VocabularyTable) -> ParsedRollout:
    """Parse any sequence of ids. This function never raises an error."""
    parts, coords = _look_up(ids, table)
    text = "".join(parts)
    sound, is_blocked = readable_text(text)
    start = skip_space(sound, 0)
    if sound[start : start + 1] != "{":
        return replace(FALLBACK, unread=_count_keys(text, 0))
    reading = _read_entries(sound, start + 1, coords)
    objects = _reject_repeats(reading.objects)
    if lost := _reason_for_cut(reading, is_blocked):
        objects.append(PredictedObject("", None, None, None, (), lost))
    whole, at = len(parts), len(text)
    while at > reading.cut:
        whole -= 1
        at -= len(parts[whole])
    return ParsedRollout(
        tuple(objects),
        tuple(ids[:whole]),
        text[at : reading.cut].encode("latin-1"),
        tuple(reading.spans),
        max([_usable_number(prediction) for prediction in objects[: reading.kept]], default=0),
        truncated=not reading.is_closed and (reading.error is None or reading.error.at_end) and not is_blocked,
        fallback=False,
        unread=max(0, _count_keys(text, reading.end) - (lost is not None)),
    )


def entry_spans(ids: Sequence[int], table: VocabularyTable) -> tuple[Span, ...]:
    """Return the range of tokens [start, end) of each object that `parse_rollout` returns, for display.

    A range begins with the token that has the first quote of the key and ends after the token that has the end
    of the value. A token with the end of one entry and the beginning of the next belongs to both. The range of a
    last object that is cut off extends to the end of the readable text. It is empty if nothing of that object
    was written. Training does not need the ranges, so `parse_rollout` does not spend time on them.
    """
    ends, spans = _locate_entries(ids, table)

    def token_at(position: int) -> int:
        return int(np.searchsorted(ends, position, side="right"))

    return tuple(
        (token_at(start), token_at(end - 1) + 1 if end > start else token_at(start)) for start, end in spans
    )


def entry_indices(ids: Sequence[int], table: VocabularyTable) -> list[int]:
    """Return the index of the object in which each token ends, for display. The separator before an object is part
    of it. Up to the opening brace the index is -1, and after the last object it is the number of objects."""
    ends, spans = _locate_entries(ids, table)
    bounds = [spans[0][0], *(end for _, end in spans)] if spans else []
    indices: list[int] = (np.searchsorted(bounds, ends) - 1).tolist()
    return indices


def _locate_entries(ids: Sequence[int], table: VocabularyTable) -> tuple[NDArray[np.int64], list[Span]]:
    """Return the position in the symbol text at which each token ends, and the positions of the entries."""
    parts, _ = _look_up(ids, table)
    text, _ = readable_text("".join(parts))
    is_lost = [prediction.reason in LOST for prediction in parse_rollout(ids, table).objects]
    spans = _spans_in_text(text, is_lost.count(False), any(is_lost))
    return np.cumsum([len(part) for part in parts], dtype=np.int64), spans


def _spans_in_text(text: str, complete: int, is_last_lost: bool) -> list[Span]:
    """Return the positions of the complete entries in the text, and of a last one that is cut off."""
    spans: list[Span] = []
    position = text.find("{") + 1
    for _ in range(complete):
        key, value = read_pair(text, position if not spans else expect(text, position, ",") + 1)
        spans.append((key.start, value.end))
        position = value.end
    if is_last_lost:
        spans.append((len(text) - len(text[position:].lstrip(" \t\n\r,")), len(text)))
    return spans


def _count_keys(text: str, position: int) -> int:
    """Count the object keys from `position` up to the end of turn. They are found by their spelling, because text
    that is not JSON has no structure to go by."""
    stop = text.find(STOP, position)
    return len(_OBJECT_KEY.findall(text, position, len(text) if stop < 0 else stop))


def _reason_for_cut(reading: "_EntryReading", is_blocked: bool) -> Reason | None:
    """Return why an object is cut off at the end of the reading, or None if none is."""
    if is_blocked and not reading.is_closed and (reading.error is None or reading.error.at_end):
        return Reason.placeholder
    if reading.error is None:
        return None
    return Reason.truncated if reading.error.at_end else Reason.syntax


def _usable_number(prediction: PredictedObject) -> int:
    """Return the number of a key if appended keys can continue from it, else 0. Keys after a very large number
    would have too many digits to be read again."""
    number = prediction.number
    return number if number is not None and number < LARGEST else 0


def _look_up(ids: Sequence[int], table: VocabularyTable) -> tuple[Sequence[str], Coords]:
    """Return the symbols of the ids, and the coordinates among them."""
    try:
        values = np.frombuffer(array("I", ids), dtype=np.uint32)  # raises for a negative id
        parts: Sequence[str] = itemgetter(*ids)(table.symbols) if len(ids) > 1 else look_up_symbols(ids, table)
    except (OverflowError, IndexError):
        known = [id if 0 <= id < len(table.symbols) else len(table.symbols) for id in ids]
        values, parts = np.array(known, dtype=np.uint32), look_up_symbols(known, table)
    first = np.uint32(table.first_coord)
    indices = np.flatnonzero(values - first < BINS)  # ids below the first wrap around to large numbers
    return parts, Coords(indices.tolist(), (values[indices] - first).tolist())


def look_up_symbols(ids: Sequence[int], table: VocabularyTable) -> list[str]:
    """Return the symbols of any number of ids, including unknown ones."""
    return [table.symbols[id] if 0 <= id < len(table.symbols) else UNKNOWN for id in ids]


def readable_text(text: str) -> tuple[str, bool]:
    """Return the text up to the first end of turn, and whether a symbol that cannot be trained on ended it
    earlier."""
    stop = text.find(STOP)
    text = text if stop < 0 else text[:stop]
    barriers = [at for at in (text.find(PLACEHOLDER), text.find(UNKNOWN)) if at >= 0]
    return (text[: min(barriers)], True) if barriers else (text, False)


@dataclass(slots=True)
class _EntryReading:
    """The entries that have been read so far. An answer can be continued at `cut`, after the first `kept`
    objects. `end` is the position after the last entry."""

    cut: int
    end: int
    objects: list[PredictedObject]
    spans: list[Span]
    kept: int = 0
    error: Broken | None = None
    is_closed: bool = False


def _read_entries(text: str, position: int, coords: Coords) -> _EntryReading:
    reading = _EntryReading(position, position, [], [])
    pending: list[Span] = []  # spans of entries after which an answer cannot be continued yet
    end, passed = position, 0
    try:
        position = expect(text, position, '}"')
        while text[position] != "}":
            before = len(reading.objects)
            end, position, passed = read_canonical_run(text, position, coords, passed, reading.objects, pending)
            is_mapping = len(reading.objects) > before
            if not is_mapping:
                entry = read_any_entry(text, position, coords, passed)
                reading.objects.append(entry.prediction)
                pending += [entry.desc_span] if entry.desc_span else []
                passed += entry.coords
                is_mapping, end = entry.is_mapping, entry.end
                position = end
            if is_mapping:
                reading.cut, reading.kept = end, len(reading.objects)
                reading.spans += pending
                pending = []
            if position > end:  # the comma has been read already
                continue
            position = expect(text, position, ",}")
            if text[position] == ",":
                position = expect(text, position + 1, '"')
        reading.is_closed = True
    except Broken as broken:
        stops_between_entries = broken.at_end and not text[end:].strip(" \t\n\r,")
        reading.error = None if stops_between_entries else broken
    reading.end = end
    return reading


def _reject_repeats(objects: list[PredictedObject]) -> list[PredictedObject]:
    """Return the objects, with those marked as not valid whose key was written before."""
    if len({prediction.key for prediction in objects}) == len(objects):
        return objects
    seen: set[str] = set()
    result = []
    for prediction in objects:
        if prediction.key in seen and prediction.reason is not Reason.bad_key:
            prediction = prediction._replace(geometry=None, coord_indices=(), reason=Reason.repeated_key)
        seen.add(prediction.key)
        result.append(prediction)
    return result
