"""A learner with rollout servers, of which one fails: the run goes on with what is right, or ends with one error.

The servers are fakes: real HTTP and real weight transfer, no model.
"""

import json
import threading
import time

import pytest
import torch

from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import DataError, EngineError
from coordexp.rollout import server_backend, server_weights
from tests.fake_server import (
    answer_ids,
    changed,
    dies,
    freezes,
    garbage,
    slow,
    status,
)
from tests.unit.rollout.served import Run, right

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_backend, "AGAIN", 0.05)
    monkeypatch.setattr(server_weights, "BUCKET_BYTES", 700)
    monkeypatch.setattr(server_weights, "GRACE", 0.1)


@pytest.fixture
def run(tmp_path):
    made = []

    def of(*arguments, **changes) -> Run:
        made.append(Run(tmp_path, *arguments, **changes))
        return made[-1]

    yield of
    for one in made:
        one.close()


# Weights and answers


@pytest.mark.scenario("R07.C9", on="fake")
def test_every_server_has_the_learners_weights_bit_for_bit_after_a_sync(run):
    it = run(sizes=[1, 2])
    it.sync(0)
    assert all(it.has(one, 0) for one in it.servers)
    it.sent["w0"] = torch.zeros(9, 7)
    it.sync(1)
    assert all(it.has(one, 1) for one in it.servers)


def test_a_server_is_told_how_long_the_next_bucket_is_and_one_of_ms_swift_only_what_it_knows(run):
    it = run(servers=1)
    it.sync(0)
    told = [body for path, body in it.servers[0].calls if path == "/update_flattened_params/"]
    lengths = [max(one["end_idx"] for one in body["metadatas"]) for body in told]
    assert len(lengths) > 3
    assert [body["next_bytes"] for body in told] == [*lengths[1:], 0]
    other = run(servers=1, each={"foreign": True})
    other.sync(0)
    told = [body for path, body in other.servers[0].calls if path == "/update_flattened_params/"]
    assert all(body.keys() == {"metadatas"} for body in told)


def test_a_version_that_the_servers_have_is_not_sent_again(run):
    it = run()
    it.sync(3)
    it.forget()
    it.sync(3)
    assert not any("update" in path for one in it.servers for path in one.paths())


@pytest.mark.scenario("R07.S3", on="fake")
def test_requests_go_to_the_same_servers_every_time_and_come_back_in_order(run):
    it = run(servers=2, decode_batch_size=8)
    it.sync(1)
    it.forget()
    assert right(it.generate(5), 1)
    assert right(it.generate(5), 1)
    assert it.servers[0].asked() == [[100, 101, 102]] * 2
    assert it.servers[1].asked() == [[103, 104]] * 2


@pytest.mark.scenario("R15.C3", on="fake")
def test_servers_of_unequal_size_get_requests_in_proportion(run):
    it = run(sizes=[1, 3], decode_batch_size=2)
    it.sync(1)
    it.forget()
    assert right(it.generate(8), 1)
    assert [len(call) for one in it.servers for call in one.asked()] == [2, 6]


@pytest.mark.scenario("R10.C1", "R10.C6", "R15.C2", on="fake")
def test_no_rank_has_more_requests_out_than_the_devices_decode_at_once(run):
    it = run(servers=2, decode_batch_size=2)
    it.sync(1)
    it.forget()
    assert right(it.generate(9), 1)
    assert [len(call) for call in it.servers[0].asked()] == [2, 2, 1]


@pytest.mark.scenario("R07.C16", on="fake")
def test_no_request_sends_nothing(run):
    it = run()
    it.sync(1)
    it.forget()
    assert it.generate(0) == []
    assert [one.paths() for one in it.servers] == [[], []]


