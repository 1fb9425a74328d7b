"""From a rollout's ids to its objects, in the order they appear, and to the prefix that can be continued.

One pass: the ids become symbol text (`vocab.table`), the text is read entry by entry, and the place behind the
last whole object is where a continuation may start. Ids before that place are never changed.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from coordexp.correction.entries import Coords, PredictedObject, Reason, Span, any_entry, canonical_run
from coordexp.correction.json_text import Broken, expect, skip_space
from coordexp.data import BINS
from coordexp.vocab.table import PLACEHOLDER, STOP, UNKNOWN, VocabularyTable


@dataclass(frozen=True, slots=True)
class ParsedRollout:
    """`prefix_ids` are ids of the rollout as they are. Where the cut falls inside of the token behind them,
    `remainder` is what is kept of it. The two together end in `{` or `}`, ready for a continuation."""

    objects: tuple[PredictedObject, ...]
    prefix_ids: tuple[int, ...]
    remainder: bytes
    desc_spans: tuple[tuple[int, int], ...]  # where desc values stand in the symbol text of the prefix
    highest_number: int
    truncated: bool  # the text was sound and stopped before the container was closed
    fallback: bool  # no container to continue: the prefix is `{` and nothing of the rollout is used
    unread: int  # objects that the rollout wrote in text that is not read, seen by their keys alone

    @property
    def valid(self) -> tuple[PredictedObject, ...]:
        return tuple(found for found in self.objects if found.valid)


# Every part is possessive, so that counting takes one pass over the text.
_OBJECT_KEY = re.compile(r'"object_[0-9]{1,18}+"[ \t\n\r]*+:')

LARGEST = 10**17  # keys have at most 18 digits
LOST = frozenset({Reason.truncated, Reason.syntax, Reason.placeholder})  # of an object that is cut off: the last

FALLBACK = ParsedRollout((), (), b"{", (), 0, truncated=False, fallback=True, unread=0)


def parse_rollout(ids: Sequence[int], table: VocabularyTable) -> ParsedRollout:
    """Never raises, whatever the ids."""
    parts, coords = look_up(ids, table)
    text = "".join(parts)
    sound, blocked = readable(text)
    start = skip_space(sound, 0)
    if sound[start : start + 1] != "{":
        return replace(FALLBACK, unread=_keys_behind(text, 0))
    reading = _read_entries(sound, start + 1, coords)
    objects = _without_repeats(reading.objects)
    if lost := _lost_to(reading, blocked):
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
        max([_counted(found.number) for found in objects[: reading.kept]], default=0),
        truncated=not reading.closed and (reading.lost is None or reading.lost.at_end) and not blocked,
        fallback=False,
        unread=max(0, _keys_behind(text, reading.end) - (lost is not None)),
    )


def _keys_behind(text: str, position: int) -> int:
    """Count the object keys from `position` up to the end of turn. They are found by their spelling, because text
    that is not JSON has no structure to go by."""
    stop = text.find(STOP, position)
    return len(_OBJECT_KEY.findall(text, position, len(text) if stop < 0 else stop))


def _lost_to(reading: "_Reading", blocked: bool) -> Reason | None:
    """Why an object was begun, or was still to come, and is cut off."""
    if blocked and not reading.closed and (reading.lost is None or reading.lost.at_end):
        return Reason.placeholder
    if reading.lost is None:
        return None
    return Reason.truncated if reading.lost.at_end else Reason.syntax


def _counted(number: int | None) -> int:
    """A key number that numbering goes on from. A larger one would leave no readable number to go on with."""
    return number if number is not None and number < LARGEST else 0


def look_up(ids: Sequence[int], table: VocabularyTable) -> tuple[Sequence[str], Coords]:
    """The symbols of the ids, and the coordinates among them."""
    try:
        values = np.frombuffer(array("I", ids), dtype=np.uint32)  # raises for an id below 0
        parts: Sequence[str] = itemgetter(*ids)(table.symbols) if len(ids) > 1 else _each(ids, table)
    except (OverflowError, IndexError):
        known = [id if 0 <= id < len(table.symbols) else len(table.symbols) for id in ids]
        values, parts = np.array(known, dtype=np.uint32), _each(known, table)
    first = np.uint32(table.first_coord)
    indices = np.flatnonzero(values - first < BINS)  # what lies before the first wraps around
    return parts, Coords(indices.tolist(), (values[indices] - first).tolist())


def _each(ids: Sequence[int], table: VocabularyTable) -> list[str]:
    return [table.symbols[id] if id < len(table.symbols) else UNKNOWN for id in ids]


def readable(text: str) -> tuple[str, bool]:
    """The text up to the first stop, and whether something that cannot be trained on ended it before that."""
    stop = text.find(STOP)
    text = text if stop < 0 else text[:stop]
    walls = [at for at in (text.find(PLACEHOLDER), text.find(UNKNOWN)) if at >= 0]
    return (text[: min(walls)], True) if walls else (text, False)


@dataclass(slots=True)
class _Reading:
    """What has been read so far. A continuation can follow `cut`, behind the first `kept` objects; `end` is behind
    the last entry that was read."""

    cut: int
    end: int
    objects: list[PredictedObject]
    spans: list[Span]
    kept: int = 0
    lost: Broken | None = None
    closed: bool = False


def _read_entries(text: str, position: int, coords: Coords) -> _Reading:
    reading = _Reading(position, position, [], [])
    pending: list[Span] = []  # of entries that a continuation cannot follow yet
    end, passed = position, 0
    try:
        position = expect(text, position, '}"')
        while text[position] != "}":
            before = len(reading.objects)
            end, position, passed = canonical_run(text, position, coords, passed, reading.objects, pending)
            is_mapping = len(reading.objects) > before
            if not is_mapping:
                entry = any_entry(text, position, coords, passed)
                reading.objects.append(entry.found)
                pending += [entry.desc_span] if entry.desc_span else []
                passed += entry.coords
                is_mapping, end = entry.is_mapping, entry.end
                position = end
            if is_mapping:
                reading.cut, reading.kept = end, len(reading.objects)
                reading.spans += pending
                pending = []
            if position > end:  # the comma was taken along
                continue
            position = expect(text, position, ",}")
            if text[position] == ",":
                position = expect(text, position + 1, '"')
        reading.closed = True
    except Broken as broken:
        just_stops = broken.at_end and not text[end:].strip(" \t\n\r,")
        reading.lost = None if just_stops else broken
    reading.end = end
    return reading


def _without_repeats(objects: list[PredictedObject]) -> list[PredictedObject]:
    """A key written before makes an object invalid."""
    if len({found.key for found in objects}) == len(objects):
        return objects
    seen: set[str] = set()
    result = []
    for found in objects:
        if found.key in seen and found.reason is not Reason.bad_key:
            found = found._replace(geometry=None, coord_indices=(), reason=Reason.repeated_key)
        seen.add(found.key)
        result.append(found)
    return result
