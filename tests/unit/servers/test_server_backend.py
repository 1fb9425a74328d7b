"""A learner with rollout servers that fail: the run goes on with correct answers, or ends with one error.

The servers are fakes: real HTTP and real weight transfer, no model.
"""

import json
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch

from coordexp.errors import DataError, EngineError
from coordexp.servers import sender
from tests.fake_server import changed, dies, freezes, garbage, slow, status
from tests.unit.servers.served import Run, are_right, requests, wait_until

pytestmark = pytest.mark.timeout(30)


# Weights and answers


@pytest.mark.scenario("R07.C9", on="fake")
def test_every_server_has_the_learners_weights_bit_for_bit_after_a_sync(run):
    learner = run(sizes=[1, 2])
    learner.sync(0)
    assert all(learner.has_weights(server, 0) for server in learner.servers)
    learner.weights["w0"] = torch.zeros(9, 7)
    learner.sync(1)
    assert all(learner.has_weights(server, 1) for server in learner.servers)


def test_a_server_gets_the_length_of_the_next_bucket(run):
    learner = run(servers=1)
    learner.sync(0)
    bodies = [body for path, body in learner.servers[0].calls if path == "/load_bucket/"]
    lengths = [max(tensor["end_idx"] for tensor in body["metadatas"]) for body in bodies]
    assert len(lengths) > 3
    assert [body["next_bytes"] for body in bodies] == [*lengths[1:], 0]


@pytest.mark.scenario("R07.S3", on="fake")
def test_requests_go_to_the_same_servers_every_time_and_come_back_in_order(run):
    learner = run(servers=2, decode_batch_size=8)
    learner.sync(1)
    learner.clear_calls()
    assert are_right(learner.generate(5), 1)
    assert are_right(learner.generate(5), 1)
    assert learner.servers[0].asked() == [[100, 101, 102]] * 2
    assert learner.servers[1].asked() == [[103, 104]] * 2


@pytest.mark.scenario("R10.C6", "R15.C2", on="fake")
def test_no_rank_has_more_requests_out_than_the_devices_decode_at_once(run):
    learner = run(servers=2, decode_batch_size=2)
    learner.sync(1)
    learner.clear_calls()
    for server in learner.servers:
        server.faults["/infer/"].extend(slow(0.05) for _ in range(9))
    assert are_right(learner.generate(9), 1)
    assert [server.most_open for server in learner.servers] == [2, 2]
    assert all(len(call) == 1 for server in learner.servers for call in server.asked())
    assert sum(len(server.asked()) for server in learner.servers) == 9


# Rollouts that are started ahead of time


def test_rollouts_that_were_started_are_made_while_the_learner_does_something_else(run):
    learner = run(servers=2, decode_batch_size=1)
    learner.sync(1)
    for server in learner.servers:
        server.faults["/infer/"].extend(slow(0.1) for _ in range(3))
    began = time.monotonic()
    first, second = learner.backend.start([requests(3), requests(3, first=200)])
    assert time.monotonic() - began < 0.1
    assert are_right(learner.backend.finish(first, 1), 1)
    assert are_right(learner.backend.finish(second, 1), 1, first=200)
    events = [event for event in learner.events if event["event"] == "rollouts"]
    assert sum(call["count"] for event in events for call in event["calls"]) == 6


def test_a_server_that_dies_while_it_generates_ahead_is_replaced_by_the_others(run):
    learner = run(servers=2, decode_batch_size=1)
    learner.sync(1)
    learner.servers[1].faults["/infer/"].append(dies)
    started = learner.backend.start([requests(6)])[0]
    assert are_right(learner.backend.finish(started, 2), 1)
    assert set(learner.backend.pool.out) == {1}


def test_rollouts_that_no_server_could_make_ahead_are_made_with_the_weights_of_now(run):
    """The weights that they were asked from are gone; those of now are newer."""
    learner = run(servers=1, decode_batch_size=2)
    learner.sync(1)
    server = learner.servers[0]
    server.faults["/infer/"].append(dies)
    started = learner.backend.start([requests(2)])[0]
    started.generation.wait_until_idle()
    server.restart()
    learner.weights = {name: weight + 1 for name, weight in learner.weights.items()}
    rollouts = learner.backend.finish(started, 2)
    assert are_right(rollouts, 2) and learner.has_weights(server, 2)
    learner.clear_calls()
    learner.sync(2)
    assert not any("update" in path for path in server.paths())


