"""Two learner ranks with rollout servers: they agree on everything, and neither waits for the other for ever.

Real processes that talk by gloo; the servers are fakes.
"""

import pytest

from tests.unit.rollout.ranks import run_two_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def came_of(tmp_path_factory) -> list[dict]:
    return run_two_ranks("tests.unit.rollout.servers_worker", tmp_path_factory.mktemp("ranks"))


def test_no_scene_leaves_a_rank_behind(came_of):
    assert all(found["in step"] for rank in came_of for found in rank.values())
    assert max(found["seconds"] for rank in came_of for found in rank.values()) < 10


@pytest.mark.scenario("R07.C10", on="fake")
def test_both_ranks_get_the_answers_to_their_own_requests_and_the_first_alone_sends_weights(came_of):
    for rank in came_of:
        assert rank["in_turn"]["gave"]["right"] == [True] * 4
    assert came_of[0]["in_turn"]["gave"]["starts"] == [3, 3]  # a version that the servers have is not sent again
    assert came_of[0]["in_turn"]["gave"]["recorded"] == [
        "sync", "rollouts", "sync", "rollouts", "rollouts", "sync", "rollouts",
    ]  # fmt: skip
    assert came_of[1]["in_turn"]["gave"]["recorded"] == ["rollouts"] * 4


def test_a_server_that_one_rank_has_lost_is_left_out_by_both_until_it_is_back(came_of):
    for rank in came_of:
        assert rank["lost_by_one"]["gave"] == {"right": [True, True], "usable": [[0], [0, 1]]}


def test_a_rank_without_requests_takes_part_in_bringing_servers_back(came_of):
    for rank in came_of:
        assert rank["all_lost"]["gave"] == {"right": [True], "usable": [[0]]}


def test_a_server_that_fails_in_a_sync_is_left_out_by_both(came_of):
    for rank in came_of:
        assert rank["faults_in_sync"]["gave"] == {"right": [True], "usable": [[1]]}


@pytest.mark.scenario("R07.C11", on="fake")
@pytest.mark.parametrize(
    ("scene", "told"),
    [
        ("none_comes_back", "no rollout server is left"),
        ("another_model", "it serves another model"),
        ("unreadable", "is no JSON but"),
        ("one_bad_request", "could not answer it: no such picture"),
    ],
)
def test_an_error_is_the_same_on_both_ranks(came_of, scene, told):
    assert told in came_of[0][scene]["text"]
    assert told in came_of[1][scene]["text"]
    assert came_of[0][scene]["raised"] == "EngineError"
    assert came_of[1][scene]["raised"] in ("EngineError", "RankError")


@pytest.mark.scenario("R07.C25", on="fake")
def test_a_weight_group_that_cannot_be_opened_stops_both_ranks_with_a_way_out(came_of):
    for rank in came_of:
        assert "no group for weights" in rank["no_weight_group"]["text"]
        assert "port must be free" in rank["no_weight_group"]["text"]
