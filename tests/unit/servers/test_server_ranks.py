"""Three learner ranks with rollout servers, of which one or two send weights: they agree on everything, and none
waits for another forever.

The ranks are real processes that communicate with gloo. The servers are fakes.
"""

import pytest

from coordexp.servers.pool import sending_rank
from tests.unit.rollout.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks("tests.unit.servers.ranks_worker", folder, ranks=3, seconds=230)


def results(outcomes, scene) -> list[dict]:
    return [rank[scene]["result"] for rank in outcomes]


def test_the_senders_are_the_first_ranks_of_the_nodes_and_share_the_servers():
    assert [sending_rank(server, 1, 24) for server in range(4)] == [0, 0, 0, 0]
    assert [sending_rank(server, 3, 24) for server in range(7)] == [0, 8, 16, 0, 8, 16, 0]
    assert [sending_rank(server, 2, 3) for server in range(4)] == [0, 1, 0, 1]
    assert [sending_rank(server, 4, 4) for server in range(4)] == [0, 1, 2, 3]


def test_no_scene_leaves_a_rank_behind(outcomes):
    assert all(outcome["in step"] for rank in outcomes for outcome in rank.values())
    assert max(outcome["seconds"] for rank in outcomes for outcome in rank.values()) < 15


@pytest.mark.scenario("R07.C10", on="fake")
def test_all_ranks_get_the_answers_to_their_own_requests_and_only_the_first_sends_weights(outcomes):
    first, *others = results(outcomes, "in_turn")
    assert all(rank["right"] == [True] * 4 for rank in (first, *others))
    assert [first["links"], *(rank["links"] for rank in others)] == [[0, 1], [], []]
    assert first["senders"] == [0, 0] and first["whole"]
    # A version that the servers have is not sent again.
    assert first["begun"] == [3, 3]
    assert first["recorded"] == ["sync", "rollouts", "sync", "rollouts", "rollouts", "sync", "rollouts"]
    assert all(rank["recorded"] == ["rollouts"] * 4 for rank in others)


def test_every_server_gets_whole_weights_from_its_own_sender_and_the_syncs_are_one_event(outcomes):
    first, second, third = results(outcomes, "in_shares")
    assert all(rank["right"] == [True] * 4 for rank in (first, second, third))
    assert (first["links"], second["links"], third["links"]) == ([0, 2], [1, 3], [])
    assert first["senders"] == [0, 1, 0, 1] and first["whole"] and first["begun"] == [3] * 4
    assert first["run"] == second["run"] == third["run"]
    assert [event["version"] for event in first["syncs"]] == [1, 2, 3] and not second["syncs"]
    for event in first["syncs"]:
        assert (event["synced"], event["failed"]) == ([0, 1, 2, 3], {})
        assert first["bytes"] <= event["bytes"] < 2 * first["bytes"]  # those of one pass
    assert [event["probed"] for event in first["syncs"]] == [[0, 1, 2, 3], [], []]


@pytest.mark.parametrize(
    ("scene", "left", "lost"),
    [("lost_in_a_share", [0, 1, 2], [3]), ("share_of_another_rank_lost", [0, 2], [1, 3])],
)
def test_servers_of_another_sender_that_die_are_left_out_on_all_ranks_and_rejoin(outcomes, scene, left, lost):
    for rank in results(outcomes, scene):
        assert rank["right"] == [True, True]
        assert rank["usable"] == [left, [0, 1, 2, 3]]
    first, second, third = results(outcomes, scene)
    assert first["senders"] == [0, 1, 0, 1]
    losses = [message for message in first["messages"] if "goes on without this server" in message]
    assert len(losses) == len(lost)
    assert all(any(f"rollout server {index}" in message for message in losses) for index in lost)
    assert not second["messages"] and not third["messages"]


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
def test_an_error_is_the_same_on_all_ranks(outcomes, scene, problem):
    for rank in outcomes:
        assert problem in rank[scene]["text"] and rank[scene]["raised"] in ("EngineError", "RankError")


@pytest.mark.scenario("R07.C25", on="fake")
def test_a_weight_group_that_cannot_be_opened_stops_all_ranks_with_a_way_out(outcomes):
    for rank in outcomes:
        assert "no group for weights" in rank["no_weight_group"]["text"]
        assert "port must be free" in rank["no_weight_group"]["text"]
