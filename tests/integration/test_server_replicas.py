"""A real rollout server with data-parallel replicas, which loads adapters: adapters and then whole weights reach
each of them, learners train on their answers, and the server ends if one of them dies."""

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.config.settings import Adapter
from coordexp.train.learner import learner_adapter, learner_weights, with_adapter
from tests.integration.servers import (
    GUARD,
    Fleet,
    PlainClient,
    assert_ok,
    concurrently,
    infer_request,
    model_weights,
    wait_for,
)
from tests.integration.stage2_runs import MODEL, config, finish, started, steps, training
from tests.integration.test_server import answer_with_transformers, ids

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

REPLICAS = 3
LORA = Adapter(rank=4, alpha=8, train_coord_rows=False)
COORDINATED = """
import os, time
from vllm.config import ParallelConfig
from vllm.v1.engine.coordinator import DPCoordinator
from coordexp.servers.processes import tied_to_owner
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
with tied_to_owner():
    coordinator = DPCoordinator(ParallelConfig(data_parallel_size=2, data_parallel_size_local=2))
print("coordinated", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One server with three replicas, which also loads adapters."""
    own = {"data_parallel_size": REPLICAS, "enable_lora": True, "max_lora_rank": 4, "gpu_memory_utilization": 0.05}
    fleet = Fleet(tmp_path_factory.mktemp("replicated"), 1, **own)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def client(replicated: Fleet) -> Iterator[PlainClient]:
    replicated.ensure(1)
    plain = PlainClient(replicated.url(0), replicated.servers[0]["group_port"])
    wait_for(lambda: plain.http.get("/version/").json()["learner"] is None, 20)
    yield plain
    plain.close()


def adapted(seed: int, adapter: Adapter = LORA) -> Any:
    """Return the committed model with an adapter of random weights, as if it had been trained."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
    model = with_adapter(model, adapter, VocabularyTable.from_folder(MODEL).first_coord)
    draws = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.copy_(0.05 * torch.randn(weight.shape, generator=draws))
    return model


def update(client: PlainClient, model: Any, version: str, group: str) -> None:
    config, weights = learner_adapter(model)
    client.update(weights, version, group, adapter=config)


def count_by_replica(client: PlainClient) -> list[int]:
    """Return how many requests each replica has answered so far, by vLLM's own count."""
    counts = [0] * REPLICAS
    for line in client.http.get("/metrics").text.splitlines():
        if line.startswith("vllm:request_success_total{") and (label := re.search(r'engine="(\d+)"', line)):
            counts[int(label[1])] += int(float(line.rpartition(" ")[2]))
    return counts


def check_every_replica(client: PlainClient, weights: list[Any], images: list[str]) -> None:
    """Assert that every replica answers some of the requests, and that all answers are those of `weights`."""
    before = count_by_replica(client)
    answers = [ids(item) for item in client.infer([infer_request(image, guard=False) for image in images])]
    made = [now - then for now, then in zip(count_by_replica(client), before, strict=True)]
    print("answers by replica:", made)
    assert sum(made) == len(images) and min(made) > 0
    assert answers == answer_with_transformers(weights, images)


@pytest.mark.full
def test_every_replica_answers_when_all_processes_start_anew(client, replicated):
    check_every_replica(client, model_weights(), replicated.images()[:12])


@pytest.mark.scenario("R07.C21", on="engine")
def test_a_run_that_trains_only_an_adapter_sends_only_the_adapter(client, replicated):
    """The server's answers are compared with the learner's after every sync. No test before has sent it whole
    weights, after which it takes no adapters."""
    changes = {
        "model__adapter": {"rank": 4, "alpha": 8, "train_coord_rows": False},
        "rollout_matching__vllm__sync__mode": "auto",
        "rollout_matching__vllm__sync__canary_every": 1,
        "training__max_steps": 3,
        "training__save_steps": 3,
        "training__learning_rate": 1e-2,
    }
    shown = finish(training(replicated.config("adapter", **changes)))
    assert "warning: r" not in shown
    lines = (replicated.folder / "adapter/servers.jsonl").read_text().splitlines()
    syncs = [event for line in lines if (event := json.loads(line))["event"] == "sync"]
    assert [(sync["sync_mode"], sync["fallbacks"], sync["probed"]) for sync in syncs] == [("adapter", [], [0])] * 3
    whole = sum(weight.nbytes for _, weight in model_weights())
    assert all(0 < sync["bytes"] < whole / 2 for sync in syncs)


