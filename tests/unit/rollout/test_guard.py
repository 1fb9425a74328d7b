"""The repeat guard: when it ends a sequence, how it counts objects, and that both of its forms agree."""

import json
import random
from collections import Counter

import pytest
import torch

from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import UserError
from coordexp.rollout.guard import (
    ARGUMENT,
    EngineGuard,
    KeyCounter,
    count_keys,
    cut_at_end,
    find_loops,
    guard_arguments,
    key_pattern,
    loop_in,
)
from coordexp.rollout.hugging_face import Guard
from tests.rollouts import random_shape
from tests.vocabularies import encode, table


def guard(**changes) -> RepeatTerminate:
    """Return a guard whose rules are all out of reach, except for the changes."""
    wide = {"min_new_tokens": 0, "max_consecutive_token_repeats": 1000, "ngram_size": 1000}
    return RepeatTerminate(enabled=True, **(wide | changes))


def answer(objects: int, separator: str = ", ") -> str:
    chooser = random.Random(objects)
    entries = []
    for number in range(1, objects + 1):
        shape = random_shape(chooser)
        coords = ", ".join(f'"<|coord_{bin}|>"' for bin in shape.bins)
        desc = chooser.choice(("red cup", "dog", "an object", "the 3rd cat"))
        entries.append(f'"object_{number}": {{"desc": "{desc}", "{shape.kind}": [{coords}]}}')
    return "{" + separator.join(entries) + "}"


@pytest.mark.scenario("R33.C4", on="pure")
def test_one_token_ends_the_sequence_at_its_limit_in_a_row_and_not_before():
    rule = guard(max_consecutive_token_repeats=4)
    assert loop_in([1, 2, 7, 7, 7], 0, rule) is None
    assert loop_in([1, 2, 7, 7, 7, 7], 0, rule) == "token"
    assert loop_in([7, 7, 7, 1, 7], 0, rule) is None
    assert loop_in([7] * 4, 0, rule) == "token"
    assert loop_in([7] * 3, 0, rule) is None


@pytest.mark.scenario("R33.C4", on="pure")
def test_a_run_of_tokens_ends_the_sequence_after_so_many_repeats_in_a_row():
    rule = guard(ngram_size=3, ngram_repeats=3)
    thrice = [1, 2, 3] * 3
    assert loop_in([9, *thrice], 0, rule) == "ngram"
    assert loop_in(thrice, 0, rule) == "ngram"
    assert loop_in(thrice[1:], 0, rule) is None
    assert loop_in([9, *thrice[1:]], 0, rule) is None
    assert loop_in([1, 2, 3, 1, 2, 4, 1, 2, 3], 0, rule) is None
    assert loop_in([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4], 0, rule) is None


@pytest.mark.scenario("R33.C4", on="pure")
def test_objects_end_the_sequence_when_there_are_more_than_allowed():
    assert loop_in([1, 2], 5, guard(max_object_keys=5)) is None
    assert loop_in([1, 2], 6, guard(max_object_keys=5)) == "keys"
    assert loop_in([1, 2], 10_000, guard(max_object_keys=None)) is None


@pytest.mark.scenario("R33.C4", on="pure")
@pytest.mark.parametrize(
    ("rule", "ids", "keys"),
    [
        ({"max_consecutive_token_repeats": 2}, [7, 7, 7, 7], 0),
        ({"ngram_size": 2}, [1, 2, 1, 2], 0),
        ({"max_object_keys": 1}, [1, 2, 3, 4], 2),
    ],
)
def test_the_guard_ends_nothing_before_min_new_tokens_or_when_disabled(rule, ids, keys):
    assert loop_in(ids, keys, guard(min_new_tokens=4, **rule))
    assert loop_in(ids, keys, guard(min_new_tokens=5, **rule)) is None
    assert loop_in(ids, keys, guard(min_new_tokens=4, **rule).model_copy(update={"enabled": False})) is None


