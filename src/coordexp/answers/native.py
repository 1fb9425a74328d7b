"""Answers in the format that Qwen3-VL itself writes: a JSON list of boxes, in a markdown fence.

    ```json
    [
        {"bbox_2d": [74, 361, 324, 808], "label": "red cup"},
        {"bbox_2d": [320, 660, 564, 956], "label": "plate"}
    ]
    ```

Each object is on a line of its own, after a tab. Numbers are from 0 to 1000, relative to the image, and are
written in ordinary tokens, digit by digit. The text is that of Qwen's own example of detection (the notebook
`2d_grounding`), so a published model has nothing to unlearn. An answer without objects has the list `[]`. There is
no form for polygons.

Reading accepts other JSON with the same content: without a fence, with text before it, a single object in place of
the list, the fields in any order, and `desc` in place of `label`. Values are checked strictly. An object that is
wrong is kept, with the reason.
"""

import itertools
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coordexp.answers.entries import PredictedObject, Reason, Span
from coordexp.answers.json_text import Broken, Value, expect, read_value, skip_space, string_content
from coordexp.answers.parse import ReadAnswer, look_up_symbols, readable_text
from coordexp.answers.segment import (
    SUPERVISED_ROLE,
    Role,
    Segment,
    TokenKind,
    escape_desc,
    make_plain_segment,
    token_ends,
    tokens_inside,
)
from coordexp.answers.table import VocabularyTable
from coordexp.data import Geometry, TrueObject, is_degenerate, to_bin, to_pixels

SCALE = 1000  # the number of the right and the bottom edge of an image
LABELS = ("label", "desc")

_FENCE = re.compile(r"```(?:json)?[ \t]*\r?\n")
_INTEGER = re.compile(r"0|[1-9][0-9]{0,3}")


def to_number(bin: int) -> int:
    """Return the number from 0 to 1000 that stands for a bin. `to_bin(number, SCALE)` is the bin again."""
    return round(to_pixels(bin, SCALE))


@dataclass(frozen=True)
class NativeText:
    """An answer as text, with the positions of its labels and of its numbers."""

    text: bytes
    labels: tuple[Span, ...]
    numbers: tuple[Span, ...]


def write_native(objects: Sequence[TrueObject], table: VocabularyTable) -> NativeText:
    """Write the objects. Raise ValueError if one is a polygon."""
    text, labels, numbers = bytearray(b"```json\n["), list[Span](), list[Span]()
    for place, item in enumerate(objects):
        if item.geometry.kind != "bbox_2d":
            raise ValueError(f"{item.desc!r} is a polygon, and native answers have boxes only")
        text += b',\n\t{"bbox_2d": [' if place else b'\n\t{"bbox_2d": ['
        for side, bin in enumerate(item.geometry.bins):
            text += b", " if side else b""
            number = str(to_number(bin)).encode()
            numbers.append((len(text), len(text) + len(number)))
            text += number
        text += b'], "label": "'
        label = escape_desc(item.desc, table).encode()
        labels.append((len(text), len(text) + len(label)))
        text += label + b'"}'
    text += b"\n]\n```" if objects else b"]\n```"
    return NativeText(bytes(text), tuple(labels), tuple(numbers))


def build_native_segment(
    prompt_ids: Sequence[int], objects: Sequence[TrueObject], table: VocabularyTable
) -> Segment:
    """Return the training sequence of an image: the prompt, and the answer with these objects. Every token of the
    answer is supervised. The digits of numbers have the role and the kind of coordinates, but no target over
    bins: they are ordinary tokens."""
    written = write_native(objects, table)
    answer = table.encode_text(written.text)
    ends, start = token_ends(answer, table.pieces), len(prompt_ids)
    ids = np.array([*prompt_ids, *answer, table.end_of_turn], dtype=np.int64)
    kinds = np.full(len(ids), TokenKind.structure, dtype=np.int8)
    kinds[:start], kinds[-1] = TokenKind.none, TokenKind.end_of_turn
    kinds[start:-1][tokens_inside(ends, written.labels)] = TokenKind.desc
    kinds[start:-1][tokens_inside(ends, written.numbers)] = TokenKind.coord
    roles = np.zeros(len(ids), dtype=np.int8)
    roles[start:-1], roles[-1] = SUPERVISED_ROLE[kinds[start:-1]], Role.end_of_turn
    return make_plain_segment(ids, roles, kinds, start)