def test_every_replica_gets_the_adapter_and_keeps_it_if_another_one_fails(client, replicated):
    """One is too large, one is for a module that the server does not have, and the learner of one leaves."""
    images = replicated.images()[:12]
    with client.learner("learner") as group:
        assert_ok(client.join(group=group))
        for version, seed in (("1", 1), ("2", 2)):
            model = adapted(seed)
            update(client, model, version, group)
            check_every_replica(client, list(learner_weights(model)), images)
        large = learner_adapter(adapted(3, adapter=LORA.model_copy(update={"rank": 16})))
        config, weights = learner_adapter(adapted(4))
        strange = (config, ((name.replace("v_proj", "w_proj"), weight) for name, weight in weights))
        for refused, weights in (large, strange):
            assert_ok(client.post("/begin_update/", group=group, version="3", adapter=refused))
            assert_ok(client.send(weights, group=group))
            answer = client.post("/finish_update/", group=group)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_refused"), answer.text
        config, weights = learner_adapter(adapted(5))
        assert_ok(client.post("/begin_update/", group=group, version="5", adapter=config))
        assert_ok(client.send(weights, group=group))
    wait_for(lambda: client.http.get("/version/").json()["learner"] is None, 20)
    facts = client.http.get("/version/").json()
    assert (facts["lora"], facts["weight_version"], facts["base"]) == (True, "2", "original")
    check_every_replica(client, list(learner_weights(model)), images)


@pytest.mark.scenario("R08.S1", on="engine")
def test_one_server_over_three_rollout_devices_and_a_learner_train_as_the_learner_alone(client, replicated):
    before, run = count_by_replica(client), {"training__max_steps": 2, "training__save_steps": 2}
    shown = finish(training(replicated.config("three-devices", **run)))
    made = [now - then for now, then in zip(count_by_replica(client), before, strict=True)]
    assert min(made) > 0, made
    assert "the rollout servers answer as the learner does" in shown
    folder = replicated.folder / "three-devices"
    (known,) = json.loads((folder / "run.json").read_text())[0]["rollouts"]["servers"]
    assert known["world_size"] == REPLICAS
    events = [json.loads(line) for line in (folder / "servers.jsonl").read_text().splitlines()]
    syncs = [event for event in events if event["event"] == "sync"]
    assert [(sync["version"], sync["sync_mode"], sync["synced"]) for sync in syncs] == [
        (0, "full", [0]),
        (1, "full", [0]),
    ]
    finish(training(config(replicated.folder, "alone", **run, rollout_matching__repeat_terminate=GUARD)))
    expected = [line["loss"] for line in steps(replicated.folder / "alone")]
    assert [line["loss"] for line in steps(folder)] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 2


def test_a_server_ends_with_an_error_when_one_of_its_replicas_dies(client, replicated):
    """It dies while the server answers."""
    server = replicated[0]
    babbling = [infer_request(image, guard=False) for image in replicated.images()]
    config = {"max_tokens": 200, "temperature": 1.0}

    def ask() -> Any:
        try:
            return client.post("/infer/", infer_requests=babbling, request_config=config).status_code
        except httpx.HTTPError as error:
            return type(error).__name__

    with concurrently(ask) as answer:
        wait_for(lambda: running(client) > 0, 20)
        os.kill(replica(server.process.pid, REPLICAS - 1), signal.SIGKILL)
        assert server.wait(60) != 0
    assert answer[0] != 200
    assert "the vLLM engine has ended" in server.shown
    assert not server.remains()


def test_the_coordinator_of_replicas_ends_with_a_server_that_is_killed():
    """The coordinator is started as vLLM starts it in a server, but without engines."""
    with started(["-c", COORDINATED]) as server:
        wait_for(lambda: "coordinated" in server.shown, 250, lambda: server.shown)
        assert len(server.left()) > 1
        server.process.kill()
        assert not server.remains()


def running(client: PlainClient) -> float:
    (line,) = re.findall(r"^coordexp_running_requests (.+)$", client.http.get("/metrics").text, re.MULTILINE)
    return float(line)


def replica(server: int, index: int) -> int:
    """Return the process id of a replica. vLLM sets the title of its process."""
    (pid,) = [
        process.pid
        for process in psutil.Process(server).children()
        if process.cmdline() and process.cmdline()[0].endswith(f"EngineCore_DP{index}")
    ]
    return pid