@pytest.mark.scenario("R07.C24", "R39.C2", "R39.C4", "R39.S1", on="fake")
def test_a_calls_seed_is_that_of_its_first_request_and_every_request_has_its_own(run):
    it = run(servers=2, decode_batch_size=8)
    it.sync(1)
    it.forget()
    it.generate(4, first=700)
    found = [body for one in it.servers for path, body in one.calls if path == "/infer/"]
    assert [body["request_config"]["seed"] for body in found] == [700, 702]
    assert [one.asked() for one in it.servers] == [[[700, 701]], [[702, 703]]]


def test_a_token_goes_with_every_call(run, monkeypatch):
    monkeypatch.setenv("COORDEXP_SERVER_TOKEN", "secret")
    it = run(servers=1, each={"token": "secret"})
    it.sync(1)
    assert right(it.generate(2), 1)
    assert {told for path, told in it.servers[0].headers} == {"Bearer secret"}


def test_a_wrong_token_is_told(run, monkeypatch):
    monkeypatch.setenv("COORDEXP_SERVER_TOKEN", "guess")
    it = run(servers=1, each={"token": "secret"})
    with pytest.raises(EngineError, match="401 unauthorized: no valid token"):
        it.sync(1)


# What stops a run


@pytest.mark.scenario("R07.C13", "R07.S6", on="fake")
def test_a_server_that_cannot_be_reached_in_timeout_s_stops_the_run_and_names_the_alternatives(run):
    it = run(timeout_s=0.3)
    it.servers[1].die()
    began = time.monotonic()
    with pytest.raises(EngineError) as error:
        it.sync(0)
    assert 0.3 <= time.monotonic() - began < 3.0
    told = str(error.value)
    for part in (it.servers[1].url, "nothing listens", "0 s", "coordexp serve", "--index 1", "mode: colocate"):
        assert part in told
    assert "rollout_backend: hf" in told
    assert it.servers[0].session is None or _soon(lambda: it.servers[0].session is None)


@pytest.mark.scenario("R07.C13", "R07.S6", on="fake")
def test_a_group_port_that_nothing_opens_in_timeout_s_stops_the_run_and_names_the_alternatives(run):
    it = run(servers=1, timeout_s=0.4)
    it.servers[0].faults["/init_communicator/"].append(slow(5))
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=f"group_port {it.servers[0].group_port}.*\n.*port must be free"
    ) as error:
        it.sync(0)
    assert 0.4 <= time.monotonic() - began < 3.0
    assert "rollout_matching.vllm.mode: colocate" in str(error.value)
    assert "rollout_matching.rollout_backend: hf" in str(error.value)


