"""True objects as the project writes them: `"object_1": {"desc": "red cup", "bbox_2d": ["<|coord_10|>", ...]}`.

What is written is the continuation of a prefix that ends in `{` or `}`, up to and with the brace that closes the
answer. Separators are `, ` and `: `, coordinates are quoted, and `poly` is one flat list (D9).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coordexp.data import TrueObject
from coordexp.vocab.table import VocabularyTable, normal_form

FieldOrder = Literal["desc_first", "geometry_first"]


@dataclass(frozen=True)
class Fragment:
    """`desc_spans` bound the desc values in `text`; `bins` are its coordinates in order."""

    text: bytes
    desc_spans: tuple[tuple[int, int], ...]
    bins: tuple[int, ...]


def serialise(
    objects: Sequence[TrueObject],
    *,
    after: bytes,
    first_index: int,
    order: FieldOrder,
    table: VocabularyTable,
) -> Fragment:
    """The continuation of `after` with `objects`, numbered from `first_index`, and the closing brace."""
    last = after.rstrip(b" \t\n\r")[-1:]
    if last not in (b"{", b"}", b","):
        raise ValueError(f"the prefix ends in {last!r}; an answer can be continued behind {{ , or }} only")
    text = bytearray()
    spans: list[tuple[int, int]] = []
    bins: list[int] = []
    for offset, found in enumerate(objects):
        if offset or last == b"}":
            text += b", "
        desc = f'"desc": "{_escaped(found.desc, table)}"'.encode()
        coords = ", ".join([f'"<|coord_{bin}|>"' for bin in found.geometry.bins])
        geometry = f'"{found.geometry.kind}": [{coords}]'.encode()
        text += f'"object_{first_index + offset}": {{'.encode()
        text += b"" if order == "desc_first" else geometry + b", "
        spans.append((len(text) + len(b'"desc": "'), len(text) + len(desc) - 1))
        text += desc + (b", " + geometry if order == "desc_first" else b"") + b"}"
        bins.extend(found.geometry.bins)
    return Fragment(bytes(text + b"}"), tuple(spans), tuple(bins))


def count_answer_tokens(objects: Sequence[TrueObject], table: VocabularyTable) -> int:
    """Return the number of tokens of the ground-truth answer with these objects, including the end of the turn."""
    text = serialise(objects, after=b"{", first_index=1, order="desc_first", table=table).text
    return len(table.encode(b"{" + text)) + 1


def _escaped(desc: str, table: VocabularyTable) -> str:
    """As the inside of a JSON string, without any text that the tokenizer would take for a token of its own."""
    text = json.dumps(normal_form(desc), ensure_ascii=False)[1:-1]
    if normal_form(text) != text:  # an accent behind an escape would join its last letter
        text = json.dumps(normal_form(desc))[1:-1]
    for reserved in table.reserved:
        if reserved in text:
            text = text.replace(reserved, f"\\u{ord(reserved[0]):04x}{reserved[1:]}")
    return text
