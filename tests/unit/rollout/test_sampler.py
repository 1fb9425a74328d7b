"""Sampling with a random generator per row: which tokens, how often, and that rows do not affect each other."""

from functools import cache

import pytest
import torch
from scipy.stats import chisquare

from coordexp.rollout.backend import Decode
from coordexp.rollout.hugging_face import Sampler

SCORES = torch.tensor([0.3, -1.0, 2.0, 1.4, -3.0, 0.9, 0.0, 1.9])
DRAWS = 20_000


def sampler(seeds, *, tokens: int = 1, temperature: float = 1.0, **options) -> Sampler:
    return Sampler(Decode(tokens, "sampling", temperature, **options), seeds, prompt_length=3)


def draw(with_sampler: Sampler, scores: torch.Tensor, step: int = 0) -> list[int]:
    """Return the token that each row draws, after checking that it is the only one left to choose."""
    left = with_sampler(torch.zeros(len(scores), 3 + step, dtype=torch.long), scores)
    assert (left == 0).sum(1).tolist() == [1] * len(scores)
    assert ((left == 0) | (left == -torch.inf)).all()
    return left.argmax(1).tolist()


@cache
def numbers() -> torch.Tensor:
    """Return the random numbers of many seeds, which depend on nothing else."""
    return sampler(range(1, DRAWS + 1))._uniform


def first_tokens(scores: torch.Tensor = SCORES, **options) -> list[int]:
    """Return one token for each of many seeds."""
    many = sampler([1], **options)
    assert torch.equal(many._uniform, numbers()[:1])
    many._uniform = numbers()
    return draw(many, scores.expand(DRAWS, -1))


def frequencies(tokens: list[int]) -> list[int]:
    return torch.bincount(torch.tensor(tokens), minlength=len(SCORES)).tolist()


def test_the_tokens_of_a_row_do_not_depend_on_the_other_rows():
    scores = torch.randn(6, 5, 50, generator=torch.Generator().manual_seed(0))
    seeds = [11, 12, 13, 14, 15]
    together = sampler(seeds, tokens=6)
    whole = [draw(together, scores[step], step) for step in range(6)]
    for order in ([0], [4, 2], [3, 1, 0, 4, 2]):
        some = sampler([seeds[k] for k in order], tokens=6)
        assert [draw(some, scores[step, order], step) for step in range(6)] == [
            [row[k] for k in order] for row in whole
        ]


def test_a_longer_limit_does_not_change_the_tokens_before_it():
    short, long = sampler([7, 8], tokens=3), sampler([7, 8], tokens=300)
    scores = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert [draw(short, scores, step) for step in range(3)] == [draw(long, scores, step) for step in range(3)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_the_softmax_at_the_temperature_says(temperature):
    counts = frequencies(first_tokens(temperature=temperature))
    expected = (SCORES.double() / temperature).softmax(0) * DRAWS
    assert chisquare(counts, expected).pvalue > 0.01
    wrong = (SCORES.double() / (1.1 * temperature)).softmax(0) * DRAWS
    assert chisquare(counts, wrong).pvalue < 1e-4


@pytest.mark.parametrize(("top_k", "kept"), [(1, {2}), (2, {2, 7}), (3, {2, 7, 3}), (100, set(range(8)))])
def test_top_k_draws_among_the_best_and_as_often_as_they_weigh(top_k, kept):
    counts = frequencies(first_tokens(top_k=top_k))
    assert {token for token, count in enumerate(counts) if count} == kept
    expected = SCORES[sorted(kept)].double().softmax(0) * DRAWS
    assert len(kept) == 1 or chisquare([counts[token] for token in sorted(kept)], expected).pvalue > 0.01


# The best have 0.316, 0.286, 0.174 and 0.105 of the mass.
@pytest.mark.parametrize(("top_p", "kept"), [(0.3, {2}), (0.5, {2, 7}), (0.7, {2, 7, 3}), (0.85, {2, 7, 3, 5})])
def test_top_p_draws_among_the_fewest_that_have_the_mass(top_p, kept):
    assert set(first_tokens(top_p=top_p)) == kept


def test_a_token_with_probability_0_is_never_draw():
    """This includes the first and the last token, for random numbers at the ends of [0, 1)."""
    scores = SCORES.clone()
    scores[[0, 3, 7]] = -torch.inf
    assert set(first_tokens(scores)) == {1, 2, 4, 5, 6}
    ends = sampler([1, 1])
    ends._uniform[:, 0] = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.double)
    assert draw(ends, scores.expand(2, -1)) == [1, 6]
