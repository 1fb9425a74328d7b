"""The repeat guard (D25): a decision on token ids, the same for every backend. Imports no torch.

It ends a sequence that has begun to loop: one token many times in a row, a run of tokens that stands several times
in a row, or more objects than any answer should have. It looks at the end of the sequence only, so that an engine
can ask after every token.

An engine loads the guard at its start, by the name `ENGINE_GUARD`, and gets the settings with each request.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from coordexp.config.rollout import RepeatTerminate
from coordexp.config.section import from_list
from coordexp.rollout.backend import FinishReason
from coordexp.vocab import VocabularyTable

Loop = Literal["token", "ngram", "keys"]
TokenId = Annotated[int, Field(ge=0)]

ENGINE_GUARD = "coordexp.rollout.engine_guard:RepeatGuard"
ARGUMENT = "coordexp_guard"  # in `SamplingParams.extra_args`


def key_pattern(table: VocabularyTable) -> tuple[int, ...]:
    """The ids that the tokenizer writes for `object_`, wherever a key may stand: an object is counted by them."""
    spelled = [
        table.encode(before + b'"object_1": {')[: -len(table.encode(b'1": {'))] for before in (b"{", b"}, ", b",")
    ]
    common = 0
    while all(len(ids) > common and ids[-1 - common] == spelled[0][-1 - common] for ids in spelled):
        common += 1
    pattern = tuple(spelled[0][len(spelled[0]) - common :])
    several = ", ".join(f'"object_{number}": {{"desc": "a", "bbox_2d": []}}' for number in (1, 2, 19, 204))
    if not common or count_keys(table.encode(f"{{{several}}}".encode()), pattern) != 4:
        raise ValueError(
            "the tokenizer writes object keys in no common way, so they cannot be counted\n"
            "  set rollout_matching.repeat_terminate.max_object_keys: null"
        )
    return pattern


def count_keys(ids: Sequence[int], pattern: Sequence[int]) -> int:
    width, wanted = len(pattern), list(pattern)
    return sum(list(ids[k : k + width]) == wanted for k in range(len(ids) - width + 1))


class KeyCounter:
    """`count_keys` of a sequence that grows, for the price of its new tokens. A shorter one is counted anew."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self._pattern = pattern
        self._keys = self._length = 0

    def count(self, ids: Sequence[int]) -> int:
        """0 if there is no pattern to count by."""
        if not self._pattern:
            return 0
        if len(ids) < self._length:
            self._keys = self._length = 0
        self._keys += count_keys(ids[max(0, self._length - len(self._pattern) + 1) :], self._pattern)
        self._length = len(ids)
        return self._keys


def loop_in(ids: Sequence[int], keys: int, guard: RepeatTerminate) -> Loop | None:
    """Why the sequence `ids` of new tokens, with so many object keys in it, should end here, if it should."""
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


def ended(
    ids: Sequence[int], end_of_turn: int, guard: RepeatTerminate, pattern: Sequence[int]
) -> tuple[list[int], FinishReason]:
    """What was written before the end of turn, and why it ended: where the guard would end it, the guard did."""
    kept = list(ids)
    if end_of_turn not in kept:
        return kept, "length"
    del kept[kept.index(end_of_turn) :]
    return kept, "repeat" if loop_in(kept, KeyCounter(pattern).count(kept), guard) else "stop"


class EngineGuard(RepeatTerminate):
    """The guard's settings as they go with a request: all of them, and what an engine cannot know."""

    key_pattern: Annotated[tuple[TokenId, ...], from_list]
    end_of_turn: TokenId

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, given: Any) -> Any:
        missing = sorted(set(cls.model_fields) - set(given)) if isinstance(given, dict) else []
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        return given

    @model_validator(mode="after")
    def _can_count(self) -> "EngineGuard":
        if self.max_object_keys is not None and not self.key_pattern:
            raise ValueError("max_object_keys needs a key_pattern to count by")
        return self

    @classmethod
    def of(cls, arguments: Mapping[str, Any] | None) -> "EngineGuard | None":
        """From a request's `extra_args`, if they ask for the guard."""
        if not arguments or ARGUMENT not in arguments:
            return None
        try:
            return cls.model_validate(arguments[ARGUMENT])
        except ValidationError as error:
            found = "; ".join(_said(one["loc"], one["msg"], one["input"]) for one in error.errors())
            raise ValueError(
                f"extra_args[{ARGUMENT!r}]: {found}\n  make it with coordexp.rollout.guard.guard_arguments"
            ) from error


def _said(where: Sequence[int | str], message: str, value: Any) -> str:
    return f"{'.'.join(map(str, where))}: {message} ({value!r})" if where else message


def guard_arguments(guard: RepeatTerminate, pattern: Sequence[int], end_of_turn: int) -> dict[str, Any]:
    """`SamplingParams.extra_args` of a request that the engine's guard watches; {} if it is disabled."""
    if not guard.enabled:
        return {}
    whole = EngineGuard(**guard.model_dump(), key_pattern=tuple(pattern), end_of_turn=end_of_turn)
    return {ARGUMENT: whole.model_dump(mode="json")}
