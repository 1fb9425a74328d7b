"""What a dump says in codes, in words."""

from coordexp.correction import Reason
from coordexp.inspector.words import REASONS, count_invalid, decoding, notes


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


def test_objects_that_were_not_read_are_among_those_that_cannot_be_used():
    result = {"objects": [{"reason": None}, {"reason": "syntax"}], "unread": 3, "prefix_tokens": 2}
    whole = {"rollout": {"ids": [1, 2, 3]}, "result": result | {"fallback": False, "truncated": False}}
    assert count_invalid(result) == 4
    assert notes(whole)[1:] == [
        "4 objects of the answer cannot be used, and are not matched.",
        "Objects in text that is not read, counted by their keys: 3.",
    ]
    assert count_invalid({"objects": result["objects"]}) == 1, "a dump of an earlier release does not count them"
