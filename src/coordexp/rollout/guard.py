"""The repeat guard: a decision on token ids, the same for every backend. Imports no torch.

The guard ends an answer that has begun to loop: one token many times in a row, a run of tokens several times in a
row, or more objects than any answer should have. It looks only at the end of the answer, so an engine can ask
after every token.

An engine loads the guard by its name, `ENGINE_GUARD`, when it starts. The settings reach it as values: with each
request (`SamplingParams.extra_args`), or for all requests of an engine (`EngineArgs.additional_config`), if those
who send requests do not know the guard.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.config.sections import from_list
from coordexp.errors import UserError
from coordexp.rollout.backend import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

Loop = Literal["token", "ngram", "keys"]
TokenId = Annotated[int, Field(ge=0)]

ENGINE_GUARD = "coordexp.rollout.repeat_guard:RepeatGuard"
ARGUMENT = "coordexp_guard"  # the key of the settings in `extra_args` and in `additional_config`


def key_pattern(table: VocabularyTable) -> tuple[int, ...]:
    """Return the ids that the tokenizer writes for `object_`, wherever a key may stand. Objects are counted by
    them."""
    spellings = [
        table.encode(before + b'"object_1": {')[: -len(table.encode(b'1": {'))] for before in (b"{", b"}, ", b",")
    ]
    common = 0
    while all(len(ids) > common and ids[-1 - common] == spellings[0][-1 - common] for ids in spellings):
        common += 1
    pattern = tuple(spellings[0][len(spellings[0]) - common :])
    several = ", ".join(f'"object_{number}": {{"desc": "a", "bbox_2d": []}}' for number in (1, 2, 19, 204))
    if not common or count_keys(table.encode(f"{{{several}}}".encode()), pattern) != 4:
        raise UserError(
            "the tokenizer does not write all object keys with the same tokens, so they cannot be counted",
            "set rollout_matching.repeat_terminate.max_object_keys: null",
        )
    return pattern


def key_pattern_for(guard: RepeatTerminate, table: VocabularyTable) -> tuple[int, ...]:
    """Return the key pattern if the guard counts objects, else an empty one."""
    return key_pattern(table) if guard.enabled and guard.max_object_keys is not None else ()


def count_keys(ids: Sequence[int], pattern: Sequence[int]) -> int:
    width, expected = len(pattern), list(pattern)
    return sum(list(ids[k : k + width]) == expected for k in range(len(ids) - width + 1))


class KeyCounter:
    """Counts the keys of a sequence that grows, looking only at its new tokens. A shorter sequence is counted from
    its start."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self._pattern = pattern
        self._keys = self._length = 0

    def count(self, ids: Sequence[int]) -> int:
        """Return the number of keys, or 0 if there is no pattern to count by."""
        if not self._pattern:
            return 0
        if len(ids) < self._length:
            self._keys = self._length = 0
        self._keys += count_keys(ids[max(0, self._length - len(self._pattern) + 1) :], self._pattern)
        self._length = len(ids)
        return self._keys


def loop_in(ids: Sequence[int], keys: int, guard: RepeatTerminate) -> Loop | None:
    """Return the reason why the guard ends an answer here, or None. `ids` are its new tokens, and `keys` is the
    number of object keys in them."""
    if not guard.enabled or len(ids) < guard.min_new_tokens:
        return None
    repeats = guard.max_consecutive_token_repeats
    if len(ids) >= repeats and len(set(ids[-repeats:])) == 1:
        return "token"
    size, times = guard.ngram_size, guard.ngram_repeats
    if len(ids) >= size * times:
        tail = list(ids[-size * times :])
        if tail[size:] == tail[:-size]:
            return "ngram"
    if guard.max_object_keys is not None and keys > guard.max_object_keys:
        return "keys"
    return None


def find_loops(tail: "Tensor", lengths: "Tensor", guard: RepeatTerminate, pattern: Sequence[int]) -> "Tensor":
    """Return a boolean per row, as `loop_in` decides, without waiting for the device. `tail` has the last tokens
    of each answer: [rows, tokens], enough for all rules. `lengths` are those of the whole answers."""
    repeats, width = guard.max_consecutive_token_repeats, tail.shape[1]
    size, whole = guard.ngram_size, guard.ngram_size * guard.ngram_repeats
    loops = lengths < 0
    if width >= repeats:
        loops = loops | (lengths >= repeats) & (tail[:, -repeats:] == tail[:, -1:]).all(1)
    if width >= whole:
        end = tail[:, -whole:]
        loops = loops | (lengths >= whole) & (end[:, size:] == end[:, :-size]).all(1)
    if guard.max_object_keys is not None and (starts := width - len(pattern) + 1) > 0:
        matches = tail[:, :starts] == pattern[0]
        for offset, id in enumerate(pattern[1:], start=1):
            matches = matches & (tail[:, offset : offset + starts] == id)
        loops = loops | (matches.sum(1) > guard.max_object_keys)
    return loops & (lengths >= guard.min_new_tokens)


def cut_at_end(
    ids: Sequence[int], end_of_turn: int, guard: RepeatTerminate, pattern: Sequence[int]
) -> tuple[list[int], FinishReason]:
    """Return the tokens before the end of turn, and why the answer ended. If the guard would end the answer there,
    it was the guard."""
    answer = list(ids)
    if end_of_turn not in answer:
        return answer, "length"
    del answer[answer.index(end_of_turn) :]
    return answer, "repeat" if loop_in(answer, KeyCounter(pattern).count(answer), guard) else "stop"


class EngineGuard(RepeatTerminate):
    """The guard's settings as an engine gets them: all of them, and the token ids that it cannot know."""

    key_pattern: Annotated[tuple[TokenId, ...], from_list]
    end_of_turn: TokenId

    @model_validator(mode="before")
    @classmethod
    def _require_all(cls, values: Any) -> Any:
        missing = sorted(set(cls.model_fields) - set(values)) if isinstance(values, dict) else []
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        return values

    @model_validator(mode="after")
    def _require_pattern(self) -> "EngineGuard":
        if self.max_object_keys is not None and not self.key_pattern:
            raise ValueError("max_object_keys needs a key_pattern to count by")
        return self

    @classmethod
    def of(cls, arguments: Mapping[str, Any] | None) -> "EngineGuard | None":
        """Return the settings in a request's `extra_args` or an engine's `additional_config`, or None. Raise
        ValueError if they are malformed: vLLM refuses the request then."""
        if not arguments or ARGUMENT not in arguments:
            return None
        try:
            return cls.model_validate(arguments[ARGUMENT])
        except ValidationError as error:
            faults = "; ".join(_describe_fault(fault) for fault in error.errors())
            raise ValueError(
                f"extra_args[{ARGUMENT!r}]: {faults}; make it with coordexp.rollout.guard.guard_arguments"
            ) from error


def _describe_fault(fault: Mapping[str, Any]) -> str:
    place = ".".join(map(str, fault["loc"]))
    return f"{place}: {fault['msg']} ({fault['input']!r})" if place else str(fault["msg"])


def guard_arguments(guard: RepeatTerminate, pattern: Sequence[int], end_of_turn: int) -> dict[str, Any]:
    """Return the `extra_args` of a request, or the `additional_config` of an engine, that the guard watches.
    Return {} if the guard is disabled."""
    if not guard.enabled:
        return {}
    settings = EngineGuard(**guard.model_dump(), key_pattern=tuple(pattern), end_of_turn=end_of_turn)
    return {ARGUMENT: settings.model_dump(mode="json")}
