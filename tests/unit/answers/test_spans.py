"""The ranges of tokens of the entries of an answer."""

import pytest

from coordexp.answers.entries import Reason
from coordexp.answers.formats import CoordTokenAnswers
from coordexp.answers.parse import entry_indices, entry_spans, parse_rollout
from tests.unit.answers.conftest import box, entry
from tests.vocabularies import encode, table

SMALL = table("small")
CUP, DOG = entry("object_1", "cup", box(10, 20, 30, 40)), entry("object_2", "dog", box(5, 6, 7, 8))


def spell(text: str) -> list[int]:
    """Return one token per character."""
    return [SMALL.byte_ids[byte] for byte in text.encode()]


@pytest.mark.parametrize(
    ("text", "written", "lost"),
    [
        ('{"a": 1}', ['"a": 1'], None),
        ('  {\n "a" : {} , "b":[1, 2]}', ['"a" : {}', '"b":[1, 2]'], None),
        ('{"a": {"b": "}, \\"c\\": {"}, "d": null', ['"a": {"b": "}, \\"c\\": {"}', '"d": null'], None),
        ('{"a": 1, "b": {"de', ['"a": 1', '"b": {"de'], Reason.truncated),
        ('{"a": 1, "b": {,} "c": 2}', ['"a": 1', '"b": {,} "c": 2}'], Reason.syntax),
        ('{"a": 1 and more', ['"a": 1', "and more"], Reason.syntax),
        ('{"a', ['"a'], Reason.truncated),
        ('{"a": 1, ', ['"a": 1'], None),
        ('{"a": 1} "b": 2', ['"a": 1'], None),
        ("{}", [], None),
        ("no container", [], None),
        ("", [], None),
    ],
)
def test_a_range_extends_from_the_quote_of_the_key_to_the_end_of_the_value(text, written, lost):
    ids = spell(text)
    assert [text[start:end] for start, end in entry_spans(ids, SMALL)] == written
    reasons = [prediction.reason for prediction in parse_rollout(ids, SMALL).objects]
    assert len(reasons) == len(written)
    assert (lost in reasons) or lost is None


def test_a_token_belongs_to_the_object_in_which_it_ends():
    assert entry_indices(spell('{"a": 1, "b": 2}'), SMALL) == [-1, *[0] * 6, *[1] * 8, 2]
    assert entry_indices(spell("{}"), SMALL) == [-1, -1]
    qwen = table("qwen")
    ids = [qwen.byte_ids[byte] for byte in b'{"a": {']
    ids += [qwen.pieces.index(b'},"'), *(qwen.byte_ids[byte] for byte in b'b": 2}')]
    assert entry_indices(ids, qwen) == [-1, *[0] * 6, *[1] * 6, 2]


def test_the_tokens_of_an_object_begin_before_its_key_and_end_with_the_next_one_even_if_that_is_cut_off():
    text = "{" + CUP + ", " + DOG
    ids = encode(text, SMALL)
    first = len(encode("{" + CUP, SMALL))
    for end in (len(ids), len(ids) - 3):
        read = CoordTokenAnswers(SMALL).read(ids[:end])
        assert [item.reason for item in read.objects] == [None, Reason.truncated if end < len(ids) else None]
        assert read.tokens == (range(first), range(first, end))
