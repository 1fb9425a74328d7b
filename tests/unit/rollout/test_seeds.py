"""The seed of every request: distinct within a step, and the same in a repeated run."""

from itertools import product

import pytest

from coordexp.rollout.backend import MOST_MICRO_STEPS, MOST_RANKS, MOST_REQUESTS, request_seed

CORNERS = list(
    product(
        (0, 1, MOST_MICRO_STEPS // 2, MOST_MICRO_STEPS - 2, MOST_MICRO_STEPS - 1),
        (0, 1, 511, MOST_RANKS - 2, MOST_RANKS - 1),
        (0, 1, 2, 2047, MOST_REQUESTS - 2, MOST_REQUESTS - 1),
    )
)


PRIME = 2**31 - 1


def test_a_seed_has_31_bits_and_is_never_0():
    seeds = [request_seed(run, step, *place) for run in (0, 17, 2**32) for step in (0, 999) for place in CORNERS]
    assert all(type(seed) is int and 1 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("seed", [1, PRIME])
def test_the_lowest_and_the_highest_possible_seed_belong_to_a_request(seed):
    """Seeds are evenly spaced modulo a prime, so the request that has this seed can be computed."""
    first = request_seed(17, 3, 0, 0, 0)
    apart = request_seed(17, 3, 0, 0, 1) - first
    place, request = divmod((seed - first) * pow(apart, -1, PRIME) % PRIME, MOST_REQUESTS)
    assert request_seed(17, 3, *divmod(place, MOST_RANKS), request) == seed


@pytest.mark.scenario("R39.S1", on="pure")
def test_all_places_of_a_step_have_distinct_seeds_by_construction():
    """Places are numbered without a gap, and the numbers are below the prime that is the modulus of the seeds."""
    assert MOST_MICRO_STEPS * MOST_RANKS * MOST_REQUESTS < PRIME
    first, following = request_seed(17, 3, 0, 0, 0), request_seed(17, 3, 0, 0, 1)
    last_request, next_rank = request_seed(17, 3, 0, 0, MOST_REQUESTS - 1), request_seed(17, 3, 0, 1, 0)
    last_rank, next_micro = request_seed(17, 3, 0, MOST_RANKS - 1, MOST_REQUESTS - 1), request_seed(17, 3, 1, 0, 0)
    for low, high in ((last_request, next_rank), (last_rank, next_micro)):
        assert (high - low - (following - first)) % PRIME == 0


@pytest.mark.scenario("R39.C3", on="pure")
@pytest.mark.parametrize("other", [(18, 3), (17, 4), (1, 73), (3, 17), (16, 4), (17 + 2**16, 3), (17 + 2**31, 3)])
def test_another_run_seed_or_step_gives_other_seeds(other):
    own, others = ({request_seed(*which, 0, 0, request) for request in range(2000)} for which in ((17, 3), other))
    assert len(own & others) <= 1


@pytest.mark.scenario("R39.S1", on="pure")
def test_seeds_never_change_so_that_old_runs_can_be_repeated():
    """They are the same in every process, unlike Python's own hash."""
    assert (request_seed(17, 3, 0, 0, 0), request_seed(17, 3, 2, 1, 5)) == (1161564359, 1386066773)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ((MOST_MICRO_STEPS, 0, 0), f"micro-step {MOST_MICRO_STEPS}: .* at most {MOST_MICRO_STEPS} micro-steps$"),
        ((-1, 0, 0), "micro-step -1"),
        ((0, MOST_RANKS, 0), f"rank {MOST_RANKS}: .* at most {MOST_RANKS} ranks$"),
        ((0, -1, 0), "rank -1"),
        (
            (0, 0, MOST_REQUESTS),
            f"request {MOST_REQUESTS}: .* at most {MOST_REQUESTS} requests of a rank per micro-step$",
        ),
        ((0, 0, -1), "request -1"),
    ],
)
def test_a_place_out_of_range_is_refused(place, words):
    with pytest.raises(ValueError, match=words):
        request_seed(17, 3, *place)
