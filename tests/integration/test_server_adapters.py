"""A real rollout server that loads adapters: one after the other, and whole weights instead."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.config.settings import Adapter
from coordexp.train.learner import learner_adapter, learner_weights, with_adapter
from tests.integration.servers import (
    Fleet,
    PlainClient,
    assert_ok,
    infer_request,
    model_weights,
    wait_for,
)
from tests.integration.stage2_runs import MODEL, finish, training
from tests.integration.test_server import answer_with_transformers, ids

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]

LORA = Adapter(rank=4, alpha=8, train_coord_rows=False)


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One server that was started with support for adapters."""
    fleet = Fleet(tmp_path_factory.mktemp("adapting"), 1, enable_lora=True, max_lora_rank=4)
    fleet.ensure(1)
    yield fleet
    fleet.close()


@pytest.fixture
def client(adapting: Fleet) -> Iterator[PlainClient]:
    plain = PlainClient(adapting.url(0), adapting.servers[0]["group_port"])
    wait_for(lambda: plain.http.get("/version/").json()["learner"] is None, 20)
    yield plain
    plain.close()


def adapted(seed: int, scale: float = 0.05, adapter: Adapter = LORA) -> Any:
    """Return the committed model with an adapter of random weights, as if it had been trained."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
    model = with_adapter(model, adapter, VocabularyTable.from_folder(MODEL).first_coord)
    draws = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.copy_(scale * torch.randn(weight.shape, generator=draws))
    return model


def answers(client: PlainClient, images: list[str]) -> list[list[int]]:
    return [ids(item) for item in client.infer([infer_request(image, guard=False) for image in images])]


def expected(model: Any, images: list[str]) -> list[list[int]]:
    return answer_with_transformers(list(learner_weights(model)), images)


def update(client: PlainClient, model: Any, version: str, group: str) -> None:
    config, weights = learner_adapter(model)
    client.update(weights, version, group, adapter=config)


def reported(client: PlainClient) -> tuple[str | None, str]:
    """Return the version and the base that the server reports."""
    facts = client.http.get("/version/").json()
    assert facts["lora"] is True
    return facts["weight_version"], facts["base"]


@pytest.mark.scenario("R07.C21", on="engine")
def test_a_run_that_trains_only_an_adapter_sends_only_the_adapter(adapting):
    """The server's answers are compared with the learner's after every sync."""
    changes = {
        "model__adapter": {"rank": 4, "alpha": 8, "train_coord_rows": False},
        "rollout_matching__vllm__sync__mode": "auto",
        "rollout_matching__vllm__sync__canary_every": 1,
        "training__max_steps": 3,
        "training__save_steps": 3,
        "training__learning_rate": 1e-2,
    }
    shown = finish(training(adapting.config("alone", **changes)))
    assert "warning: r" not in shown
    lines = (adapting.folder / "alone/servers.jsonl").read_text().splitlines()
    syncs = [event for line in lines if (event := json.loads(line))["event"] == "sync"]
    assert [(sync["sync_mode"], sync["fallbacks"], sync["probed"]) for sync in syncs] == [("adapter", [], [0])] * 3
    whole = sum(weight.nbytes for _, weight in model_weights())
    assert all(0 < sync["bytes"] < whole / 2 for sync in syncs)


def test_an_adapter_that_fails_leaves_the_answers_as_they_were(client, adapting):
    """One is too large, one is for a module that the server does not have, and the learner of one leaves."""
    images = adapting.images()[:4]
    model = adapted(3)
    with client.learner("learner") as group:
        assert_ok(client.join(group=group))
        update(client, model, "3", group)
        large = learner_adapter(adapted(4, adapter=LORA.model_copy(update={"rank": 16})))
        config, weights = learner_adapter(adapted(4))
        strange = (config, ((name.replace("v_proj", "w_proj"), weight) for name, weight in weights))
        for refused, weights in (large, strange):
            assert_ok(client.post("/begin_update/", group=group, version="4", adapter=refused))
            assert_ok(client.send(weights, group=group))
            answer = client.post("/finish_update/", group=group)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_refused"), answer.text
        config, weights = learner_adapter(adapted(5))
        assert_ok(client.post("/begin_update/", group=group, version="5", adapter=config))
        assert_ok(client.send(weights, group=group))
    wait_for(lambda: client.http.get("/version/").json()["learner"] is None, 20)
    assert reported(client) == ("3", "original")
    assert answers(client, images) == expected(model, images)
