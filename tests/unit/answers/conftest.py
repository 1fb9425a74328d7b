"""The token core on two vocabularies: every test that asks for `core` runs on both."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordexp.answers.correct import correct
from coordexp.answers.match import MatchResult
from coordexp.answers.parse import ParsedRollout, parse_rollout
from coordexp.answers.segment import Role, Segment
from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.data import Geometry, TrueObject
from tests.vocabularies import encode, table

PROMPT = [5, 6, 7]


@dataclass(frozen=True)
class Core:
    """All steps from the text of a rollout to its segment, on one vocabulary."""

    table: VocabularyTable
    settings: RolloutMatching = field(default_factory=RolloutMatching)

    def parse(self, text: str, *, stop: bool = True) -> ParsedRollout:
        ids = encode(text, self.table)
        return parse_rollout([*ids, self.table.end_of_turn] if stop else ids, self.table)

    def build(
        self, text: str, truth: list[TrueObject], *, order: str = "desc_first", stop: bool = True
    ) -> tuple[ParsedRollout, MatchResult, Segment]:
        ids = encode(text, self.table)
        ids = [*ids, self.table.end_of_turn] if stop else ids
        result = correct(PROMPT, ids, truth, table=self.table, order=order, settings=self.settings)
        return result.parsed, result.match, result.segment

    def answer(self, segment: Segment) -> str:
        """Return the text of the answer, without its end of turn."""
        *ids, last = segment.ids[segment.prompt_length :].tolist()
        assert last == self.table.end_of_turn
        return self.table.bytes_of(ids).decode()

    def objects(self, segment: Segment) -> dict[str, Any]:
        return json.loads(quote_bare_coords(self.answer(segment)))

    def tokens(self, segment: Segment, role: Role) -> list[str]:
        return [
            self.table.pieces[id].decode(errors="replace")
            for id, token_role in zip(segment.ids, segment.roles, strict=True)
            if token_role == role
        ]


@pytest.fixture(params=["small", "qwen"])
def core(request: pytest.FixtureRequest) -> Core:
    return Core(table(request.param))


def quote_bare_coords(text: str) -> str:
    """Return the text with quotes around the coordinate tokens outside strings, so that a JSON reader
    accepts it."""
    pattern = r'"(?:[^"\\]|\\.)*"|<\|coord_[0-9]+\|>'
    return re.sub(pattern, lambda m: m.group() if m.group().startswith('"') else f'"{m.group()}"', text)


def box(*bins: int) -> Geometry:
    return Geometry("bbox_2d", bins)


def poly(*bins: int) -> Geometry:
    return Geometry("poly", bins)


def coords(geometry: Geometry, *, quoted: bool = True) -> str:
    mark = '"' if quoted else ""
    return "[" + ", ".join(f"{mark}<|coord_{bin}|>{mark}" for bin in geometry.bins) + "]"


def entry(key: str, desc: str, geometry: Geometry, *, geometry_first: bool = False, quoted: bool = True) -> str:
    fields = [
        f'"desc": {json.dumps(desc, ensure_ascii=False)}',
        f'"{geometry.kind}": {coords(geometry, quoted=quoted)}',
    ]
    return f'"{key}": {{{", ".join(reversed(fields) if geometry_first else fields)}}}'


def answer(*entries: str) -> str:
    return "{" + ", ".join(entries) + "}"
