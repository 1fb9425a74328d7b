"""Faults between a learner and its rollout servers, with real processes: the run recovers and trains what it would
have trained without the fault, or it ends in time with one clear error. No process is left.

Engines take long to start, so one run has several faults in turn.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordexp.demo.model import make_model
from tests.fake_server import slow, status
from tests.integration.faulty_proxy import FaultyProxy, does
from tests.integration.servers import GUARD, Fleet, wait_for
from tests.integration.stage2_runs import Started, check_steps, config, finish, started, steps, training

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

STEPS = 14
SYNC = 6.0  # seconds that a sync may take
RUN = {"training__lr_scheduler_type": "constant", "training__max_steps": STEPS, "training__save_steps": STEPS}
NOTICED = 9.0  # seconds in which a killed server is noticed, which is less than for a silent one
PASSES = does(lambda: None)
KILL, TERM, STOP, GO_ON = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT


@contextmanager
def proxied(fleet: Fleet, count: int) -> Iterator[list[FaultyProxy]]:
    """Yield proxies of the first servers."""
    proxies = [FaultyProxy(fleet.url(k)) for k in range(count)]
    yield proxies
    for proxy in proxies:
        proxy.close()


@pytest.fixture(scope="module")
def own(fleet: Fleet) -> Path:
    """The folder of an undisturbed run, whose learner answers itself."""
    finish(training(config(fleet.folder, "undisturbed", **RUN, rollout_matching__repeat_terminate=GUARD)))
    return fleet.folder / "undisturbed"


def through(fleet: Fleet, proxies: list[FaultyProxy], name: str, **changes: Any) -> Path:
    """Write the config of a run whose calls go through these proxies."""
    servers = [
        {"base_url": proxy.url, "group_port": server["group_port"]}
        for proxy, server in zip(proxies, fleet.servers, strict=False)
    ]
    ours = {"rollout_matching__vllm__server__servers": servers, "rollout_matching__vllm__sync__timeout_s": SYNC}
    return fleet.config(name, **(RUN | ours | changes))


@dataclass
class Learning:
    """A run, and what it has written so far."""

    run: Started
    folder: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        return steps(self.folder) if (self.folder / "metrics.jsonl").is_file() else []

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.folder / "servers.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [event for line in lines if (event := json.loads(line))["event"] == kind]

    def until(self, done: Callable[[], Any], seconds: float = 60) -> None:
        def is_done() -> bool:
            assert self.run.process.poll() is None, self.run.shown[-3000:]
            return bool(done())

        wait_for(is_done, seconds, lambda: self.run.shown)

    def wait_for_steps(self, count: int) -> None:
        """Wait until the run has done so many more steps."""
        goal = len(self.steps) + count
        self.until(lambda: len(self.steps) >= goal)

    def wait_for_end(self, code: int, seconds: float = 60) -> str:
        """Wait until the run ends with this code and leaves no process. Return its output."""
        assert self.run.wait(seconds) == code, self.run.shown[-3000:]
        assert self.run.remains() == {}
        shown = self.run.shown
        own = shown.partition("torch/distributed/elastic")[0]  # torchrun has a traceback of its own
        assert "Traceback" not in own, own[-3000:]
        return shown


@contextmanager
def learning(file: Path, *options: str, ranks: int = 1) -> Iterator[Learning]:
    with started(training(file, *options), ranks) as run:
        yield Learning(run, file.with_suffix(""))


def kill_while_it_answers(fleet: Fleet, index: int, number: signal.Signals) -> Callable[[], None]:
    """Return a function that sends the signal as soon as the server reports a running request."""

    def look(http: httpx.Client, pids: list[int]) -> None:
        with http:
            while "coordexp_running_requests 0.0" in http.get("/metrics").text:
                pass
        for pid in pids:
            os.kill(pid, number)

    def prepare() -> None:
        """Look up what takes long before the request is forwarded."""
        http = httpx.Client(base_url=fleet.url(index), trust_env=False, verify=False)
        threading.Thread(target=look, args=(http, list(fleet[index].left())), daemon=True).start()

    return prepare


# A run that goes on


@dataclass
class Eventful:
    """A run with two servers. The second server has one fault after the other."""

    fleet: Fleet
    proxies: list[FaultyProxy]
    learner: Learning
    seconds: dict[str, float] = field(default_factory=dict)
    syncs_before: dict[str, int] = field(default_factory=dict)  # the number of syncs before each fault
    boots: list[str] = field(default_factory=list)
    second: str = ""  # the output of a second learner
    shown: str = ""

    def begin(self) -> None:
        infer = (PASSES, slow(2.0), status(500))  # the first is the probe
        self.proxies[1].add_faults("/infer/", *infer)
        self.learner.until(self.proxies[1].is_clear)

    def stop_in_sync(self) -> None:
        with self.fault("stopped", "/load_bucket/", does(lambda: self.fleet.signal(1, STOP))):
            self.learner.wait_for_steps(1)
        self.fleet.signal(1, GO_ON)
        self.wait_until_back()

    def kill_in_generation(self) -> None:
        with self.fault("killed", "/infer/", does(kill_while_it_answers(self.fleet, 1, KILL))):
            self.learner.wait_for_steps(1)
        held = threading.Event()
        self.proxies[0].add_faults("/infer/", does(lambda: held.wait(200)))
        with learning(self.fleet.config("second", 1, **RUN)) as second:
            self.fleet.stop(1)
            self.fleet.start(1)
            self.second = second.wait_for_end(1)
        held.set()
        self.wait_until_back()

    def kill_in_sync(self) -> None:
        with self.fault("killed in sync", "/load_bucket/", does(lambda: self.fleet.signal(1, KILL))):
            self.learner.wait_for_steps(1)

    @contextmanager
    def fault(self, name: str, path: str, action: Any) -> Iterator[None]:
        self.syncs_before[name] = len(self.learner.events("sync"))
        warnings = self.learner.run.shown.count("warning: ")
        self.proxies[1].add_faults(path, action)
        self.learner.until(self.proxies[1].is_clear)
        began = time.monotonic()
        self.learner.until(lambda: self.learner.run.shown.count("warning: ") > warnings)
        self.seconds[name] = time.monotonic() - began
        yield

    def wait_until_back(self) -> None:
        self.learner.until(lambda: self.learner.events("sync")[-1]["synced"] == [0, 1])
        self.boots.append(self.learner.events("sync")[-1]["servers"][1]["boot"])


@pytest.fixture(scope="module")
def eventful(fleet: Fleet) -> Iterator[Eventful]:
    fleet.ensure(2)
    with proxied(fleet, 2) as proxies, learning(through(fleet, proxies, "eventful")) as learner:
        run = Eventful(fleet, proxies, learner)
        run.begin()
        run.stop_in_sync()
        run.kill_in_generation()
        run.kill_in_sync()
        run.shown = learner.wait_for_end(0)
        print("noticed after", {name: f"{seconds:.1f} s" for name, seconds in run.seconds.items()})
        yield run


def test_a_run_whose_server_fails_again_and_again_trains_what_it_would_have_trained(eventful, own):
    check_steps(eventful.learner.steps, steps(own))
    assert [event["version"] for event in eventful.learner.events("sync")] == list(range(STEPS))


def test_a_run_waits_for_a_slow_answer_and_goes_on_without_a_server_that_fails_at_one(eventful):
    slow_one, failed, *_ = eventful.learner.events("rollouts")
    assert slow_one["seconds"] > 2.0
    assert [(call["server"], call.get("lost")) for call in slow_one["calls"]] == [(0, None), (1, None)]
    first, lost, *again = [(call["server"], call.get("lost")) for call in failed["calls"]]
    assert (first, lost, {*again}) == ((0, None), (1, True), {(0, None)})


def test_the_run_goes_on_in_time_without_a_server_that_is_stopped_in_a_sync_until_it_continues(eventful):
    assert eventful.seconds["stopped"] < SYNC + 4
    syncs = eventful.learner.events("sync")[eventful.syncs_before["stopped"] :]
    failure = next(k for k, event in enumerate(syncs) if event["failed"])
    assert syncs[failure]["synced"] == [0] and list(syncs[failure]["failed"]) == ["1"]
    back = next(event for event in syncs[failure + 1 :] if 1 in event["synced"])
    assert back["probed"] == [1] and back["bytes"] == syncs[0]["bytes"]
    (reason,) = syncs[failure]["failed"].values()  # the learner or the server may be the first to notice
    assert "loaded weights too slowly" in reason or "no answer in" in reason


def test_requests_of_a_server_that_is_killed_while_it_answers_go_to_the_other(eventful):
    assert eventful.seconds["killed"] < NOTICED
    lost = [
        event for event in eventful.learner.events("rollouts") if any("lost" in call for call in event["calls"])
    ]
    assert len(lost) == 2  # before, it has failed at a request
    _, of_the_lost, *again = lost[1]["calls"]
    assert (of_the_lost["server"], of_the_lost["lost"]) == (1, True)
    assert {call["server"] for call in again} == {0}
    assert (of_the_lost["seed"], of_the_lost["count"]) == (again[0]["seed"], sum(call["count"] for call in again))


def test_a_restarted_server_gets_whole_weights_before_it_is_asked(eventful):
    stopped, restarted = eventful.boots
    assert stopped != restarted
    events = [*eventful.learner.events("sync"), *eventful.learner.events("rollouts")]
    back = next(event for event in events if event["event"] == "sync" and event["servers"][1]["boot"] == restarted)
    assert back["synced"] == [0, 1] and back["probed"] == [1]
    asked_again = {
        event["version"]
        for event in eventful.learner.events("rollouts")
        if event["version"] >= back["version"] and any(call["server"] == 1 for call in event["calls"])
    }
    assert back["version"] in asked_again


def test_the_run_goes_on_at_once_without_a_server_that_is_killed_in_a_sync(eventful):
    assert eventful.seconds["killed in sync"] < NOTICED
    last = eventful.learner.events("sync")[-1]
    assert last["synced"] == [0]
    syncs = eventful.learner.events("sync")[eventful.syncs_before["killed in sync"] :]
    (failed,) = [sync for sync in syncs if sync["failed"]]
    assert "rollout server 1" in failed["failed"]["1"]


def test_a_second_learner_is_refused_with_the_name_of_the_first(eventful):
    holder = f"learner {socket.gethostname()}:{eventful.learner.run.process.pid} holds this server"
    assert holder in eventful.second and "end that one, or give this run servers of its own" in eventful.second


# Runs that end


def test_a_server_that_does_not_fit_ends_the_run_at_its_beginning_with_one_error(fleet):
    fleet.ensure(1)
    other = str(make_model(fleet.folder / "other", "small"))
    with learning(fleet.config("other", 1, **(RUN | {"model__path": other}))) as learner:
        shown = learner.wait_for_end(1, 120)
    assert "it serves another model than " in shown
    assert "start it with the config that the learner has (model.path, " in shown
    assert "Traceback" not in shown and shown.count("rollout server 0 (") == 2, shown


def test_when_the_only_server_is_ended_while_it_answers_all_ranks_end_in_time_with_one_error(fleet):
    fleet.ensure(1)
    short = {"rollout_matching__vllm__server__timeout_s": 5.0, "training__max_steps": 500}
    with learning(fleet.config("abandoned", 1, **(RUN | short)), ranks=2) as learner:
        learner.until(lambda: learner.steps, 90)
        server, before = fleet[0], fleet[0].shown
        kill_while_it_answers(fleet, 0, TERM)()
        assert server.wait(30) == 0
        began = time.monotonic()
        assert server.remains() == {} and server.shown == before
        shown = learner.wait_for_end(1)
    print(f"ended {time.monotonic() - began:.1f} s after its server")
    assert time.monotonic() - began < 5 + 8
    problem = "no rollout server is left, and none came back in 5 s (rollout_matching.vllm.server.timeout_s)"
    assert shown.count(problem) == 2 and "nothing listens there" in shown and "continue with --resume" in shown
