"""Two learner ranks with rollout servers: they agree on everything, and neither waits for the other forever.

The ranks are real processes that communicate with gloo. The servers are fakes.
"""

import pytest

from tests.unit.rollout.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict]:
    return run_ranks("tests.unit.servers.servers_worker", tmp_path_factory.mktemp("ranks"))


def test_no_scene_leaves_a_rank_behind(outcomes):
    assert all(outcome["in step"] for rank in outcomes for outcome in rank.values())
    assert max(outcome["seconds"] for rank in outcomes for outcome in rank.values()) < 10


@pytest.mark.scenario("R07.C10", on="fake")
def test_both_ranks_get_the_answers_to_their_own_requests_and_only_the_first_sends_weights(outcomes):
    for rank in outcomes:
        assert rank["in_turn"]["result"]["right"] == [True] * 4
    assert [rank["in_turn"]["result"]["links"] for rank in outcomes] == [[0, 1], []]
    # A version that the servers have is not sent again.
    assert outcomes[0]["in_turn"]["result"]["starts"] == [3, 3]
    assert outcomes[0]["in_turn"]["result"]["recorded"] == [
        "sync", "rollouts", "sync", "rollouts", "rollouts", "sync", "rollouts",
    ]  # fmt: skip
    assert outcomes[1]["in_turn"]["result"]["recorded"] == ["rollouts"] * 4


@pytest.mark.scenario("R07.C11", on="fake")
@pytest.mark.parametrize(
    ("scene", "problem"),
    [
        ("none_comes_back", "no rollout server is left"),
        ("another_model", "it serves another model"),
        ("unreadable", "is not JSON but"),
        ("one_bad_request", "could not answer it: no such image"),
    ],
)
def test_an_error_is_the_same_on_both_ranks(outcomes, scene, problem):
    assert problem in outcomes[0][scene]["text"]
    assert problem in outcomes[1][scene]["text"]
    assert outcomes[0][scene]["raised"] == "EngineError"
    assert outcomes[1][scene]["raised"] in ("EngineError", "RankError")


@pytest.mark.scenario("R07.C25", on="fake")
def test_a_weight_group_that_cannot_be_opened_stops_both_ranks_with_a_way_out(outcomes):
    for rank in outcomes:
        assert "no group for weights" in rank["no_weight_group"]["text"]
        assert "port must be free" in rank["no_weight_group"]["text"]
