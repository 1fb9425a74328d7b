"""From a rollout's ids to its objects, in the order they appear, and to the prefix that can be continued.

One pass: the ids become symbol text (`vocab.table`), the text is read entry by entry, and the place behind the
last whole object is where a continuation may start. Ids before that place are never changed.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from coordexp.data import BINS
from coordexp.parse.entries import (
    CANONICAL,
    Coords,
    Entry,
    PredictedObject,
    Reason,
    any_entry,
    canonical_entry,
)
from coordexp.parse.json_text import Broken, expect, skip_space
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
    truncated: bool  # the container was never closed
    fallback: bool  # no container to continue: the prefix is `{` and nothing of the rollout is used

    @property
    def valid(self) -> tuple[PredictedObject, ...]:
        return tuple(found for found in self.objects if found.valid)


FALLBACK = ParsedRollout((), (), b"{", (), 0, truncated=False, fallback=True)


def parse_rollout(ids: Sequence[int], table: VocabularyTable) -> ParsedRollout:
    """Never raises, whatever the ids."""
    parts, coords = _look_up(ids, table)
    text = "".join(parts)
    readable, blocked = _readable(text)
    start = skip_space(readable, 0)
    if readable[start : start + 1] != "{":
        return FALLBACK
    entries, lost, closed = _read_entries(readable, start + 1, coords)
    objects = _without_repeats([entry.found for entry in entries])
    if lost is not None:
        cause = Reason.placeholder if blocked else Reason.truncated
        objects.append(PredictedObject("", None, None, None, (), cause if lost.at_end else Reason.syntax))
    while entries and not entries[-1].is_mapping:  # a continuation can follow a mapping only
        entries.pop()
    cut = entries[-1].end if entries else start + 1
    whole, at = len(parts), len(text)
    while at > cut:
        whole -= 1
        at -= len(parts[whole])
    return ParsedRollout(
        tuple(objects),
        tuple(ids[:whole]),
        text[at:cut].encode("latin-1"),
        tuple([entry.desc_span for entry in entries if entry.desc_span]),
        max([entry.found.number or 0 for entry in entries], default=0),
        truncated=not closed,
        fallback=False,
    )


def _look_up(ids: Sequence[int], table: VocabularyTable) -> tuple[Sequence[str], Coords]:
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


def _readable(text: str) -> tuple[str, bool]:
    """The text up to the first stop, and whether something that cannot be trained on ended it before that."""
    stop = text.find(STOP)
    text = text if stop < 0 else text[:stop]
    walls = [at for at in (text.find(PLACEHOLDER), text.find(UNKNOWN)) if at >= 0]
    return (text[: min(walls)], True) if walls else (text, False)


def _read_entries(text: str, position: int, coords: Coords) -> tuple[list[Entry], Broken | None, bool]:
    """The whole entries; what broke the reading where that lost one; whether the container was closed."""
    entries: list[Entry] = []
    passed = 0
    canonical = CANONICAL.match
    try:
        position = expect(text, position, '}"')
        while text[position] != "}":
            if match := canonical(text, position):
                entry = canonical_entry(match, coords, passed)
                position = match.end()
            else:
                entry = any_entry(text, position, coords, passed)
                position = entry.end
            entries.append(entry)
            passed += entry.coords
            if position > entry.end:  # the match took the comma along
                continue
            position = expect(text, position, ",}")
            if text[position] == ",":
                position = expect(text, position + 1, '"')
    except Broken as broken:
        return entries, None if _between_entries(broken, entries, text) else broken, False
    return entries, None, True


def _between_entries(broken: Broken, entries: list[Entry], text: str) -> bool:
    """Whether the text just stops, behind an entry or the opening brace, so that no object is lost."""
    rest = text[entries[-1].end :] if entries else text.partition("{")[2]
    return broken.at_end and not rest.strip(" \t\n\r,")


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
