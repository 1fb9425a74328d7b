"""A real rollout server that takes adapters: alone, one after the other, and whole weights instead."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.config.rollout import RolloutMatching
from coordexp.config.settings import Adapter
from coordexp.rollout.backend import AdapterWeights, Decode, Picture, Request
from coordexp.rollout.broadcast import flattened
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.server_backend import ServerBackend
from coordexp.rollout.setup import Setup
from coordexp.train.adapter import with_adapter
from coordexp.train.adapter_weights import learner_adapter
from coordexp.train.weights import learner_weights
from coordexp.vocab import VocabularyTable
from tests.integration.servers import (
    GUARD,
    Fleet,
    PlainClient,
    asked,
    concurrently,
    good,
    model_weights,
    wait_for,
)
from tests.integration.stage2_runs import MODEL, finish, training
from tests.integration.test_server import by_transformers, ids

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

LORA = Adapter(rank=4, alpha=8, train_coord_rows=False)


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One server, started with a place for adapters."""
    fleet = Fleet(tmp_path_factory.mktemp("adapting"), 1, enable_lora=True, max_lora_rank=4)
    fleet.ensure(1)
    yield fleet
    fleet.close()


@pytest.fixture
def client(adapting: Fleet) -> Iterator[PlainClient]:
    found = PlainClient(adapting.url(0), adapting.servers[0]["group_port"])
    wait_for(lambda: found.http.get("/version/").json()["session"] is None, 20)
    yield found
    found.close()


