"""A learner that sends only its adapter, until a server cannot use it: from then on it sends whole weights. The
servers are fakes."""

import pytest
import torch

from coordexp.errors import EngineError
from tests.fake_server import dies, status
from tests.unit.servers.served import Run, are_right

pytestmark = pytest.mark.timeout(30)

CONFIG = {"r": 2, "lora_alpha": 4}
ADAPTER = {f"{name}.lora_{half}.weight": torch.randn(2, 30) for name in ("q", "k", "v", "o") for half in "AB"}
START, BUCKET, FINISH = "/begin_update/", "/load_bucket/", "/finish_update/"


@pytest.fixture
def adapting(run):
    """A function that starts runs with an adapter."""

    def start(**changes) -> Run:
        sync = {"mode": "adapter"} | changes.pop("sync", {})
        return run(sync=sync, adapter=lambda: (CONFIG, iter(ADAPTER.items())), **changes)

    return start


def has_adapter(server, version) -> bool:
    same = all(torch.equal(server.weights[name], weight) for name, weight in ADAPTER.items())
    return same and set(server.weights) == set(ADAPTER) and (server.adapter, server.version) == (CONFIG, version)


def kinds(learner) -> list[bool]:
    """Return whether it was an adapter, for each update that was begun."""
    calls = [body for server in learner.servers for path, body in server.calls if path == START]
    return [body["adapter"] == CONFIG for body in calls]


def warnings(learner) -> list[str]:
    return [message for message in learner.messages if message.startswith("warning")]


@pytest.mark.scenario("R07.C21", on="fake")
def test_only_the_adapter_is_sent_to_every_server_and_this_is_recorded(adapting):
    learner = adapting()
    for version in (1, 2):
        learner.sync(version)
        assert all(has_adapter(server, learner.backend.asker.name_version(version)) for server in learner.servers)
        assert are_right(learner.generate(6), version)
    assert all(server.paths().count(BUCKET) >= 4 for server in learner.servers)
    assert kinds(learner) == [True] * 4 and warnings(learner) == []
    assert {event["sync_mode"] for event in learner.events} == {"adapter"}
    assert learner.backend.describe()["fallbacks"] == []


@pytest.mark.scenario("R07.S4", "R09.C1", on="fake")
@pytest.mark.parametrize(
    ("path", "code", "status_code"),
    [
        (START, "base_changed", 409),
        (START, "no_lora", 409),
        (START, "no_route", 404),
        (FINISH, "adapter_refused", 409),
        (FINISH, "update_failed", 500),
    ],
)
def test_a_run_whose_server_refuses_the_adapter_sends_whole_weights_from_then_on(
    adapting, path, code, status_code
):
    learner = adapting()
    learner.sync(1)
    learner.servers[1].faults[path].append(status(status_code, code))
    learner.sync(2)
    assert all(learner.has_weights(server, 2) for server in learner.servers) and are_right(learner.generate(6), 2)
    (warning,) = warnings(learner)
    assert warning.startswith("warning: rollout server 1") and code in warning
    assert warning.endswith("whole weights are sent from here on")
    learner.clear_calls()
    learner.sync(3)
    assert all(learner.has_weights(server, 3) for server in learner.servers) and are_right(learner.generate(6), 3)
    assert kinds(learner) == [False] * 2
    assert warnings(learner) == [warning] == learner.backend.describe()["fallbacks"]
    modes = [(event["version"], event["sync_mode"]) for event in learner.events if event["event"] == "sync"]
    assert modes == [(1, "adapter"), (2, "full"), (3, "full")]


def test_a_server_that_refuses_an_adapter_half_way_is_joined_again_for_whole_weights(adapting):
    """The group may still hold a part of the adapter."""
    learner = adapting()
    learner.sync(1)
    learner.servers[1].faults[BUCKET].append(status(400, "bad_request"))
    learner.sync(2)
    learner.sync(3)
    assert all(learner.has_weights(server, 3) for server in learner.servers) and are_right(learner.generate(6), 3)
    assert learner.servers[1].paths().count("/init_communicator/") == 2
    assert learner.backend.sender.sync_mode.mode == "full" and len(learner.backend.describe()["fallbacks"]) == 1


@pytest.mark.scenario("R07.C23", on="fake")
def test_a_run_that_may_not_fall_back_stops_and_names_the_alternatives(adapting):
    learner = adapting(sync={"fallback_to_full": False})
    learner.servers[0].faults[START].append(status(409, "base_changed"))
    with pytest.raises(EngineError) as error:
        learner.sync(1)
    problem, fix = str(error.value).splitlines()
    assert "base_changed" in problem
    assert "sync.mode: full, or sync.fallback_to_full: true" in fix and "rollout_backend: hf" in fix
    assert all(kinds(learner))


def test_a_server_that_dies_in_an_adapter_sync_is_no_reason_to_fall_back(adapting):
    learner = adapting()
    learner.sync(1)
    learner.servers[1].faults[FINISH].append(dies)
    learner.sync(2)
    assert has_adapter(learner.servers[0], learner.backend.asker.name_version(2)) and are_right(
        learner.generate(4), 2
    )
    learner.servers[1].restart()
    learner.sync(3)
    assert all(has_adapter(server, learner.backend.asker.name_version(3)) for server in learner.servers)
    assert are_right(learner.generate(4), 3)
    assert learner.backend.sender.sync_mode.mode == "adapter" and learner.backend.describe()["fallbacks"] == []
