"""The repeat guard (D25): a decision on token ids, the same for every backend. Imports no torch.

It ends a sequence that has begun to loop: one token many times in a row, a run of tokens that stands several times
in a row, or more objects than any answer should have. It looks at the end of the sequence only, so that an engine
can ask after every token.
"""

from collections.abc import Sequence
from typing import Literal

from coordexp.config.rollout import RepeatTerminate
from coordexp.vocab import VocabularyTable

Loop = Literal["token", "ngram", "keys"]


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
