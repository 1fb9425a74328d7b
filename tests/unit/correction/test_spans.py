"""Where the entries of an answer stand among its tokens."""

import pytest

from coordexp.correction import Reason, parse_rollout
from coordexp.correction.spans import entry_spans
from tests.unit.correction.conftest import answer, box, entry
from tests.vocabularies import encode, table

SMALL = table("small")
CUP, DOG = entry("object_1", "cup", box(10, 20, 30, 40)), entry("object_2", "dog", box(5, 6, 7, 8))


def spelled(text: str) -> list[int]:
    """One token a character."""
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
def test_a_range_is_from_the_quote_of_the_key_to_the_end_of_the_value(text, written, lost):
    ids = spelled(text)
    assert [text[start:end] for start, end in entry_spans(ids, SMALL)] == written
    reasons = [found.reason for found in parse_rollout(ids, SMALL).objects]
    assert len(reasons) == len(written)
    assert (lost in reasons) or lost is None


@pytest.mark.parametrize("behind", ["", " more", '"c": 3}'])
def test_what_ends_an_answer_ends_its_last_range(behind):
    picture = SMALL.tokenizer.token_to_id("<|image_pad|>")
    begun, nothing, stopped = (
        [*spelled('{"a": 1, "b": [2'), picture, *spelled(behind)],
        [*spelled('{"a": 1, '), picture, *spelled(behind)],
        [*spelled('{"a": 1, "b": [2'), SMALL.end_of_turn, *spelled(behind)],
    )
    assert entry_spans(begun, SMALL) == ((1, 7), (9, 16))
    assert entry_spans(nothing, SMALL) == ((1, 7), (9, 9))
    assert entry_spans(stopped, SMALL) == ((1, 7), (9, 16))


def test_a_token_with_an_end_and_a_beginning_belongs_to_both():
    qwen = table("qwen")
    ids = [qwen.byte_ids[byte] for byte in b'{"a": {']
    ids += [qwen.pieces.index(b'},"'), *(qwen.byte_ids[byte] for byte in b'b": 2}')]
    assert entry_spans(ids, qwen) == ((1, 8), (7, 13))


def test_coordinates_lie_inside_of_the_range_of_their_object():
    for vocabulary in ("qwen", "small"):
        ids = encode(answer(CUP, DOG), table(vocabulary))
        objects, spans = parse_rollout(ids, table(vocabulary)).objects, entry_spans(ids, table(vocabulary))
        assert len(spans) == 2
        for found, (start, end) in zip(objects, spans, strict=True):
            assert start < found.coord_indices[0] < found.coord_indices[3] < end
