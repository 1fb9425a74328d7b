"""Read a single entry of an answer, `"object_1": {...}`: its content, or the reason why it cannot be used.

Entries in the project's own format are read with one regular expression (`read_canonical_run`). `read_any_entry`
reads any other valid JSON. For text that both accept they give the same result.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from coordexp.answers.json_text import COORD, Value, read_pair, string_content
from coordexp.answers.table import COORD_BASE
from coordexp.data import Geometry, is_degenerate


class Reason(StrEnum):
    """The reason why an object is not used."""

    truncated = "truncated"  # the answer ends inside the object
    syntax = "syntax"  # not JSON; the object and everything after it are cut off
    placeholder = "placeholder"  # contains an image or video token, which no training sequence may have; cut off
    bad_key = "bad_key"  # the key is not object_N
    repeated_key = "repeated_key"
    not_a_mapping = "not_a_mapping"
    unexpected_key = "unexpected_key"
    repeated_field = "repeated_field"
    missing_desc = "missing_desc"  # absent, or not a string
    empty_desc = "empty_desc"
    missing_geometry = "missing_geometry"
    two_geometries = "two_geometries"
    bad_geometry = "bad_geometry"  # not a flat list of coordinates
    wrong_count = "wrong_count"
    degenerate = "degenerate"  # inverted, or without area
    stray_coord = "stray_coord"  # a coordinate token outside the geometry
    ambiguous = "ambiguous"  # coordinates spelled in ordinary tokens, so there is no single position to supervise


class PredictedObject(NamedTuple):
    """An object that was read from a rollout.

    `coord_indices` are the positions of its coordinate tokens in the rollout's ids, in the order of
    `geometry.bins`. An object that is not valid has none.
    """

    key: str
    number: int | None  # N of object_N
    desc: str | None
    geometry: Geometry | None
    coord_indices: tuple[int, ...]
    reason: Reason | None

    @property
    def is_valid(self) -> bool:
        return self.reason is None


Span = tuple[int, int]


class Coords(NamedTuple):
    """The coordinate tokens of a rollout: their positions in its ids, and their bins."""

    indices: list[int]
    bins: list[int]


class ParsedEntry(NamedTuple):
    """An entry with its place in the text. `coords` counts the coordinate tokens in it. `end` is the position
    after its value."""

    prediction: PredictedObject
    desc_span: Span | None
    is_mapping: bool
    coords: int
    end: int


_INDEXED = re.compile(r"object_([0-9]{1,18})")
_COORDS = re.compile(COORD)
_SPELLED = re.compile(r"<\|coord_[0-9]{1,3}\|>")

_DESC = r'"desc": "([ !#-\[\]-~]*[!#-\[\]-~])"'
_LIST = rf'"(bbox_2d|poly)": \["({COORD}(?:", "{COORD})*+)"\]'
_canonical = re.compile(
    rf'"(object_([0-9]{{1,18}}))": \{{(?:{_DESC}, {_LIST}|{_LIST}, {_DESC})\}}(, (?="))?'
).match


def read_canonical_run(
    text: str, position: int, coords: Coords, passed: int, objects: list[PredictedObject], spans: list[Span]
) -> tuple[int, int, int]:
    """Read consecutive entries in the project's own format, and append them to `objects` and their desc to
    `spans`.

    `passed` is the number of coordinate tokens before `position`. Return the position after the last entry, the
    position to continue reading at, and the number of coordinate tokens passed by then.

    Nearly every entry of a trained model is read here. Hence the single loop, and `tuple.__new__`, which creates
    the same named tuples in half the time of a normal call.
    """
    bins, indices, end = coords.bins, coords.indices, position
    while match := _canonical(text, position):
        key, digits, desc, kind, array, kind_first, array_first, desc_last, more = match.groups()
        if desc is None:
            desc, kind, array = desc_last, kind_first, array_first
            spans.append(match.span(8))
        else:
            spans.append(match.span(3))
        stop = passed + len(array) // 5 + 1  # a coordinate is 1 character, and `", "` between two is 4
        geometry, reason = _make_geometry(kind, tuple(bins[passed:stop]))
        where = tuple(indices[passed:stop]) if reason is None else ()
        objects.append(_new(PredictedObject, (key, int(digits), desc, geometry, where, reason)))
        passed = stop
        position = end = match.end()
        if not more:
            break
        end -= 2
    return end, position, passed


_new = tuple.__new__


def read_any_entry(text: str, position: int, coords: Coords, passed: int) -> ParsedEntry:
    """Return the entry at `position`, in whatever form. Raise `Broken` where the text stops being JSON."""
    key_value, value = read_pair(text, position)
    key = string_content(text, key_value)
    indexed = _INDEXED.fullmatch(key)
    fields = [(string_content(text, name), field) for name, field in value.fields]
    desc_value = next((field for name, field in fields if name == "desc" and field.kind == "string"), None)
    desc = None if desc_value is None else string_content(text, desc_value)
    count = len(_COORDS.findall(text, position, value.end))
    geometry, reason = _read_content(text, value, fields, desc, count)
    if indexed is None:
        geometry, reason = None, Reason.bad_key
    indices = tuple(coords.indices[passed : passed + count]) if geometry else ()
    number = int(indexed[1]) if indexed else None
    desc_span = None if desc_value is None else (desc_value.start + 1, desc_value.end - 1)
    prediction = PredictedObject(key, number, desc, geometry, indices, reason)
    return ParsedEntry(prediction, desc_span, value.kind == "object", count, value.end)


def _read_content(
    text: str, value: Value, fields: list[tuple[str, Value]], desc: str | None, coords: int
) -> tuple[Geometry | None, Reason | None]:
    """Return the geometry of a valid object, or the first rule that it breaks."""
    names = [name for name, _ in fields]
    geometries = [(name, field) for name, field in fields if name in ("bbox_2d", "poly")]
    if value.kind != "object":
        return None, Reason.not_a_mapping
    if len(set(names)) < len(names):
        return None, Reason.repeated_field
    if not {"desc", "bbox_2d", "poly"}.issuperset(names):
        return None, Reason.unexpected_key
    if len(geometries) != 1:
        return None, Reason.two_geometries if geometries else Reason.missing_geometry
    if desc is None or not desc.strip():
        return None, Reason.missing_desc if desc is None else Reason.empty_desc
    ((kind, array),) = geometries
    bins, reason = _read_bins(text, array)
    if reason is None and coords != len(bins):
        reason = Reason.stray_coord
    return (None, reason) if reason else _make_geometry(kind, bins)


def _read_bins(text: str, array: Value) -> tuple[tuple[int, ...], Reason | None]:
    if array.kind != "array":
        return (), Reason.bad_geometry
    bins: list[int] = []
    is_spelled = False
    for item in array.items:
        inner = text[item.start : item.end].strip('"')
        if item.kind in ("coord", "string") and _COORDS.fullmatch(inner):
            bins.append(ord(inner) - COORD_BASE)
        elif item.kind == "string" and _SPELLED.fullmatch(string_content(text, item)):
            is_spelled = True
        else:
            return (), Reason.bad_geometry
    return tuple(bins), Reason.ambiguous if is_spelled else None


def _make_geometry(kind: str, bins: tuple[int, ...]) -> tuple[Geometry | None, Reason | None]:
    """Return the geometry with these bins, or the reason why there is none."""
    if kind == "bbox_2d":
        if len(bins) != 4:
            return None, Reason.wrong_count
        has_area = bins[0] < bins[2] and bins[1] < bins[3]
        return (_new(Geometry, ("bbox_2d", bins)), None) if has_area else (None, Reason.degenerate)
    if len(bins) < 6 or len(bins) % 2:
        return None, Reason.wrong_count
    return (None, Reason.degenerate) if is_degenerate("poly", bins) else (Geometry("poly", bins), None)
