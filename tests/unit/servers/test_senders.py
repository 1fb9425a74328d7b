"""Three learner ranks, of which two send weights, each to its share of the servers.

The ranks are real processes that communicate with gloo. The servers are fakes.
"""

import pytest

from coordexp.servers.pool import sending_rank
from tests.unit.rollout.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("senders")
    return run_ranks("tests.unit.servers.senders_worker", folder, ranks=3, seconds=230)


def results(outcomes, scene) -> list[dict]:
    return [rank[scene]["result"] for rank in outcomes]


def test_the_senders_are_the_first_ranks_of_the_nodes_and_share_the_servers():
    assert [sending_rank(server, 1, 24) for server in range(4)] == [0, 0, 0, 0]
    assert [sending_rank(server, 3, 24) for server in range(7)] == [0, 8, 16, 0, 8, 16, 0]
    assert [sending_rank(server, 2, 3) for server in range(4)] == [0, 1, 0, 1]
    assert [sending_rank(server, 4, 4) for server in range(4)] == [0, 1, 2, 3]


def test_no_scene_leaves_a_rank_behind(outcomes):
    assert all(outcome["in step"] for rank in outcomes for outcome in rank.values())


def test_every_server_gets_whole_weights_from_its_own_sender_and_once_per_version(outcomes):
    first, second, third = results(outcomes, "shares")
    assert (first["links"], second["links"], third["links"]) == ([0, 2], [1, 3], [])
    assert first["senders"] == [0, 1, 0, 1]
    assert first["whole"]
    assert first["starts"] == [3, 3, 3, 3]
    assert all(rank["right"] == [True] * 4 for rank in (first, second, third))
    assert first["run"] == second["run"] == third["run"]


def test_the_syncs_of_all_senders_are_one_event_of_the_first_rank(outcomes):
    first, second, third = results(outcomes, "shares")
    assert [event["version"] for event in first["events"]] == [1, 2, 3]
    assert not second["events"] and not third["events"]
    for event in first["events"]:
        assert (event["synced"], event["failed"]) == ([0, 1, 2, 3], {})
        assert event["bytes"] >= first["bytes"] and event["seconds"] > 0
        assert len({server["boot"] for server in event["servers"]}) == 4
    assert [event["probed"] for event in first["events"]] == [[0, 1, 2, 3], [], []]
    assert first["events"][0]["bytes"] < 2 * first["bytes"]  # the bytes of one pass


def test_a_server_that_dies_in_a_share_is_left_out_on_all_ranks_and_rejoins(outcomes):
    for rank in results(outcomes, "lost_in_a_share"):
        assert rank["right"] == [True, True]
        assert rank["usable"] == [[0, 1, 2], [0, 1, 2, 3]]
    first, second, third = results(outcomes, "lost_in_a_share")
    assert first["senders"] == [0, 1, 0, 1]
    losses = [message for message in first["messages"] if "goes on without this server" in message]
    assert len(losses) == 1 and "rollout server 3" in losses[0]
    assert not second["messages"] and not third["messages"]


def test_a_server_that_was_restarted_rejoins_through_its_own_sender_in_the_next_sync(outcomes):
    first, second, third = results(outcomes, "restarted")
    for rank in (first, second, third):
        assert (rank["right"], rank["usable"]) == ([True], [[0, 1, 2, 3]])
    assert (first["links"], second["links"], third["links"]) == ([0, 2], [1, 3], [])
    assert first["senders"] == [0, 1, 0, 1]
    versions = [(event["version"], event["synced"], event["probed"]) for event in first["events"]]
    assert versions == [(1, [0, 1, 2, 3], [0, 1, 2, 3]), (2, [0, 1, 2, 3], [3])]


def test_a_server_that_fails_in_the_sync_of_another_sender_is_reported_by_the_first_rank(outcomes):
    first, second, third = results(outcomes, "lost_in_a_sync")
    for rank in (first, second, third):
        assert (rank["right"], rank["usable"]) == ([True], [[0, 2, 3]])
    assert (first["links"], second["links"], third["links"]) == ([0, 2], [3], [])
    assert any("rollout server 1" in message and "goes on without" in message for message in first["messages"])
    assert (first["events"][1]["synced"], list(first["events"][1]["failed"])) == ([0, 2, 3], ["1"])


def test_a_sender_without_servers_does_not_stop_the_run_and_gets_them_back(outcomes):
    for rank in results(outcomes, "share_of_another_rank_lost"):
        assert rank["right"] == [True, True]
        assert rank["usable"] == [[0, 2], [0, 1, 2, 3]]
    first = results(outcomes, "share_of_another_rank_lost")[0]
    assert first["senders"] == [0, 1, 0, 1]
    for server in (1, 3):
        assert sum(f"rollout server {server}" in message for message in first["messages"][2:]) == 1


def test_all_ranks_wait_together_until_the_server_of_any_sender_is_back(outcomes):
    for rank in results(outcomes, "all_lost"):
        assert rank == {"right": [True], "usable": [[3]]}


@pytest.mark.parametrize(
    ("scene", "problem", "way_out"),
    [
        ("another_model", "it serves another model", "start it with the config"),
        ("too_few_slots", "3 learner ranks each need one", "decode_batch_size to at least 2"),
    ],
)
def test_an_error_of_any_sender_is_the_same_on_all_ranks(outcomes, scene, problem, way_out):
    for rank in outcomes:
        assert rank[scene]["raised"] in ("EngineError", "RankError")
        assert problem in rank[scene]["text"] and way_out in rank[scene]["text"]


def test_the_first_rank_warns_once_about_a_server_that_another_sender_cannot_use(outcomes):
    first, second, third = results(outcomes, "returns_with_another_dtype")
    assert first["usable"] == second["usable"] == third["usable"] == [[0, 2, 3]]
    assert sum("its weights are float16" in message for message in first["messages"]) == 1
    assert not second["messages"] and not third["messages"]


def test_another_sender_says_that_it_waits_for_a_server(outcomes):
    first, second, third = results(outcomes, "late_server")
    assert first["usable"] == [[0, 1, 2, 3]]
    assert not any("waiting for" in message for message in first["messages"])
    assert second["messages"] and all(
        message.startswith("rank 1: waiting for rollout server 1") for message in second["messages"]
    )
    assert not third["messages"]


def test_a_slow_server_that_is_alone_in_its_share_does_not_make_the_others_late(outcomes):
    for rank in outcomes:
        assert rank["slow_alone"]["result"] == {"right": [True], "usable": [[0]]}