@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_evaluation_has_brought_back_stays_in_the_pool(run, servers):
    """It is lost while it generates ahead. Before the rollouts are finished, evaluation syncs newer weights."""
    learner = run(servers=servers, decode_batch_size=2)
    learner.sync(1)
    learner.servers[0].faults["/infer/"].append(dies)
    first, second = learner.backend.start([requests(2), requests(2, first=200)])
    first.wait()
    learner.servers[0].restart()
    learner.sync(2)
    assert learner.backend.pool.usable == tuple(range(servers))
    learner.messages.clear()
    before = len([event for event in learner.events if event["event"] == "sync"])
    rollouts = [*learner.backend.finish(first, 2), *learner.backend.finish(second, 3)]
    assert {rollout.version for rollout in rollouts} <= {1, 2}
    assert learner.backend.pool.usable == tuple(range(servers)) and not learner.messages
    assert len([event for event in learner.events if event["event"] == "sync"]) == before


def test_calls_are_recorded_with_the_version_that_answered_them(run):
    learner = run(servers=1)
    learner.sync(1)
    started = learner.backend.start([requests(2)])[0]
    started.wait()
    learner.sync(2)  # as evaluation does
    assert are_right(learner.backend.finish(started, 2), 1)
    (event,) = [event for event in learner.events if event["event"] == "rollouts"]
    assert event["version"] == 1 and "version" not in event["calls"][0]


@pytest.mark.scenario("R07.C16", on="fake")
def test_without_requests_nothing_is_sent(run):
    learner = run()
    learner.sync(1)
    learner.clear_calls()
    assert learner.generate(0) == []
    assert [server.paths() for server in learner.servers] == [[], []]


@pytest.mark.scenario("R07.C24", "R39.C2", "R39.C4", "R39.S1", on="fake")
def test_a_calls_seed_is_that_of_its_first_request_and_every_request_has_its_own(run):
    learner = run(servers=2, decode_batch_size=8)
    learner.sync(1)
    learner.clear_calls()
    seeds = [900, 701, 20, 703]  # the first of a call is not its lowest
    learner.backend.generate([replace(requests(1)[0], seed=seed) for seed in seeds])
    bodies = [body for server in learner.servers for path, body in server.calls if path == "/infer/"]
    assert [body["request_config"]["seed"] for body in bodies] == [900, 20]
    assert [server.asked() for server in learner.servers] == [[[900, 701]], [[20, 703]]]


@pytest.mark.scenario("R07.C15", on="fake")
def test_a_base_url_is_the_prefix_of_every_route(run):
    learner = run(servers=1, options={"prefix": "/rollouts/first"})
    assert learner.servers[0].url.endswith("/rollouts/first")
    learner.sync(1)
    assert are_right(learner.generate(2), 1)
    paths = set(learner.servers[0].paths())
    assert {"/health/", "/infer/", "/get_world_size/", "/init_communicator/"} <= paths


@pytest.mark.scenario("R08.C4", on="fake")
def test_requests_and_weights_are_all_that_a_learner_sends(run):
    """No target, mask or label goes to a server, in any call of two steps."""
    learner = run(servers=2)
    for version in (1, 2):
        learner.sync(version)
        assert are_right(learner.generate(5), version)
    control = {"/health/", "/get_world_size/", "/version/", "/init_communicator/", "/begin_update/"}
    weights = {"/load_bucket/", "/finish_update/"}
    for server in learner.servers:
        assert set(server.paths()) <= control | weights | {"/infer/"}
        for _, body in (call for call in server.calls if call[0] == "/infer/"):
            assert set(body) == {"infer_requests", "request_config"}
            for request in body["infer_requests"]:
                assert set(request) == {"messages", "images", "data_dict"}
                assert set(request["data_dict"]) == {"coordexp"}
                assert set(request["data_dict"]["coordexp"]) == {"seed", "guard", "size"}


