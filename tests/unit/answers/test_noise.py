"""Answers with mistakes that are made from the labels."""

from coordexp.answers.correct import make_noisy_answer
from coordexp.answers.parse import parse_rollout
from coordexp.config.rollout import NoiseAnswers
from coordexp.data import Geometry, TrueObject
from tests.unit.answers.test_policies import CAT, CUP, DOG, QWEN

TRUTH = [CUP, DOG, CAT] * 40
NONE = {"drop": 0.0, "repeat": 0.0, "random": 0.0, "jitter": 0.0}


def noisy(seed: int = 1, truth: list[TrueObject] | None = None, **noise: float):
    settings = NoiseAnswers(enabled=True, **(NONE | noise))
    chosen = TRUTH if truth is None else truth
    return parse_rollout(make_noisy_answer(chosen, settings, seed, table=QWEN, order="desc_first"), QWEN)


def test_without_mistakes_the_answer_is_the_ground_truth():
    assert [TrueObject(thing.desc, thing.geometry) for thing in noisy().objects] == TRUTH
    assert noisy(truth=[], drop=1.0, random=1.0).objects == ()


def test_each_kind_of_mistake_has_its_share():
    assert 0.15 < 1 - len(noisy(drop=0.3).valid) / len(TRUTH) < 0.45
    assert 0.15 < len(noisy(repeat=0.3).valid) / len(TRUTH) - 1 < 0.45
    assert 0.15 < len(noisy(random=0.3).valid) / len(TRUTH) - 1 < 0.45


def test_coordinates_move_by_at_most_their_share_of_the_size():
    moved = noisy(jitter=0.1).valid
    gaps = [
        abs(a - b)
        for thing, true in zip(moved, TRUTH, strict=True)
        for a, b in zip(thing.geometry.bins, true.geometry.bins, strict=True)
    ]
    assert 0 < max(gaps) <= 10


def test_the_seed_decides():
    assert noisy(3, drop=0.5) == noisy(3, drop=0.5) != noisy(4, drop=0.5)


def test_a_polygon_that_would_lose_its_area_stays_as_it_is():
    small = TrueObject("leaf", Geometry("poly", (10, 10, 12, 10, 11, 12)))
    for seed in range(200):
        assert len(noisy(seed, truth=[small], jitter=0.9).valid) == 1
