"""Read JSON strictly from symbol text (see `answers.table`), with the position of every value.

The reader accepts what RFC 8259 accepts in UTF-8, and in addition a bare coordinate in place of a value. A
string must be valid UTF-8 without raw control characters, bad escapes or lone surrogates. Numbers of more than
about 1,000 characters and nesting deeper than 64 levels are errors, as the RFC allows. So, apart from bare
coordinates, every JSON reader can read the text that this one accepts.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from coordexp.answers.table import COORD_BASE

MAX_DEPTH = 64

COORD = f"[{chr(COORD_BASE)}-{chr(COORD_BASE + 999)}]"
SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,500})(?:\.[0-9]{1,250})?(?:[eE][+-]?[0-9]{1,200})?(?![0-9.eE+-])")
_LITERAL = re.compile(r"true|false|null")
_HEX = "[0-9a-fA-F]"
_WIDE = (  # a character of several bytes, as RFC 3629 defines it
    r"[\xc2-\xdf][\x80-\xbf]"
    r"|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]"
    r"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2}"
)
_ESCAPE = (
    r'\\["\\/bfnrt]'
    rf"|\\u(?:[0-9a-cefA-CEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
    rf"|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})"
)
# Possessive: the inside of a string can be read in one way only, so backtracking is never needed.
_INSIDE = rf"(?:[ !#-\[\]-\x7f]++|{_WIDE}|{_ESCAPE}|{COORD})*+"
_STRING = re.compile(rf'"{_INSIDE}"')
# A string, a number or a literal that the end of the text cuts off.
_HALF_PAIR = rf"\\u[dD][89abAB]{_HEX}{{2}}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?"
_HALF_WIDE = r"[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2}"
_CUT_STRING = re.compile(rf'"{_INSIDE}(?:\\(?:u{_HEX}{{0,3}})?|{_HALF_PAIR}|{_HALF_WIDE})?\Z')
_CUT_SCALAR = re.compile(
    r"(?:-|-?(?:0|[1-9][0-9]{0,500})(?:\.[0-9]{0,250})?(?:[eE][+-]?[0-9]{0,200})?|tr?u?|fa?l?s?|nu?l?)\Z"
)
_COORD = re.compile(COORD)


class Broken(Exception):
    """The text is not JSON at `position`. If `at_end`, it is valid so far and only stops too early."""

    def __init__(self, position: int, at_end: bool) -> None:
        super().__init__(position, at_end)
        self.position = position
        self.at_end = at_end


@dataclass(slots=True)
class Value:
    """A JSON value, at text[start:end]. `kind` is string, coord, number, literal, array or object."""

    kind: str
    start: int
    end: int
    items: list["Value"]
    fields: list[tuple["Value", "Value"]]


def read_value(text: str, position: int, depth: int = 0) -> Value:
    """Return the value that starts at `position`, or after white space there. Raise `Broken` if it is not
    JSON."""
    position = skip_space(text, position)
    head = text[position : position + 1]
    if head in ("{", "["):
        if depth >= MAX_DEPTH:
            raise Broken(position, at_end=False)
        return (_read_object if head == "{" else _read_array)(text, position, depth)
    if head == '"':
        return read_string(text, position)
    for kind, pattern in (("coord", _COORD), ("number", _NUMBER), ("literal", _LITERAL)):
        if match := pattern.match(text, position):
            return Value(kind, position, match.end(), [], [])
    raise Broken(position, at_end=position == len(text) or _CUT_SCALAR.match(text, position) is not None)


def read_pair(text: str, position: int, depth: int = 0) -> tuple[Value, Value]:
    """Return a key and its value. The key starts at `position`, or after white space there."""
    key = read_string(text, expect(text, position, '"'))
    return key, read_value(text, expect(text, key.end, ":") + 1, depth)


def read_string(text: str, position: int) -> Value:
    match = _STRING.match(text, position)
    if match is None:
        raise Broken(position, at_end=_CUT_STRING.match(text, position) is not None)
    return Value("string", position, match.end(), [], [])


def string_content(text: str, value: Value) -> str:
    """Return the text that a string stands for: escapes and UTF-8 are decoded, coordinates are their token
    text."""
    raw = text[value.start + 1 : value.end - 1]
    if _COORD.search(raw):
        raw = _COORD.sub(_spell_coord, raw)
    decoded = raw.encode("latin-1").decode("utf-8")
    content: Any = json.loads(f'"{decoded}"') if "\\" in decoded else decoded
    return str(content)


def _spell_coord(match: re.Match[str]) -> str:
    return f"<|coord_{ord(match.group()) - COORD_BASE}|>"


def skip_space(text: str, position: int) -> int:
    match = SPACE.match(text, position)
    assert match is not None
    return match.end()


def expect(text: str, position: int, characters: str) -> int:
    """Return the position of the next character after white space. Raise `Broken` if it is not in
    `characters`."""
    position = skip_space(text, position)
    if text[position : position + 1] and text[position] in characters:
        return position
    raise Broken(position, at_end=position == len(text))


def _read_array(text: str, start: int, depth: int) -> Value:
    items: list[Value] = []
    position = skip_space(text, start + 1)
    if text[position : position + 1] == "]":
        return Value("array", start, position + 1, items, [])
    while True:
        items.append(read_value(text, position, depth + 1))
        position = expect(text, items[-1].end, ",]")
        if text[position] == "]":
            return Value("array", start, position + 1, items, [])
        position += 1


def _read_object(text: str, start: int, depth: int) -> Value:
    fields: list[tuple[Value, Value]] = []
    position = skip_space(text, start + 1)
    if text[position : position + 1] == "}":
        return Value("object", start, position + 1, [], fields)
    while True:
        key, value = read_pair(text, position, depth + 1)
        fields.append((key, value))
        position = expect(text, value.end, ",}")
        if text[position] == "}":
            return Value("object", start, position + 1, [], fields)
        position += 1