@pytest.mark.scenario("R15.C1", on="fake")
def test_each_server_is_asked_for_its_world_size_which_is_kept(run):
    learner = run(sizes=[1, 3])
    learner.sync(1)
    assert learner.backend.pool is not None
    assert learner.backend.pool.world_sizes == (1, 3)
    assert all("/get_world_size/" in server.paths() for server in learner.servers)
    learner.clear_calls()
    learner.generate(4)
    learner.sync(2)
    learner.generate(4)
    assert not any("/get_world_size/" in server.paths() for server in learner.servers)


# What stops a run


@pytest.mark.scenario("R07.C13", "R07.S6", on="fake")
def test_a_server_that_cannot_be_reached_in_timeout_s_stops_the_run_and_names_the_alternatives(run):
    learner = run(timeout_s=0.3)
    learner.servers[1].die()
    began = time.monotonic()
    with pytest.raises(EngineError) as error:
        learner.sync(0)
    assert 0.3 <= time.monotonic() - began < 3.0
    message, url = str(error.value), learner.servers[1].url
    for part in (url, "nothing listens", "coordexp serve", "--index 1", "mode: colocate"):
        assert part in message
    assert "rollout_backend: hf" in message
    wait_until(lambda: learner.servers[0].owner is None)


@pytest.mark.scenario("R07.C13", "R07.S6", on="fake")
def test_a_group_port_that_nothing_opens_in_timeout_s_stops_the_run_and_names_the_alternatives(run):
    learner = run(servers=1, timeout_s=0.4)
    learner.servers[0].faults["/init_communicator/"].append(slow(5))
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=f"group_port {learner.servers[0].group_port}.*\n.*port must be free"
    ) as error:
        learner.sync(0)
    assert 0.4 <= time.monotonic() - began < 3.0
    assert "rollout_matching.vllm.mode: colocate" in str(error.value)
    assert "rollout_matching.rollout_backend: hf" in str(error.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": {"config.hidden": 16}}, "config.hidden is 16 there and 8 here"),
        ({"dtype": "bfloat16"}, "its weights are bfloat16, but model.dtype is float32"),
        ({"guard": {"enabled": True}}, "its repeat_terminate.enabled is True, but the learner's is False"),
        ({"protocol": 1}, "with protocol 1, but this learner uses coordexp's protocol 4"),
        ({"world_size": 3}, "/get_world_size/ says 1, but /version/ says 3"),
        ({"boot": None}, "/version/ cannot be read: boot is None: Input should be a valid string"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(run, change, problem):
    learner = run(servers=1)
    learner.servers[0].facts = learner.servers[0].facts | change
    with pytest.raises(EngineError) as error:
        learner.sync(0)
    assert problem in str(error.value)


@pytest.mark.scenario("R15.S1", on="fake")
def test_more_ranks_than_decoding_slots_are_refused_when_the_servers_are_asked(run):
    learner = run(servers=2, decode_batch_size=1)
    learner.backend.ranks = 4
    with pytest.raises(EngineError) as error:
        learner.sync(0)
    assert "4 learner ranks each need one" in str(error.value)
    for way in ("decode_batch_size to at least 2", "add rollout devices", "at most 2 learner ranks"):
        assert way in str(error.value)


def test_a_learner_waits_for_a_server_to_leave_the_group_of_a_learner_that_has_just_died(run):
    learner = run(servers=1)
    server = learner.servers[0]
    server.owner = "the previous learner"
    of_the_old_group = socket.create_server(("127.0.0.1", server.group_port))

    def leave():
        of_the_old_group.close()
        server.owner = None

    threading.Timer(0.1, leave).start()
    learner.sync(0)
    assert learner.has_weights(server, 0)


def test_the_error_of_one_bad_request_names_its_image(run):
    learner = run(servers=1)
    learner.sync(1)
    error = {"error": {"code": "bad_request", "message": "no such image", "fix": "copy it there"}}
    learner.servers[0].faults["/infer/"].append(changed(lambda items: [items[0], error, *items[2:]]))
    with pytest.raises(EngineError, match=r"1\.png: rollout server 0 .* could not answer it: no such image"):
        learner.generate(3)


BROKEN = {
    "not JSON": (garbage(), "not JSON but '<html>Bad Gateway'"),
    "an object": (garbage(b"{}"), "a dict where a list of 2 should be"),
    "one too few": (changed(lambda items: items[1:]), "1 items where a list of 2"),
    "no response": (changed(lambda items: [{}, items[1]]), r"[0].response is missing"),
    "text for ids": (
        changed(lambda items: _set(items, "token_ids", ["a"])),
        "[0].response.choices[0].token_ids[0] is 'a': Input should be a valid integer",
    ),
    "logprobs of another length": (
        changed(lambda items: _set(items, "logprobs", {"content": []})),
        "4 token_ids and 0 logprobs",
    ),
    "an unknown end": (changed(lambda items: _set(items, "finish_reason", "abort")), "finish_reason is 'abort'"),
}


def _set(items, name, value):
    items[0]["response"]["choices"][0][name] = value
    return items


@pytest.mark.parametrize(("fault", "problem"), BROKEN.values(), ids=BROKEN)
def test_an_answer_that_cannot_be_read_is_one_error_with_server_and_field(run, fault, problem):
    learner = run(servers=1)
    learner.sync(1)
    learner.servers[0].faults["/infer/"].append(fault)
    with pytest.raises(EngineError) as error:
        learner.generate(2)
    assert problem in str(error.value)
    assert learner.servers[0].url in str(error.value)


@pytest.mark.scenario("R07.S5", "R30.C3", on="fake")
def test_another_prompt_than_that_of_training_is_refused(run):
    learner = run(servers=1)
    learner.sync(1)
    learner.servers[0].prompt_ids = (11, 12)
    with pytest.raises(DataError, match=r"0\.png: the engine's prompt"):
        learner.generate(1)


@pytest.mark.parametrize("replica", [0, 2])
def test_the_probe_is_answered_by_each_device_of_a_server(run, replica):
    learner = run(sizes=[3])
    learner.servers[0].faults["/infer/"].append(changed(lambda items: _less_likely(items, replica)))
    with pytest.raises(EngineError, match="does not have the learner's weights"):
        learner.sync(1)
    assert [len(call) for call in learner.servers[0].asked()] == [3]


def _less_likely(items, at):
    for entry in items[at]["response"]["choices"][0]["logprobs"]["content"]:
        entry["logprob"] -= 1.0
    return items


# What a run survives


ENGINE_FAILED = {"error": {"code": "engine", "message": "vLLM ended an answer by itself", "fix": "ask again"}}
FAULTS = {
    "dies": (dies, "connection failed"),
    "freezes": (freezes, "no response"),
    "empty": (status(503, "no_weights"), "answered 503 no_weights"),
    "fails": (status(500), "answered 500"),
    "engine fails": (
        changed(lambda items: [items[0], ENGINE_FAILED]),
        "could not answer it: vLLM ended an answer by itself",
    ),
}


@pytest.mark.scenario("R32.C2", on="fake")
@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS)
def test_requests_of_a_server_that_fails_while_it_answers_go_to_the_others_which_is_recorded(run, fault, reason):
    learner = run(silence=0.8 if fault is freezes else None)
    learner.sync(1)
    learner.servers[1].faults["/infer/"].append(fault)
    began = time.monotonic()
    assert are_right(learner.generate(4), 1)
    assert time.monotonic() - began < 8
    assert learner.backend.pool.usable == (0,) and "goes on without" in learner.messages[-1]
    *_, last = learner.events
    (lost,) = [call for call in last["calls"] if call.get("lost")]
    assert (lost["server"], lost["seed"], lost["count"]) == (1, 102, 2) and reason in lost["reason"]
    made = [call for call in last["calls"] if call is not lost]
    assert {call["server"] for call in made} == {0} and sum(call["count"] for call in made) == 4
    json.dumps(learner.events)


def test_a_run_waits_for_a_server_that_is_slow_but_alive(run):
    learner = run(servers=1, silence=0.8)
    learner.sync(1)
    learner.servers[0].faults["/infer/"].append(slow(1.6))  # twice as long as it may be silent
    assert are_right(learner.generate(2), 1)
    assert not any("goes on without" in message for message in learner.messages)


@pytest.mark.scenario("R07.C14", on="fake")
@pytest.mark.parametrize("seconds", [None, 0, -1])
def test_a_generation_call_has_no_timeout_when_infer_timeout_s_is_null_or_not_positive(run, seconds):
    """The call also takes longer than `timeout_s`, which is not for generation."""
    learner = run(servers=1, infer_timeout_s=seconds, timeout_s=1.0)
    learner.sync(1)
    learner.clear_calls()
    learner.servers[0].faults["/infer/"].append(slow(1.5))
    assert are_right(learner.generate(2), 1)
    assert learner.servers[0].paths().count("/infer/") == 1
    assert not any("goes on without" in message for message in learner.messages)


@pytest.mark.scenario("R07.C14", on="fake")
def test_a_server_that_takes_longer_than_the_timeout_that_was_set_is_lost(run):
    learner = run(infer_timeout_s=1.0)
    learner.sync(1)
    learner.servers[0].faults["/infer/"].append(slow(3))
    began = time.monotonic()
    assert are_right(learner.generate(4), 1)
    assert 1.0 <= time.monotonic() - began < 3.0
    assert learner.backend.pool.usable == (1,)
    assert any("no answer in 1.0 s (in /infer/)" in message for message in learner.messages)


@pytest.mark.scenario("R07.C14", on="fake")
def test_a_positive_infer_timeout_s_limits_no_other_call_than_generation(run):
    learner = run(servers=1, infer_timeout_s=0.3)
    others = ["/get_world_size/", "/version/", "/init_communicator/", "/begin_update/", "/finish_update/"]
    for path in others:
        learner.servers[0].faults[path].append(slow(0.5))
    learner.sync(1)
    assert learner.has_weights(learner.servers[0], 1) and set(others) <= set(learner.servers[0].paths())
    assert are_right(learner.generate(2), 1)


@pytest.mark.parametrize("fault", [dies, status(500, "update_failed")], ids=["dies", "fails"])
@pytest.mark.parametrize("path", ["/begin_update/", "/load_bucket/", "/finish_update/"])
def test_a_server_that_fails_in_a_sync_is_not_asked_until_it_has_had_a_full_sync(run, path, fault):
    learner = run()
    learner.sync(1)
    learner.servers[0].faults[path].append(fault)
    learner.sync(2)
    assert learner.backend.pool.usable == (1,)
    assert learner.has_weights(learner.servers[1], 2)
    assert are_right(learner.generate(4), 2)
    learner.servers[0].restart()
    learner.sync(3)
    assert learner.backend.pool.out == {}
    assert all(learner.has_weights(server, 3) for server in learner.servers)


def test_a_run_goes_on_at_once_without_a_server_that_hangs_in_a_sync_and_is_silent(run):
    learner = run(silence=0.8)
    learner.sync(1)
    learner.servers[0].faults["/load_bucket/"].append(freezes)
    began = time.monotonic()
    learner.sync(2)
    assert time.monotonic() - began < 5
    assert learner.backend.pool.usable == (1,)
    assert are_right(learner.generate(4), 2)


def test_a_run_goes_on_at_the_deadline_without_a_server_that_is_alive_and_loads_no_weights(run):
    learner = run(sync_timeout_s=8)  # the other server may be slow, too, on a busy machine
    learner.sync(1)
    learner.servers[0].faults["/load_bucket/"].append(slow(25))
    began = time.monotonic()
    learner.sync(2)
    assert time.monotonic() - began < 12
    assert learner.backend.pool.usable == (1,)
    assert any("too slowly for rollout_matching.vllm.sync.timeout_s" in message for message in learner.messages)
    learner.sync(3)
    assert learner.backend.pool.usable == (0, 1)
    assert all(learner.has_weights(server, 3) for server in learner.servers)


@pytest.mark.scenario("R07.C26", "R08.C2", on="fake")
@pytest.mark.parametrize("path", ["/finish_update/", "/version/"])
def test_a_server_that_does_not_report_the_new_version_is_not_synced(run, path):
    learner = run()
    learner.sync(1)
    learner.servers[0].faults[path].append(garbage(b'{"weight_version": "1"}'))
    learner.sync(2)
    assert learner.backend.pool.usable == (1,)
    assert (
        f"version {learner.backend.asker.name_version(2)} was sent, but it reports version 1"
        in learner.messages[-1]
    )


@pytest.mark.scenario("R08.C2", "R08.C5", "R20.C1", on="fake")
def test_a_restarted_server_is_not_used_before_it_has_the_weights(run):
    learner = run(servers=1)
    learner.sync(4)
    learner.servers[0].restart()
    assert are_right(learner.generate(3), 4)
    assert learner.has_weights(learner.servers[0], 4)
    assert any(
        f"version default, not {learner.backend.asker.name_version(4)}" in message for message in learner.messages
    )


def test_a_server_that_was_restarted_with_another_config_causes_one_warning(run):
    learner = run()
    learner.sync(1)
    learner.servers[0].facts["dtype"] = "float16"  # both servers share it, but the other is not checked again
    learner.servers[0].restart()
    for version in (2, 3, 4):
        learner.sync(version)
        assert learner.backend.pool.usable == (1,)
    problem = "its weights are float16, but model.dtype is float32"
    assert sum(problem in message for message in learner.messages) == 1


def test_a_server_that_comes_back_is_probed(run):
    learner = run(servers=1)
    learner.sync(4)
    learner.servers[0].restart()
    learner.own_model.logprob = -0.7
    with pytest.raises(EngineError, match="does not have the learner's weights"):
        learner.sync(5)


def test_a_run_waits_for_its_last_server(run):
    learner = run(servers=1)
    learner.sync(1)
    learner.servers[0].faults["/infer/"].append(dies)
    threading.Timer(0.6, learner.servers[0].restart).start()
    assert are_right(learner.generate(3), 1)
    assert learner.has_weights(learner.servers[0], 1)


@pytest.mark.parametrize("work", ["generate", "sync"])
def test_when_no_server_comes_back_the_run_ends_at_the_deadline(run, work):
    learner = run(servers=2, timeout_s=1.5)
    learner.sync(1)
    for server in learner.servers:
        server.die()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"no rollout server is left, and none came back in 1\.5 s"):
        learner.sync(2) if work == "sync" else learner.generate(2)
    assert time.monotonic() - began < 6