@pytest.mark.parametrize("vocabulary", ["small", "qwen"])
def test_the_defaults_never_end_an_ordinary_answer(vocabulary):
    ids, rule = encode(answer(60), table(vocabulary)), RepeatTerminate(enabled=True)
    assert len(ids) > 4 * rule.min_new_tokens
    assert not any(loop_in(ids[:end], 60, rule) for end in range(len(ids) + 1))
    assert loop_in([*ids, *ids[-64:]], 60, rule) == "ngram"


@pytest.mark.parametrize("vocabulary", ["small", "qwen"])
@pytest.mark.parametrize("separator", [", ", ",", ",\n  "])
@pytest.mark.parametrize("objects", [0, 1, 2, 12, 105])
def test_object_keys_are_counted_in_answers_however_they_are_spaced(vocabulary, separator, objects):
    pattern = key_pattern(table(vocabulary))
    assert count_keys(encode(answer(objects, separator), table(vocabulary)), pattern) == objects


def test_a_tokenizer_that_writes_keys_in_no_common_way_is_refused_with_a_fix():
    with pytest.raises(UserError, match=r"cannot be counted\n  set .*max_object_keys: null"):
        key_pattern(table("random-5"))


def random_row(chooser: random.Random, alphabet: int, length: int) -> list[int]:
    """Return a random row. A third of the rows end in a run of tokens that is repeated."""
    row = [chooser.randrange(alphabet) for _ in range(length)]
    if chooser.random() < 0.33:
        size = chooser.randint(1, 4)
        row = [*row, *(row[-size:] * chooser.randint(1, 3))][-length:] if length else []
    return row


@pytest.mark.scenario("R33.C1", "R34.C1", on="pure")
def test_the_guard_of_whole_batches_agrees_with_the_pure_one_on_each_row():
    chooser, seen = random.Random(0), Counter()
    for _ in range(500):
        rule = guard(
            min_new_tokens=chooser.randint(0, 6),
            max_consecutive_token_repeats=chooser.randint(2, 5),
            ngram_size=chooser.randint(1, 4),
            ngram_repeats=chooser.randint(2, 3),
            max_object_keys=chooser.choice((None, 1, 2, 3)),
        )
        alphabet, length = chooser.randint(2, 6), chooser.randint(0, 24)
        pattern = [chooser.randrange(alphabet) for _ in range(chooser.randint(1, 3))]
        rows = [random_row(chooser, alphabet, length) for _ in range(20)]
        reasons = [loop_in(row, count_keys(row, pattern), rule) for row in rows]
        new = torch.tensor(rows, dtype=torch.long).reshape(20, length)
        loops = find_loops(new, torch.full((20,), length), rule, pattern)
        assert loops.tolist() == [reason is not None for reason in reasons]
        seen.update(reasons)
    assert seen.total() == 10_000
    assert min(seen[reason] for reason in (None, "token", "ngram", "keys")) > 500, seen


def test_a_looping_row_can_only_end_and_the_others_are_not_touched():
    rule = guard(max_consecutive_token_repeats=3)
    ids = torch.tensor([[5, 5, 1, 5, 5, 5], [5, 5, 5, 5, 5, 1], [5, 5, 5, 5, 5, 5]])
    scores = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    before = scores.clone()
    guarded = Guard(rule, (), prompt_length=3, end_of_turn=9)(ids, scores)
    assert torch.equal(guarded[1], before[1])
    for row in (0, 2):
        assert guarded[row].softmax(-1).tolist() == [0.0] * 9 + [1.0]
    assert torch.equal(scores, before)


def test_the_prompt_is_not_looked_at():
    rule = guard(max_consecutive_token_repeats=3, max_object_keys=1)
    ids = torch.tensor([[5, 5, 5, 5]])
    scores = torch.zeros(1, 10)
    assert torch.equal(Guard(rule, (5,), prompt_length=3, end_of_turn=9)(ids, scores), scores)
    assert not torch.equal(Guard(rule, (5,), prompt_length=2, end_of_turn=9)(ids, scores), scores)


