"""What a dump says in codes, in words."""

from coordexp.inspector.words import REASONS, decoding
from coordexp.parse import Reason


def test_every_reason_has_words():
    assert set(REASONS) == set(Reason)


def test_decoding_is_told_with_what_was_chosen_only():
    plain = {
        "mode": "greedy",
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "num_beams": 1,
        "max_new_tokens": 1024,
    }
    assert decoding(plain) == "greedy, at most 1,024 tokens"
    sampled = plain | {"mode": "sampling", "temperature": 0.7, "top_p": 0.9, "top_k": 50}
    assert decoding(sampled) == "sampled at temperature 0.7, top_p 0.9, top_k 50, at most 1,024 tokens"
    assert decoding(plain | {"mode": "beam", "num_beams": 4}) == "best of 4 beams, at most 1,024 tokens"