# What is written down


@pytest.mark.scenario("R09.C2", "R09.S1", on="fake")
def test_endpoints_sync_mode_and_seeds_are_recorded_with_each_step(run):
    learner = run()
    learner.sync(7)
    learner.generate(4)
    sync, rollouts = learner.events
    for name, attribute in (("base_url", "url"), ("group_port", "group_port"), ("boot", "boot")):
        expected = [getattr(server, attribute) for server in learner.servers]
        assert [recorded[name] for recorded in sync["servers"]] == expected
    assert (sync["version"], sync["sync_mode"], sync["fallbacks"], sync["synced"]) == (7, "full", [], [0, 1])
    assert sync["bytes"] >= sum(weight.nbytes for weight in learner.weights.values())
    assert (rollouts["version"], rollouts["sync_mode"]) == (7, "full")
    assert [(call["base_url"], call["count"], call["seed"]) for call in rollouts["calls"]] == [
        (learner.servers[0].url, 2, 100),
        (learner.servers[1].url, 2, 102),
    ]
    json.dumps(learner.events)


def test_closing_frees_the_servers(run):
    learner = run()
    learner.sync(1)
    learner.backend.close()
    wait_until(lambda: all(server.owner is None for server in learner.servers))


@pytest.mark.scenario("R08.C5", "R20.C1", on="fake")
def test_answers_from_another_learners_weights_of_the_same_step_are_not_accepted(run):
    """The connection was lost, and another learner has taken the server and sent its own weights of that step."""
    learner = run(1, timeout_s=1.5)
    learner.sync(5)
    server = learner.servers[0]
    learner.backend.sender.open[0]._joined.cut()
    wait_until(lambda: server.owner is None)
    other = Run(learner.folder, addresses=[(server.url, server.group_port)])
    other.weights = {name: weight + 1 for name, weight in learner.weights.items()}
    other.sync(5)
    assert other.has_weights(server, 5)
    with pytest.raises(EngineError, match="no rollout server is left"):
        learner.generate(2)
    other.close()


def test_a_server_that_cannot_be_used_is_not_tried_at_every_sync_while_others_answer(run, monkeypatch):
    monkeypatch.setattr(sender, "PAUSE", 1e6)  # however slow this machine is
    learner = run(2)
    learner.sync(1)
    learner.servers[1].restart()
    learner.servers[1].owner = "another learner's"
    learner.generate(4)
    learner.sync(2)
    attempts = learner.servers[1].paths().count("/init_communicator/")
    for version in (3, 4, 5):
        learner.sync(version)
    assert learner.servers[1].paths().count("/init_communicator/") == attempts and learner.backend.pool.usable == (
        0,
    )