def test_the_keys_of_a_growing_sequence_are_counted_as_in_the_whole_sequence():
    chooser = random.Random(3)
    for _ in range(300):
        pattern = [chooser.randrange(2) for _ in range(chooser.randint(1, 3))]
        counter, ids = KeyCounter(pattern), []
        for _ in range(20):
            ids = [*ids, *(chooser.randrange(2) for _ in range(chooser.randint(0, 4)))]
            if chooser.random() < 0.1:
                ids = ids[: chooser.randint(0, len(ids))]
            assert counter.count(ids) == count_keys(ids, pattern)
    assert KeyCounter(()).count([1, 2, 3]) == 0


@pytest.mark.parametrize(
    ("ids", "rule", "expected"),
    [
        ([1, 2, 9, 9, 9], guard(max_consecutive_token_repeats=2), ([1, 2], "stop")),
        ([1, 2, 2, 9, 9], guard(max_consecutive_token_repeats=2), ([1, 2, 2], "repeat")),
        ([1, 2, 2], guard(max_consecutive_token_repeats=2), ([1, 2, 2], "length")),
        ([1, 2, 2, 9], RepeatTerminate(max_consecutive_token_repeats=2, min_new_tokens=0), ([1, 2, 2], "stop")),
        ([3, 1, 3, 9], guard(max_object_keys=1), ([3, 1, 3], "repeat")),
        ([3, 1, 1, 9], guard(max_object_keys=1), ([3, 1, 1], "stop")),
        ([9], guard(), ([], "stop")),
        ([], guard(), ([], "length")),
    ],
)
def test_an_answer_ends_before_its_end_of_turn_and_for_one_of_three_reasons(ids, rule, expected):
    assert cut_at_end(tuple(ids), 9, rule, (3,)) == expected


def test_an_engine_reads_the_guard_that_was_sent_with_a_request():
    rule = guard(max_object_keys=7)
    sent = json.loads(json.dumps(guard_arguments(rule, (3, 4), 9)))
    received = EngineGuard.of(sent)
    assert RepeatTerminate(**received.model_dump(include=set(RepeatTerminate.model_fields))) == rule
    assert (received.key_pattern, received.end_of_turn) == ((3, 4), 9)


def test_a_request_without_a_guard_or_with_a_disabled_one_sends_nothing():
    assert guard_arguments(RepeatTerminate(), (3,), 9) == {}
    for arguments in (None, {}, {"another": 1}):
        assert EngineGuard.of(arguments) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_new_tokens": -1}, r"min_new_tokens: .*greater than or equal to 0 \(-1\)"),
        ({"ngram_size": "64"}, r"ngram_size: .*valid integer \('64'\)"),
        ({"key_pattern": [3, -1]}, r"key_pattern.1: .*greater than or equal to 0 \(-1\)"),
        ({"end_of_turn": None}, r"end_of_turn: .*valid integer \(None\)"),
        ({"key_pattern": []}, "max_object_keys needs a key_pattern"),
        ({"seed": 3}, "seed: Extra inputs are not permitted"),
    ],
)
def test_a_malformed_guard_of_a_request_is_refused_and_says_what_is_wrong(change, message):
    sent = guard_arguments(guard(max_object_keys=7), (3, 4), 9)
    sent[ARGUMENT] |= change
    with pytest.raises(ValueError, match=rf"^extra_args\['coordexp_guard'\]: .*{message}"):
        EngineGuard.of(sent)


@pytest.mark.parametrize("name", list(EngineGuard.model_fields))
def test_no_part_of_a_guard_of_a_request_may_be_missing(name):
    sent = guard_arguments(guard(max_object_keys=7), (3, 4), 9)
    del sent[ARGUMENT][name]
    with pytest.raises(ValueError, match=f"{name}: missing; make it with"):
        EngineGuard.of(sent)