def find_list(text: str) -> int | None:
    """Return where the list of an answer begins: at the start of the text, or after a markdown fence. Return None
    if there is neither a list nor a single object."""
    start = skip_space(text, 0)
    if text[start : start + 1] not in ("[", "{"):
        fence = _FENCE.search(text)
        start = skip_space(text, fence.end()) if fence else len(text)
    return start if text[start : start + 1] in ("[", "{") else None


def read_native(ids: Sequence[int], table: VocabularyTable) -> ReadAnswer:
    """Read the objects of any sequence of ids. This function never raises an error."""
    parts = look_up_symbols(ids, table)
    text, is_blocked = readable_text("".join(parts))
    start = find_list(text)
    if start is None:
        return ReadAnswer((), ())
    items, lost = _read_items(text, start)
    ends = list(itertools.accumulate(map(len, parts)))
    objects = [_read_object(text, item.value, ends) for item in items]
    starts = [item.begin for item in items]
    if lost is not None:
        reason = Reason.truncated if lost.at_end else Reason.syntax
        objects.append(_refuse(Reason.placeholder if is_blocked and lost.at_end else reason))
        starts.append(lost.begin)
    bounds = [*(bisect_right(ends, position) for position in starts), len(ids)]
    return ReadAnswer(tuple(objects), tuple(range(*pair) for pair in itertools.pairwise(bounds)))


class _Item(NamedTuple):
    """An item of the list. `begin` is the position of the bracket or comma before it, which decides that there is
    another object."""

    begin: int
    value: Value


class _Lost(NamedTuple):
    """An item at `begin` that cannot be read. If `at_end`, the text only stops too early."""

    begin: int
    at_end: bool


def _read_items(text: str, start: int) -> tuple[list[_Item], _Lost | None]:
    items: list[_Item] = []
    begin = start
    try:
        if text[start] == "{":
            return [_Item(start, read_value(text, start))], None
        position = skip_space(text, start + 1)
        if text[position : position + 1] == "]":
            return [], None
        while True:
            items.append(_Item(begin, read_value(text, position)))
            begin = expect(text, items[-1].value.end, ",]")
            if text[begin] == "]":
                return items, None
            position = begin + 1
    except Broken as broken:
        is_between = broken.at_end and not text[items[-1].value.end if items else start + 1 :].strip(" \t\n\r,")
        return items, None if is_between else _Lost(begin, broken.at_end)


def _refuse(reason: Reason, desc: str | None = None) -> PredictedObject:
    return PredictedObject("", None, desc, None, (), reason)


def _read_object(text: str, value: Value, ends: Sequence[int]) -> PredictedObject:
    """Return the object of an item, or the first rule that it breaks."""
    fields = [(string_content(text, name), field) for name, field in value.fields]
    names = [name for name, _ in fields]
    labels = [field for name, field in fields if name in LABELS]
    desc = string_content(text, labels[0]) if labels and labels[0].kind == "string" else None
    box = next((field for name, field in fields if name == "bbox_2d"), None)
    if value.kind != "object":
        return _refuse(Reason.not_a_mapping)
    if len(set(names)) < len(names) or len(labels) > 1:
        return _refuse(Reason.repeated_field, desc)
    if not {"bbox_2d", *LABELS}.issuperset(names):
        return _refuse(Reason.unexpected_key, desc)
    if box is None:
        return _refuse(Reason.missing_geometry, desc)
    if desc is None or not desc.strip():
        return _refuse(Reason.missing_desc if desc is None else Reason.empty_desc, desc)
    if box.kind != "array" or not all(_is_coordinate(text, item) for item in box.items):
        return _refuse(Reason.bad_geometry, desc)
    bins = tuple(to_bin(int(text[item.start : item.end]), SCALE) for item in box.items)
    if len(bins) != 4:
        return _refuse(Reason.wrong_count, desc)
    if is_degenerate("bbox_2d", bins):
        return _refuse(Reason.degenerate, desc)
    digits = (k for item in box.items for k in range(bisect_right(ends, item.start), bisect_right(ends, item.end)))
    return PredictedObject("", None, desc, Geometry("bbox_2d", bins), tuple(digits), None)


def _is_coordinate(text: str, item: Value) -> bool:
    number = text[item.start : item.end]
    return item.kind == "number" and _INTEGER.fullmatch(number) is not None and int(number) <= SCALE
