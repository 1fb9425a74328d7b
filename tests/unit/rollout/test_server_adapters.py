"""A learner that sends its adapter alone, until a server cannot take it: then whole weights, for good. The servers
are fakes."""

import pytest
import torch

from coordexp.errors import EngineError
from coordexp.rollout import server_backend, server_weights
from tests.fake_server import dies, status
from tests.unit.rollout.served import Run, right

pytestmark = pytest.mark.timeout(30)

CONFIG = {"r": 2, "lora_alpha": 4}
ADAPTER = {f"{name}.lora_{half}.weight": torch.randn(2, 30) for name in ("q", "k", "v", "o") for half in "AB"}
START, BUCKET, FINISH = "/start_update/", "/update_adapter_flattened_param/", "/finish_update/"


@pytest.fixture
def adapting(tmp_path, monkeypatch):
    """Runs whose buckets hold only a part of the adapter."""
    monkeypatch.setattr(server_backend, "AGAIN", 0.05)
    monkeypatch.setattr(server_weights, "BUCKET_BYTES", 700)
    monkeypatch.setattr(server_weights, "GRACE", 0.1)
    made = []

    def of(**changes) -> Run:
        sync = {"mode": "adapter"} | changes.pop("sync", {})
        made.append(Run(tmp_path, sync=sync, adapter=lambda: (CONFIG, iter(ADAPTER.items())), **changes))
        return made[-1]

    yield of
    for one in made:
        one.close()


def has_adapter(server, version) -> bool:
    same = all(torch.equal(server.weights[name], weight) for name, weight in ADAPTER.items())
    return same and set(server.weights) == set(ADAPTER) and (server.adapter, server.version) == (CONFIG, version)


def warnings(it) -> list[str]:
    return [said for said in it.said if said.startswith("warning")]


@pytest.mark.scenario("R07.C21", on="fake")
def test_the_adapter_alone_goes_to_every_server_and_this_is_recorded(adapting):
    it = adapting()
    for version in (1, 2):
        it.sync(version)
        assert all(has_adapter(server, it.backend._named(version)) for server in it.servers)
        assert right(it.generate(6), version)
    assert all(server.paths().count(BUCKET) >= 4 for server in it.servers)
    assert not any("/update_flattened_params/" in server.paths() for server in it.servers)
    assert warnings(it) == []
    assert {event["sync_mode"] for event in it.recorded} == {"adapter"}
    assert it.backend.described()["fallbacks"] == []


@pytest.mark.scenario("R07.S4", "R09.C1", on="fake")
@pytest.mark.parametrize(
    ("path", "code", "number"),
    [
        (START, "base_changed", 409),
        (START, "no_lora", 409),
        (START, "no_route", 404),
        (FINISH, "adapter_refused", 409),
        (FINISH, "update_failed", 500),
    ],
)
def test_a_server_that_refuses_the_adapter_turns_the_run_to_whole_weights_for_good(adapting, path, code, number):
    it = adapting()
    it.sync(1)
    it.servers[1].faults[path].append(status(number, code))
    it.sync(2)
    assert all(it.has(server, 2) for server in it.servers) and right(it.generate(6), 2)
    (told,) = warnings(it)
    assert told.startswith("warning: rollout server 1") and code in told
    assert told.endswith("whole weights are sent from here on")
    it.forget()
    it.sync(3)
    assert all(it.has(server, 3) for server in it.servers) and right(it.generate(6), 3)
    assert not any(BUCKET in server.paths() for server in it.servers)
    assert warnings(it) == [told] == it.backend.described()["fallbacks"]
    modes = [(event["version"], event["sync_mode"]) for event in it.recorded if event["event"] == "sync"]
    assert modes == [(1, "adapter"), (2, "full"), (3, "full")]


def test_a_server_that_refuses_an_adapter_on_its_way_is_joined_anew_for_whole_weights(adapting):
    """The group may still hold a part of the adapter."""
    it = adapting()
    it.sync(1)
    it.servers[1].faults[BUCKET].append(status(400, "bad_request"))
    it.sync(2)
    it.sync(3)
    assert all(it.has(server, 3) for server in it.servers) and right(it.generate(6), 3)
    assert it.servers[1].paths().count("/init_communicator/") == 2
    assert it.backend.sync_mode.mode == "full" and len(it.backend.described()["fallbacks"]) == 1


@pytest.mark.scenario("R07.C23", on="fake")
def test_a_run_that_may_not_fall_back_stops_with_the_ways_out(adapting):
    it = adapting(sync={"fallback_to_full": False})
    it.servers[0].faults[START].append(status(409, "base_changed"))
    with pytest.raises(EngineError) as error:
        it.sync(1)
    first, *ways = str(error.value).splitlines()
    assert "base_changed" in first
    assert "sync.mode: full, or sync.fallback_to_full: true" in ways[0] and "rollout_backend: hf" in ways[0]
    assert not any("/update_flattened_params/" in server.paths() for server in it.servers)


def test_a_server_that_dies_in_an_adapter_sync_is_no_reason_to_fall_back(adapting):
    it = adapting()
    it.sync(1)
    it.servers[1].faults[FINISH].append(dies)
    it.sync(2)
    assert has_adapter(it.servers[0], it.backend._named(2)) and right(it.generate(4), 2)
    it.servers[1].restart()
    it.sync(3)
    assert all(has_adapter(server, it.backend._named(3)) for server in it.servers) and right(it.generate(4), 3)
    assert it.backend.sync_mode.mode == "adapter" and it.backend.described()["fallbacks"] == []


def test_to_a_server_of_ms_swift_whole_weights_are_sent(adapting):
    it = adapting(servers=1, each={"foreign": True})
    it.sync(1)
    (told,) = [said for said in warnings(it) if "whole weights are sent" in said]
    assert "ms-swift" in told
    assert BUCKET not in it.servers[0].paths() and set(it.servers[0].weights) == set(it.sent)
