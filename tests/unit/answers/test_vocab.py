"""The vocabulary table, and cuts inside each closing token of the real vocabulary."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from coordexp.answers.parse import parse_rollout
from coordexp.answers.segment import serialise
from coordexp.answers.table import COORD_TOKENS, VocabularyError, VocabularyTable
from coordexp.data import TrueObject, to_bin, to_pixels
from tests.rollouts import random_truth
from tests.unit.answers.conftest import Core, answer, box, entry
from tests.vocabularies import encode, table

DOG = TrueObject("dog", box(300, 300, 500, 500))


@pytest.mark.scenario("R26.C4", on="pure")
@pytest.mark.parametrize("name", ["qwen", "small", "random-3"])
@pytest.mark.parametrize("text", ['{"a": [1]}', "猫 🙂 é", "<|coord_7|> <|im_end|>x", "\n\t  \x00\x7f"])
def test_pieces_are_the_bytes_of_the_text(name, text):
    vocabulary = table(name)
    assert vocabulary.bytes_of(encode(text, vocabulary)) == text.encode()


@pytest.mark.parametrize("name", ["qwen", "small", "random-5"])
@pytest.mark.parametrize(
    "text", [b"}", b'}, "object_2": {', b"\x99}", b"\xe7\x8c", "e\u0301".encode(), b"\xff\x00", b""]
)
def test_any_bytes_can_be_encoded_exactly(name, text):
    assert table(name).bytes_of(table(name).encode(text)) == text


@pytest.mark.scenario("R19.C4", on="pure")
def test_a_cut_inside_any_closing_token_keeps_earlier_ids_and_exactly_the_needed_bytes():
    """Try every token of the real vocabulary with a brace or a bracket inside which a whole object can end."""
    vocabulary = table("qwen")
    core = Core(vocabulary)
    closing = [
        id for id, piece in enumerate(vocabulary.pieces) if (b"}" in piece or b"]" in piece) and id < 151643
    ]
    assert len(closing) > 400
    first = answer(entry("object_1", "a", box(1, 2, 30, 40)))
    cut_inside = 0
    for id in closing:
        piece = vocabulary.pieces[id]
        assert vocabulary.bytes_of(vocabulary.encode(piece)) == piece
        for begun in ('"]', '"', ""):
            head = first[: first.rindex('"]')] + begun
            ids = [*encode(head, vocabulary), id]
            parsed = parse_rollout(ids, vocabulary)
            count = len(parsed.prefix_ids)
            assert list(parsed.prefix_ids) == ids[:count]
            if count < len(ids) and parsed.remainder and len(parsed.valid) == 1:
                cut_inside += 1
                assert count == len(ids) - 1
                assert piece.startswith(parsed.remainder)
                assert vocabulary.bytes_of(vocabulary.encode(parsed.remainder)) == parsed.remainder
                _, _, segment = core.build(vocabulary.bytes_of(ids).decode(), [DOG], stop=False)
                assert list(core.objects(segment)) == ["object_1", "object_2"]
    assert cut_inside > 20


def test_missing_and_misordered_tokens_are_refused():
    with pytest.raises(VocabularyError, match="1000 of the 1000 coordinate tokens are missing"):
        VocabularyTable.from_tokenizer(_bare_tokenizer([]))
    with pytest.raises(VocabularyError, match="consecutive ids in order; <\\|coord_1\\|>"):
        VocabularyTable.from_tokenizer(_bare_tokenizer([COORD_TOKENS[1], COORD_TOKENS[0], *COORD_TOKENS[2:]]))
    with pytest.raises(VocabularyError, match="<\\|im_end\\|>"):
        VocabularyTable.from_tokenizer(_bare_tokenizer(list(COORD_TOKENS)))
    with pytest.raises(VocabularyError, match="no such file"):
        VocabularyTable.from_folder("/nowhere")


def test_quantisation_is_a_round_trip_within_half_a_bin():
    for size in (1, 7, 640, 1333.5):
        for step in range(200):
            value = size * step / 199
            assert abs(to_pixels(to_bin(value, size), size) - value) <= size / 999 / 2 + 1e-9
    assert (to_bin(-5, 100), to_bin(105, 100), to_bin(0, 100), to_bin(100, 100)) == (0, 999, 0, 999)
    assert [to_bin(to_pixels(bin, 333), 333) for bin in range(1000)] == list(range(1000))


@pytest.mark.parametrize(
    ("desc", "bins"), [("", (1, 1, 2, 2)), ("a", (2, 1, 1, 2)), ("a", (1, 1, 2)), ("a", (1, 1, 2, 1000))]
)
def test_an_impossible_true_object_is_refused(desc, bins):
    with pytest.raises(ValueError, match=r"desc is empty|no area|coordinates|is outside the bins"):
        TrueObject(desc, box(*bins))


def test_half_a_character_in_the_data_is_refused():
    with pytest.raises(ValueError, match="lone surrogate"):
        TrueObject("a\ud800b", box(1, 1, 2, 2))


def test_coordinates_stay_tokens_if_text_must_be_encoded_byte_by_byte():
    vocabulary = table("qwen")
    text = 'e\u0301 "<|coord_7|>"'.encode()
    ids = vocabulary.encode(text)
    assert vocabulary.first_coord + 7 in ids
    assert vocabulary.bytes_of(ids) == text


def _bare_tokenizer(coords):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in coords])
    return tokenizer


@pytest.mark.parametrize("name", ["qwen", "small", "random-1", "random-2"])
def test_text_with_coordinates_is_encoded_as_the_tokenizer_encodes_the_whole(name):
    """Text is encoded in runs between coordinates, which are remembered; asked twice, the ids are the same."""
    chooser = random.Random(name)
    vocabulary = table(name)
    for _ in range(60):
        truth = random_truth(chooser)
        text = (
            "{" + serialise(truth, after=b"{", first_number=1, order="desc_first", table=vocabulary).text.decode()
        )
        expected = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.encode(text.encode()) == expected
        assert vocabulary.encode(text.encode()) == expected