def test_another_model_is_refused_with_what_differs(run):
    it = run(servers=1)
    it.servers[0].about = it.servers[0].about | {"model": {"config.hidden": 16}}
    with pytest.raises(EngineError, match=r"another model.*config\.hidden is 16 there and 8 here"):
        it.sync(0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "bfloat16"}, "its weights are bfloat16, and model.dtype is float32"),
        ({"guard": {"enabled": True}}, "its repeat_terminate.enabled is True, and the learner's False"),
        ({"protocol": 1}, "with protocol 1, and this learner speaks coordexp's protocol 2"),
        ({"world_size": 3}, "/get_world_size/ says 1, and /version/ 3"),
        ({"boot": None}, "/version/ cannot be read: boot is None, which is no str"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(run, change, told):
    it = run(servers=1)
    it.servers[0].about = it.servers[0].about | change
    with pytest.raises(EngineError) as error:
        it.sync(0)
    assert told in str(error.value)


def test_a_server_whose_group_is_of_another_size_than_it_says_stops_the_run(run):
    """One worker more is waited for than there is."""
    it = run(sizes=[2], timeout_s=1.5)
    it.servers[0].faults["/init_communicator/"].append(_one_worker)
    with pytest.raises(EngineError, match="no group for weights"):
        it.sync(0)


def _one_worker(handler):
    handler.fake.world_size = 1
    return False


@pytest.mark.scenario("R15.S1", on="fake")
def test_more_ranks_than_decoding_slots_are_refused_when_the_servers_are_asked(run):
    it = run(servers=2, decode_batch_size=1)
    it.backend.links.learners = 4
    with pytest.raises(EngineError) as error:
        it.sync(0)
    assert "4 learner ranks each need one" in str(error.value)
    for way in ("decode_batch_size to at least 2", "add rollout devices", "at most 2 learner ranks"):
        assert way in str(error.value)


def test_a_server_that_another_learner_has_is_refused(run):
    it = run(servers=1)
    it.servers[0].session = "of somebody else"
    with pytest.raises(EngineError, match="409 session_taken: learner host:1 has it"):
        it.sync(0)


def test_the_session_of_a_learner_that_has_just_died_is_waited_for(run, monkeypatch):
    it = run(servers=1)
    it.servers[0].session = "of the one before"
    threading.Timer(0.1, setattr, (it.servers[0], "session", None)).start()
    it.sync(0)
    assert it.has(it.servers[0], 0)


def test_one_bad_request_is_told_with_its_picture(run):
    it = run(servers=1)
    it.sync(1)
    error = {"error": {"code": "bad_request", "message": "no such picture", "fix": "copy it there"}}
    it.servers[0].faults["/infer/"].append(changed(lambda items: [items[0], error, *items[2:]]))
    with pytest.raises(EngineError, match=r"1\.png: rollout server 0 .* could not answer it: no such picture"):
        it.generate(3)


BROKEN = {
    "no JSON": (garbage(), "no JSON but '<html>Bad Gateway'"),
    "an object": (garbage(b"{}"), "a dict where a list of 2 should be"),
    "one too few": (changed(lambda items: items[1:]), "1 items where a list of 2"),
    "no response": (changed(lambda items: [{}, items[1]]), r"[0].response is missing"),
    "text for ids": (
        changed(lambda items: _set(items, "token_ids", ["a"])),
        "[0].response.choices[0].token_ids[0] is 'a', which is no token id",
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


@pytest.mark.parametrize(("fault", "told"), BROKEN.values(), ids=BROKEN)
def test_an_answer_that_cannot_be_read_is_one_error_with_server_and_field(run, fault, told):
    it = run(servers=1)
    it.sync(1)
    it.servers[0].faults["/infer/"].append(fault)
    with pytest.raises(EngineError) as error:
        it.generate(2)
    assert told in str(error.value)
    assert it.servers[0].url in str(error.value)


@pytest.mark.scenario("R07.S5", on="fake")
def test_another_prompt_than_that_of_training_is_refused(run):
    it = run(servers=1)
    it.sync(1)
    it.servers[0].prompt_ids = (11, 12)
    with pytest.raises(DataError, match=r"0\.png: the engine's prompt"):
        it.generate(1)


def test_a_server_without_the_learners_weights_is_found_by_the_probe(run):
    it = run()
    it.own.logprob = -0.7
    with pytest.raises(EngineError, match="does not have the learner's weights"):
        it.sync(1)


@pytest.mark.parametrize("replica", [0, 2])
def test_the_probe_is_answered_by_each_device_of_a_server(run, replica):
    it = run(sizes=[3])
    it.servers[0].faults["/infer/"].append(changed(lambda items: _less_likely(items, replica)))
    with pytest.raises(EngineError, match="does not have the learner's weights"):
        it.sync(1)
    assert [len(call) for call in it.servers[0].asked()] == [3]


def _less_likely(items, at):
    for entry in items[at]["response"]["choices"][0]["logprobs"]["content"]:
        entry["logprob"] -= 1.0
    return items


# What a run survives


ENGINE_FAILED = {"error": {"code": "engine", "message": "vLLM ended an answer by itself", "fix": "ask again"}}
RETRIES = {
    "http_500": (status(500), "/infer/ answered 500"),
    "engine": (changed(lambda items: [items[0], ENGINE_FAILED]), "3.png: vLLM ended an answer by itself"),
}


@pytest.mark.scenario("R32.C2", on="fake")
@pytest.mark.parametrize("kind", RETRIES)
def test_a_call_that_the_server_failed_at_is_retried_once_with_the_same_seeds_and_the_retry_is_recorded(run, kind):
    it = run(servers=2, decode_batch_size=2)
    it.sync(5)
    it.forget()
    fault, reason = RETRIES[kind]
    it.servers[1].faults["/infer/"].append(fault)
    assert right(it.generate(4), 5)
    assert it.servers[0].asked() == [[100, 101]] and it.servers[1].asked() == [[102, 103]] * 2
    (retry,) = [event for event in it.recorded if event["event"] == "retry"]
    assert reason in retry.pop("reason")
    assert retry == {
        "event": "retry",
        "server": 1,
        "base_url": it.servers[1].url,
        "version": 5,
        "kind": kind,
        "requests": [{"image": "2.png", "seed": 102}, {"image": "3.png", "seed": 103}],
    }
    json.dumps(it.recorded)


def test_requests_of_a_server_that_fails_twice_go_to_the_others(run):
    it = run()
    it.sync(1)
    it.servers[0].faults["/infer/"] += [status(500), status(500)]
    assert right(it.generate(4), 1)
    assert it.backend.pool.usable == (1,)
    assert "left out" in it.said[-1]


@pytest.mark.parametrize("fault", [dies, freezes, status(503, "no_weights")], ids=["dies", "freezes", "empty"])
def test_requests_of_a_server_that_is_lost_while_it_answers_go_to_the_others(run, fault):
    it = run(silence=0.8 if fault is freezes else None)
    it.sync(1)
    it.servers[1].faults["/infer/"].append(fault)
    began = time.monotonic()
    assert right(it.generate(6), 1)
    assert time.monotonic() - began < 8
    assert it.backend.pool.usable == (0,)


def test_a_server_that_is_slow_and_alive_is_waited_for(run):
    it = run(servers=1, silence=0.8)
    it.sync(1)
    it.servers[0].faults["/infer/"].append(slow(1.6))  # twice as long as it may be silent
    assert right(it.generate(2), 1)
    assert not any("left out" in one for one in it.said)


@pytest.mark.scenario("R07.C14", on="fake")
@pytest.mark.parametrize("seconds", [None, 0, -1])
def test_a_generation_call_has_no_timeout_when_infer_timeout_s_is_null_or_not_positive(run, seconds):
    """The call also takes longer than `timeout_s`, which is not for generation."""
    it = run(servers=1, infer_timeout_s=seconds, timeout_s=1.0)
    it.sync(1)
    it.forget()
    it.servers[0].faults["/infer/"].append(slow(1.5))
    assert right(it.generate(2), 1)
    assert it.servers[0].paths().count("/infer/") == 1
    assert not any("left out" in one for one in it.said)


@pytest.mark.scenario("R07.C14", on="fake")
def test_a_server_that_takes_longer_than_the_timeout_that_was_set_is_lost(run):
    it = run(infer_timeout_s=1.0)
    it.sync(1)
    it.servers[0].faults["/infer/"].append(slow(3))
    began = time.monotonic()
    assert right(it.generate(4), 1)
    assert 1.0 <= time.monotonic() - began < 3.0
    assert it.backend.pool.usable == (1,)
    assert any("no answer in 1.0 s (in /infer/)" in one for one in it.said)


@pytest.mark.scenario("R07.C14", on="fake")
def test_a_positive_infer_timeout_s_limits_no_other_call_than_generation(run):
    it = run(servers=1, infer_timeout_s=0.3)
    others = ["/get_world_size/", "/version/", "/init_communicator/", "/start_update/", "/finish_update/"]
    for path in others:
        it.servers[0].faults[path].append(slow(0.5))
    it.sync(1)
    assert it.has(it.servers[0], 1) and set(others) <= set(it.servers[0].paths())
    assert right(it.generate(2), 1)


@pytest.mark.parametrize("fault", [dies, status(500, "update_failed")], ids=["dies", "fails"])
@pytest.mark.parametrize("path", ["/start_update/", "/update_flattened_params/", "/finish_update/"])
def test_a_server_that_fails_in_a_sync_is_left_out_and_comes_back_by_a_full_sync(run, path, fault):
    it = run()
    it.sync(1)
    it.servers[0].faults[path].append(fault)
    it.sync(2)
    assert it.backend.pool.usable == (1,)
    assert it.has(it.servers[1], 2)
    assert right(it.generate(4), 2)
    it.servers[0].restart()
    it.sync(3)
    assert it.backend.pool.out == {}
    assert all(it.has(one, 3) for one in it.servers)


def test_a_server_that_hangs_in_a_sync_is_left_out_at_once_when_it_is_silent(run):
    it = run(silence=0.8)
    it.sync(1)
    it.servers[0].faults["/update_flattened_params/"].append(freezes)
    began = time.monotonic()
    it.sync(2)
    assert time.monotonic() - began < 5
    assert it.backend.pool.usable == (1,)
    assert right(it.generate(4), 2)


def test_a_server_that_is_alive_and_takes_no_weights_is_left_out_at_the_deadline(run):
    it = run(sync_timeout_s=2)
    it.sync(1)
    it.servers[0].faults["/update_flattened_params/"].append(slow(8))
    began = time.monotonic()
    it.sync(2)
    assert time.monotonic() - began < 4
    assert it.backend.pool.usable == (1,)
    assert any("too slowly for rollout_matching.vllm.sync.timeout_s" in one for one in it.said)
    it.sync(3)
    assert it.backend.pool.usable == (0, 1)
    assert all(it.has(one, 3) for one in it.servers)


def test_a_version_that_is_not_committed_is_no_sync(run):
    it = run()
    it.sync(1)
    it.servers[0].faults["/finish_update/"].append(garbage(b'{"weight_version": "1"}'))
    it.sync(2)
    assert it.backend.pool.usable == (1,)
    assert f"version {it.backend._named(2)} was sent, and it says it has 1" in it.said[-1]


def test_a_server_that_was_started_anew_answers_nothing_before_it_has_the_weights(run):
    it = run(servers=1)
    it.sync(4)
    it.servers[0].restart()
    assert right(it.generate(3), 4)
    assert it.has(it.servers[0], 4)
    assert any(f"version default, not {it.backend._named(4)}" in one for one in it.said)


def test_a_server_that_was_started_anew_with_another_config_is_told_of_once(run):
    it = run()
    it.sync(1)
    it.servers[0].about["dtype"] = "float16"  # of both, and the other is not asked again
    it.servers[0].restart()
    for version in (2, 3, 4):
        it.sync(version)
        assert it.backend.pool.usable == (1,)
    assert [one for one in it.said if "its weights are float16, and model.dtype is float32" in one] == [
        it.said[-1]
    ]


def test_a_server_that_comes_back_is_probed(run):
    it = run(servers=1)
    it.sync(4)
    it.servers[0].restart()
    it.own.logprob = -0.7
    with pytest.raises(EngineError, match="does not have the learner's weights"):
        it.sync(5)


def test_the_last_server_is_waited_for(run):
    it = run(servers=1)
    it.sync(1)
    it.servers[0].faults["/infer/"].append(dies)
    threading.Timer(0.6, it.servers[0].restart).start()
    assert right(it.generate(3), 1)
    assert it.has(it.servers[0], 1)


@pytest.mark.parametrize("work", ["generate", "sync"])
def test_when_no_server_comes_back_the_run_ends_at_the_deadline(run, work):
    it = run(servers=2, timeout_s=1.5)
    it.sync(1)
    for one in it.servers:
        one.die()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"no rollout server is left, and none came back in 1\.5 s"):
        it.sync(2) if work == "sync" else it.generate(2)
    assert time.monotonic() - began < 6


def test_a_server_that_never_answers_right_ends_the_run_at_the_deadline(run):
    it = run(servers=1, timeout_s=1.5)
    it.sync(1)
    it.servers[0].faults["/infer/"] += [status(500)] * 1000
    with pytest.raises(EngineError, match="no rollout server is left"):
        it.generate(2)


# ms-swift


def test_a_server_of_ms_swift_gets_the_weights_and_is_asked(run):
    it = run(servers=1, each={"foreign": True})
    it.sync(3)
    assert {name: weight.tolist() for name, weight in it.servers[0].weights.items()} == {
        name: weight.tolist() for name, weight in it.sent.items()
    }
    calls = [path for path in it.servers[0].paths() if path != "/health/"]  # polled while a call takes long
    assert calls[-5:-1] == [
        "/process_weights_after_loading/", "/reset_prefix_cache/", "/reset_mm_cache/", "/reset_encoder_cache/",
    ]  # fmt: skip
    found = it.generate(2)
    assert [one.ids for one in found] == [tuple(answer_ids(100))] * 2  # one seed a call
    assert {one.version for one in found} == {3}


def test_a_server_of_ms_swift_may_be_silent_while_it_answers(run):
    it = run(servers=1, each={"foreign": True}, silence=0.4)
    it.sync(3)
    it.servers[0].faults["/infer/"].append(slow(1.2))
    assert len(it.generate(2)) == 2
    assert not any("left out" in one for one in it.said)


def test_an_older_server_of_ms_swift_is_told_of(run):
    it = run(servers=1, each={"foreign": True})
    it.servers[0].faults["/reset_encoder_cache/"].append(status(404))
    it.sync(3)
    assert any("has no /reset_encoder_cache/" in one for one in it.said)


@pytest.mark.scenario("R33.S2", on="fake")
def test_a_server_of_ms_swift_that_does_not_prove_its_guard_is_refused_and_the_plugin_is_named(run):
    it = run(servers=1, each={"foreign": True}, guard={"enabled": True})
    with pytest.raises(EngineError, match="reports no repeat guard") as error:
        it.sync(0)
    assert "swift rollout --external_plugins" in str(error.value)
    assert "coordexp.plugins.SWIFT_REPEAT_GUARD" in str(error.value)


PLUGIN_FAULTS = {
    "a worker lacks it": ({"workers": 1}, "active in 1 of its 2 workers"),
    "another threshold": ({"guard": {"enabled": True, "ngram_size": 3}}, "its repeat_terminate.ngram_size is 3"),
    "no settings": ({"guard": None}, "guard is None, which is no dict"),
}


@pytest.mark.scenario("R33.S2", on="fake")
@pytest.mark.parametrize(("change", "reason"), PLUGIN_FAULTS.values(), ids=PLUGIN_FAULTS)
def test_a_server_of_ms_swift_whose_guard_is_not_active_everywhere_or_another_one_is_refused(run, change, reason):
    it = run(sizes=[2], each={"foreign": True}, guard={"enabled": True})
    whole = RepeatTerminate(enabled=True).model_dump(mode="json")
    told = {"guard": whole, "workers": 2} | change
    it.servers[0].plugin = told | ({"guard": whole | told["guard"]} if told["guard"] else {})
    with pytest.raises(EngineError) as error:
        it.sync(0)
    assert reason in str(error.value)


@pytest.mark.scenario("R33.C3", on="fake")
def test_a_server_of_ms_swift_with_the_plugin_in_all_of_its_workers_may_be_used_with_the_guard(run):
    it = run(sizes=[2], each={"foreign": True}, guard={"enabled": True})
    it.servers[0].plugin = {"guard": RepeatTerminate(enabled=True).model_dump(mode="json"), "workers": 2}
    it.sync(3)
    assert len(it.generate(2)) == 2


# What is written down


@pytest.mark.scenario("R09.C2", "R09.S1", on="fake")
def test_endpoints_sync_mode_and_seeds_are_recorded_with_each_step(run):
    it = run()
    it.sync(7)
    it.generate(4)
    sync, rollouts = it.recorded
    assert [one["base_url"] for one in sync["servers"]] == [one.url for one in it.servers]
    assert [one["group_port"] for one in sync["servers"]] == [one.group_port for one in it.servers]
    assert [one["boot"] for one in sync["servers"]] == [one.boot for one in it.servers]
    assert (sync["version"], sync["sync_mode"], sync["fallbacks"], sync["synced"]) == (7, "full", [], [0, 1])
    assert sync["bytes"] >= sum(weight.nbytes for weight in it.sent.values())
    assert (rollouts["version"], rollouts["sync_mode"]) == (7, "full")
    assert [(call["base_url"], call["count"], call["seed"]) for call in rollouts["calls"]] == [
        (it.servers[0].url, 2, 100),
        (it.servers[1].url, 2, 102),
    ]
    json.dumps(it.recorded)


@pytest.mark.scenario("R09.C1", on="fake")
def test_adapters_that_cannot_be_sent_are_told_once_and_recorded(run):
    it = run(sync={"mode": "adapter"})
    it.sync(1)
    assert it.backend.described()["sync_mode"] == "full"
    (told,) = it.backend.described()["fallbacks"]
    assert told in it.said and "train_coord_rows" in told


def test_closing_ends_the_sessions(run):
    it = run()
    it.sync(1)
    it.backend.close()
    assert _soon(lambda: all(one.session is None for one in it.servers))


def _soon(fact) -> bool:
    until = time.monotonic() + 2
    while time.monotonic() < until and not fact():
        time.sleep(0.01)
    return fact()


def until(done):
    end = time.monotonic() + 5
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_answers_of_another_learner_at_the_same_step_are_not_taken_for_ones_own(run):
    """The connection was lost, and another learner has taken the server and sent its own weights of that step."""
    it = run(1, timeout_s=1.5)
    it.sync(5)
    server = it.servers[0]
    it.backend.links.open[0].session.close()
    until(lambda: server.session is None)
    other = Run(it.folder, at=[(server.url, server.group_port)])
    other.sent = {name: weight + 1 for name, weight in it.sent.items()}
    other.sync(5)
    assert other.has(server, 5)
    with pytest.raises(EngineError, match="no rollout server is left"):
        it.generate(2)
    other.close()


def test_a_request_that_the_servers_own_engine_fails_at_twice_ends_the_run(run):
    it = run(1)
    it.sync(1)
    for _ in range(2):
        it.servers[0].faults["/infer/"].append(changed(lambda items: [ENGINE_FAILED, *items[1:]]))
    with pytest.raises(EngineError, match=r"0\.png: .* could not answer it: vLLM ended an answer by itself"):
        it.generate(4)


def test_a_server_that_cannot_be_had_is_not_asked_at_every_sync_while_others_answer(run):
    it = run(2)
    it.sync(1)
    it.servers[1].restart()
    it.servers[1].session = "another learner's"
    it.generate(4)
    it.sync(2)
    asked = it.servers[1].paths().count("/session/")
    for version in (3, 4, 5):
        it.sync(version)
    assert it.servers[1].paths().count("/session/") == asked and it.backend.pool.usable == (0,)


def test_a_learner_that_fails_at_its_own_weights_leaves_no_delivery_waiting(run):
    it = run(1)
    it.sync(1)

    def broken():
        yield next(iter(it.sent.items()))
        raise ValueError("the weights are gone")

    before = threading.active_count()
    with pytest.raises(ValueError, match="the weights are gone"):
        it.backend.sync(broken, 2)
    until(lambda: threading.active_count() <= before)
