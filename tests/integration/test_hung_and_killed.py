"""A server whose engine hangs reports it and ends itself. Servers that are killed, alone or with their launcher,
leave nothing: no process, no socket, no shared memory, no temporary file.

Engines take long to start, so the servers are started side by side.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.leavings import Leavings, leavings
from tests.integration.servers import GREEDY, Fleet, infer_request, wait_for
from tests.integration.stage2_runs import started

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]

HUNG_AFTER = 4.0  # seconds
HUNG, KILLED = 0, 1  # servers
COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # what vLLM compiles, kept for later starts; empty before this one


@pytest.fixture(scope="module")
def places() -> Iterator[Leavings]:
    with leavings() as made:
        yield made


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, places: Leavings) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("hung"), 2)
    fleet.vllm = {"server": {"servers": fleet.servers, "hung_after_s": HUNG_AFTER}}
    fleet.file = fleet.config("hung")
    fleet.variables = places.variables | {COMPILED: str(tmp_path_factory.mktemp("compiled"))}
    try:
        fleet.start(HUNG, KILLED)
        for index in (HUNG, KILLED):
            places.look(fleet[index].process.pid)
        assert places.sockets() and places.segments
        yield fleet
    finally:
        fleet.close()


@pytest.mark.parametrize("seed", [5, None])
def test_the_first_answer_of_a_new_server_with_log_probabilities_waits_for_no_compiler(servers, seed):
    """Compiling takes longer than the watchdog of this server waits."""
    compiled = set(Path(servers.variables[COMPILED]).rglob("*"))
    assert compiled
    requests = [infer_request(image) for image in servers.images()[:3]]
    sampling = GREEDY | {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "max_tokens": 4, "seed": seed}
    began = time.monotonic()
    for count in (1, 3):
        body = {"infer_requests": requests[:count], "request_config": sampling}
        answer = httpx.post(f"{servers.url(KILLED)}/infer/", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200 and "error" not in answer.text, answer.text
    print(f"first answers after {time.monotonic() - began:.1f} s")
    assert set(Path(servers.variables[COMPILED]).rglob("*")) == compiled


def test_a_server_whose_worker_hangs_reports_it_to_all_and_ends_itself(servers):
    server, url = servers[HUNG], servers.url(HUNG)
    answers: list[httpx.Response] = []
    body: dict[str, Any] = {
        "infer_requests": [infer_request(image, guard=False) for image in servers.images() * 4],
        "request_config": GREEDY | {"max_tokens": 200},
    }

    def ask() -> None:
        answers.append(httpx.post(f"{url}/infer/", json=body, timeout=60, trust_env=False))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: "coordexp_running_requests 1.0" in httpx.get(f"{url}/metrics", trust_env=False).text, 20)
    below = psutil.Process(server.process.pid).children(recursive=True)
    (worker,) = [process for process in below if " ".join(process.cmdline()).startswith("VLLM::Worker")]
    worker.suspend()
    began = time.monotonic()
    assert httpx.get(f"{url}/health/", trust_env=False).status_code == 200
    asking.join(60)
    seconds = time.monotonic() - began
    error = answers[0].json()["error"]
    assert (answers[0].status_code, error["code"]) == (503, "engine_hung"), error
    assert (
        error["message"].startswith("the engine hangs: its processes are alive and have not answered for ")
        and "hung_after_s" in error["fix"]
    )
    assert HUNG_AFTER - 1 < seconds < HUNG_AFTER + 12
    assert server.wait(40) == 1, server.shown[-3000:]
    print(f"reported after {seconds:.1f} s, ended after {time.monotonic() - began:.1f} s")
    assert not psutil.wait_procs(below, timeout=10)[1]
    assert f"{error['message'][:30]}" in server.shown and "Traceback" not in server.shown


def test_servers_that_hung_or_were_killed_leave_nothing(servers, places):
    server = servers[KILLED]
    below = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    assert server.wait(10) == -signal.SIGKILL
    assert not psutil.wait_procs(below, timeout=15)[1]
    wait_for(lambda: not places.left(), 5, lambda: str(places.left()))


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path_factory):
    with leavings() as places:
        fleet = Fleet(tmp_path_factory.mktemp("launched"), 1)
        words = ["-m", "coordexp", "launch", "--config", str(fleet.file), "--cpu", "--learners", "1"]
        with started(words, **places.variables) as run:
            wait_for(lambda: places.look(run.process.pid) and places.sockets(), 200, lambda: run.shown)
            below = psutil.Process(run.process.pid).children(recursive=True)
            os.kill(run.process.pid, signal.SIGKILL)
            assert not psutil.wait_procs(below, timeout=90)[1]  # a worker that starts ends after its imports
            wait_for(lambda: not places.left(), 5, lambda: str(places.left()))
