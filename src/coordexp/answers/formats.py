"""The format of answers: how objects are written as tokens, and read from them.

`coord_tokens` is the project's own format, with 1,000 coordinate tokens. `native` is the one that Qwen3-VL itself
writes. Training, evaluation and prediction know a format only by the interface `AnswerFormat`. Only the correction
of rollouts needs coordinate tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args

from coordexp.answers.correct import correct
from coordexp.answers.native import build_native_segment, find_list, read_native, write_native
from coordexp.answers.parse import ReadAnswer, entry_spans, parse_rollout
from coordexp.answers.segment import FieldOrder, Segment, count_answer_tokens
from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RolloutMatching
from coordexp.config.settings import AnswerFormatName
from coordexp.data import TrueObject
from coordexp.errors import UserError
from coordexp.families import find_family, read_model_type
from coordexp.files import json_object

FORMATS: tuple[AnswerFormatName, ...] = get_args(AnswerFormatName)
NOTE_FILE = "coordexp.json"  # in every checkpoint: how to ask the model, and how to read its answers


class AnswerFormat(Protocol):
    """Writes and reads answers with one tokenizer."""

    @property
    def name(self) -> AnswerFormatName: ...

    @property
    def table(self) -> VocabularyTable: ...

    def write(self, prompt_ids: Sequence[int], objects: Sequence[TrueObject]) -> Segment:
        """Return the training sequence of an image: its prompt, and the answer with these objects. Raise
        ValueError if the format cannot express one of them."""

    def count(self, objects: Sequence[TrueObject]) -> int:
        """Return the number of tokens of the answer with these objects, including the end of turn, without its
        training sequence. Raise ValueError if the format cannot express one of them."""

    def read(self, ids: Sequence[int]) -> ReadAnswer:
        """Return the objects of any sequence of ids, with the reasons of those that are not valid."""


@dataclass(frozen=True)
class CoordTokenAnswers:
    """Answers with coordinate tokens. `order` and `settings` are those of training; reading does not need them."""

    table: VocabularyTable
    order: FieldOrder = "desc_first"
    settings: RolloutMatching = field(default_factory=RolloutMatching)

    @property
    def name(self) -> AnswerFormatName:
        return "coord_tokens"

    def write(self, prompt_ids: Sequence[int], objects: Sequence[TrueObject]) -> Segment:
        """Return the correction of an empty rollout, which misses every object."""
        return correct(prompt_ids, (), objects, table=self.table, order=self.order, settings=self.settings).segment

    def count(self, objects: Sequence[TrueObject]) -> int:
        return count_answer_tokens(objects, self.table, self.order)

    def read(self, ids: Sequence[int]) -> ReadAnswer:
        objects = parse_rollout(ids, self.table).objects
        # The token before the key of an object decides that there is another one.
        starts = [max(0, start - 1) for start, _ in entry_spans(ids, self.table)]
        return ReadAnswer(objects, tuple(range(*pair) for pair in itertools.pairwise([*starts, len(ids)])))


@dataclass(frozen=True)
class NativeAnswers:
    """Answers as Qwen3-VL writes them (`answers.native`)."""

    table: VocabularyTable

    @property
    def name(self) -> AnswerFormatName:
        return "native"

    def write(self, prompt_ids: Sequence[int], objects: Sequence[TrueObject]) -> Segment:
        return build_native_segment(prompt_ids, objects, self.table)

    def count(self, objects: Sequence[TrueObject]) -> int:
        return len(self.table.encode_text(write_native(objects, self.table).text)) + 1

    def read(self, ids: Sequence[int]) -> ReadAnswer:
        return read_native(ids, self.table)


def load_format(
    folder: Path,
    name: AnswerFormatName | None = None,
    *,
    order: FieldOrder = "desc_first",
    settings: RolloutMatching | None = None,
) -> AnswerFormat:
    """Return the format of a checkpoint's answers, with the checkpoint's tokenizer. Without a name, it is the one
    that training recorded in the checkpoint. Raise UserError if the checkpoint cannot answer in this format."""
    name = name or recorded_format(folder)
    if name == "coord_tokens":
        table = VocabularyTable.from_folder(folder)
        return CoordTokenAnswers(table, order) if settings is None else CoordTokenAnswers(table, order, settings)
    if not find_family(folder).has_relative_boxes:
        raise UserError(
            f"{folder}: models of the type {read_model_type(folder)} do not write boxes as numbers from 0 to 1000",
            "use coordinate tokens: coordexp model add-coords, and the answer format coord_tokens",
        )
    return NativeAnswers(VocabularyTable.from_folder(folder, needs_coords=False))


def recorded_format(folder: Path) -> AnswerFormatName:
    """Return the format that training recorded in a checkpoint. One without a note has coordinate tokens."""
    name = read_note(folder).get("answer_format", "coord_tokens")
    for known in FORMATS:
        if name == known:
            return known
    problem = f"{folder / NOTE_FILE}: the answer format {name!r} is unknown"
    raise UserError(problem, f"give one of these with --answer-format: {', '.join(FORMATS)}")


def read_note(folder: Path) -> dict[str, Any]:
    """Return what training recorded in a checkpoint, or {} if there is no note."""
    note = folder / NOTE_FILE
    return json_object(note.read_bytes(), str(note)) if note.is_file() else {}


def is_readable(text: str, name: AnswerFormatName) -> bool:
    """Return whether an answer begins as the format requires. Nothing is read from an answer that does not."""
    return find_list(text) is not None if name == "native" else text.lstrip().startswith("{")