def adapted(seed: int, scale: float = 0.05, adapter: Adapter = LORA) -> Any:
    """The committed model with an adapter that has been trained, as it were."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
    model = with_adapter(model, adapter, VocabularyTable.from_folder(MODEL).first_coord)
    draws = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.copy_(scale * torch.randn(weight.shape, generator=draws))
    return model


def answers(client: PlainClient, pictures: list[str]) -> list[list[int]]:
    return [ids(item) for item in client.infer([asked(one, guard=False) for one in pictures])]


def expected(model: Any, pictures: list[str]) -> list[list[int]]:
    return by_transformers(list(learner_weights(model)), pictures)


def send(client: PlainClient, adapter: AdapterWeights, **more: Any) -> httpx.Response:
    config, weights = adapter
    told, buffer = flattened(weights, torch.empty(0, dtype=torch.uint8))
    body = {"peft_config": config, "metadatas": told, **more}
    with concurrently(lambda: client.post("/update_adapter_flattened_param/", **body)) as answer:
        client.group.broadcast(buffer)
    return answer[0]


def update(client: PlainClient, model: Any, version: str, session: str) -> None:
    good(client.post("/start_update/", session=session, version=version, adapter=True))
    good(send(client, learner_adapter(model), session=session))
    good(client.post("/finish_update/", session=session, version=version))


def told(client: PlainClient) -> tuple[str | None, str]:
    found = client.http.get("/version/").json()
    assert found["lora"] is True
    return found["weight_version"], found["base"]


@pytest.mark.scenario("R07.C21", on="engine")
def test_a_run_that_trains_an_adapter_alone_sends_it_alone(adapting):
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
    assert [(one["sync_mode"], one["fallbacks"], one["probed"]) for one in syncs] == [("adapter", [], [0])] * 3
    whole = sum(weight.nbytes for _, weight in model_weights())
    assert all(0 < one["bytes"] < whole / 2 for one in syncs)


def test_adapters_one_after_the_other_answer_as_peft_does(client, adapting):
    pictures = adapting.pictures()[:8]
    seen = []
    with client.session("learner") as session:
        good(client.join(session=session))
        for version, model in (("1", adapted(1)), ("2", adapted(2))):
            update(client, model, version, session)
            assert told(client) == (version, "original")
            seen.append(answers(client, pictures))
            assert seen[-1] == expected(model, pictures)
    assert seen[0] != seen[1]


def test_an_adapter_that_does_not_come_to_be_leaves_the_answers_as_they_were(client, adapting):
    """One that is too large, one for a module that the server does not have, one whose learner leaves."""
    pictures = adapting.pictures()[:4]
    model = adapted(3)
    with client.session("learner") as session:
        good(client.join(session=session))
        update(client, model, "3", session)
        large = learner_adapter(adapted(4, adapter=LORA.model_copy(update={"rank": 16})))
        config, weights = learner_adapter(adapted(4))
        strange = (config, ((name.replace("v_proj", "w_proj"), weight) for name, weight in weights))
        for refused in (large, strange):
            good(client.post("/start_update/", session=session, version="4", adapter=True))
            good(send(client, refused, session=session))
            answer = client.post("/finish_update/", session=session, version="4")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_refused"), answer.text
        good(client.post("/start_update/", session=session, version="5", adapter=True))
        good(send(client, learner_adapter(adapted(5)), session=session))
    wait_for(lambda: client.http.get("/version/").json()["session"] is None, 20)
    assert told(client) == ("3", "original")
    assert answers(client, pictures) == expected(model, pictures)


def test_a_client_of_the_plain_contract_sends_an_adapter(client, adapting):
    pictures = adapting.pictures()[:4]
    model = adapted(6)
    good(client.join())
    good(send(client, learner_adapter(model)))
    good(client.post("/reset_prefix_cache/"))
    assert told(client) == ("plain-1", "original")
    assert answers(client, pictures) == expected(model, pictures)


@pytest.mark.scenario("R07.S4", on="engine")
def test_a_server_that_got_whole_weights_takes_no_adapter_and_the_run_goes_on_with_whole_ones(client, adapting):
    pictures = adapting.pictures()[:8]
    model = adapted(7)
    said: list[str] = []
    recorded: list[dict[str, Any]] = []
    backend = _learner(adapting, lambda: model, said, recorded)

    def sync(version: int) -> str:
        backend.sync(lambda: learner_weights(model), version)
        found = backend.generate([Request(Picture(one, 64, 64), Decode.greedy(40)) for one in pictures])
        assert {one.version for one in found} == {version}
        end = backend.about.table.end_of_turn
        ends = [[*one.ids, *([end] if one.finish_reason == "stop" else [])] for one in found]
        assert ends == expected(model, pictures)
        return recorded[-2]["sync_mode"]

    assert sync(1) == "adapter" and told(client) == (backend._named(1), "original")
    backend.close()
    wait_for(lambda: client.http.get("/version/").json()["session"] is None, 20)
    with client.session("somebody") as session:
        good(client.join(session=session))
        client.update(model_weights(0.3), "babbling", session)
    assert told(client) == ("babbling", "changed")
    wait_for(lambda: client.http.get("/version/").json()["session"] is None, 20)
    backend = _learner(adapting, lambda: model, said, recorded)
    for version, seed in ((2, 8), (3, 9)):
        model = adapted(seed)
        assert sync(version) == "full" and told(client) == (backend._named(version), "changed")
    backend.close()
    (warning,) = [one for one in said if one.startswith("warning")]
    assert "base_changed" in warning and recorded[-2]["fallbacks"] == [warning]


def _learner(fleet: Fleet, model: Any, said: list[str], recorded: list[dict[str, Any]]) -> ServerBackend:
    table = VocabularyTable.from_folder(MODEL)
    prompts = PromptBuilder(AutoProcessor.from_pretrained(MODEL), "Detect all objects.")
    sync = {"mode": "adapter", "canary_every": 1, "timeout_s": 30.0}
    servers = {"servers": fleet.servers, "timeout_s": 30.0}
    vllm = {"mode": "server", "enable_lora": True, "server": servers, "sync": sync}
    settings = RolloutMatching(vllm=vllm, decode_batch_size=4, repeat_terminate=GUARD)
    return ServerBackend(
        Setup(MODEL, "float32", settings, table, torch.device("cpu")),
        prompts,
        HuggingFaceBackend(model, prompts, table, 4),
        Picture(fleet.pictures()[0], 64, 64),
        said.append,
        recorded.append,
        adapter=lambda: learner_adapter(model()),
    )
