"""A real rollout server, asked as clients of ms-swift ask it: with plain HTTP. Weights come from a real group."""

import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.guard import KeyCounter, key_pattern, loop_in
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.servers.transfer import flatten
from tests.integration.servers import (
    GREEDY,
    GUARD,
    SERVE,
    Fleet,
    PlainClient,
    assert_ok,
    base64_of,
    concurrently,
    infer_request,
    model_weights,
    wait_for,
)
from tests.integration.stage2_runs import MODEL, started

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]


@pytest.fixture
def client(fleet: Fleet) -> Iterator[PlainClient]:
    """A client of a server that has the committed model's weights, whatever the previous test has sent."""
    fleet.ensure(1)
    plain = PlainClient(fleet.url(0), fleet.servers[0]["group_port"])
    wait_for(lambda: plain.http.get("/version/").json()["learner"] is None, 20)
    yield plain
    plain.close()
    again = PlainClient(fleet.url(0), fleet.servers[0]["group_port"])
    with again.learner("the fixture") as group:
        assert_ok(again.join(group=group))
        again.update(model_weights(), "restored", group)
    again.close()


def ids(item: dict[str, Any]) -> list[int]:
    return list(item["response"]["choices"][0]["token_ids"])


def answer_with_transformers(weights: list[tuple[str, torch.Tensor]], images: list[str]) -> list[list[int]]:
    """Return the answers of the same weights in this process, with the end of turn."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
    assert not model.load_state_dict(dict(weights), strict=False).unexpected_keys
    prompts = PromptBuilder(AutoProcessor.from_pretrained(MODEL), "Detect all objects.")
    table = VocabularyTable.from_folder(MODEL)
    backend = HuggingFaceBackend(lambda: model, prompts, table, 8)
    decode = Decode.greedy(GREEDY["max_tokens"])
    answers = backend.generate([Request(ImageRef(image, 64, 64), decode) for image in images])
    return [[*answer.ids, *([table.end_of_turn] if answer.finish_reason == "stop" else [])] for answer in answers]


def test_the_recorded_calls_of_an_ms_swift_client_are_answered_in_its_form(client, fleet):
    """Written by hand from the contract: these payloads, these fields."""
    http = client.http
    assert http.get("/health/").status_code == 200
    assert http.get("/get_world_size/").json() == {"world_size": 1}
    request = {
        "messages": [{"role": "user", "content": "<image>Detect all objects."}],
        "images": [fleet.images()[0]],
        "audios": [],
        "videos": [],
        "tools": None,
        "objects": {},
        "chat_template_kwargs": {},
        "data_dict": {"solution": "x"},
        "uuid": "chatcmpl-1",
    }
    config = {
        "max_tokens": 12,
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "stop": [],
        "seed": 42,
        "stream": False,
        "logprobs": True,
        "n": 2,
        "return_details": True,
    }
    (item,) = http.post("/infer/", json={"infer_requests": [request], "request_config": config}).json()
    response = item["response"]
    assert response["object"] == "chat.completion" and response["usage"]["prompt_tokens"] == 46
    assert len(response["prompt_token_ids"]) == 46
    first, second = response["choices"]
    assert first["message"]["role"] == "assistant" and first["message"]["content"].startswith('{"object_1"')
    assert first["token_ids"] == second["token_ids"] and len(first["token_ids"]) == 12
    assert first["finish_reason"] == "length" and len(first["logprobs"]["content"]) == 12
    assert http.post("/infer/", json={"infer_requests": [], "request_config": config}).json() == []


@pytest.mark.scenario("R40.S1", on="engine")
def test_a_local_path_and_base64_give_the_same_prompt_and_answer(client, fleet):
    image = fleet.images()[0]
    sources = [image, base64_of(image), f"data:image/png;base64,{base64_of(image)}"]
    items = client.infer([infer_request(source) for source in sources])
    assert len({tuple(item["response"]["prompt_token_ids"]) for item in items}) == 1
    prompts = PromptBuilder(AutoProcessor.from_pretrained(MODEL), "Detect all objects.")
    assert items[0]["response"]["prompt_token_ids"] == prompts.ids(64, 64)
    assert len({tuple(ids(item)) for item in items}) == 1


def test_a_bad_request_fails_alone_with_a_reason(client, fleet):
    good_one = infer_request(fleet.images()[0])
    bad = [
        infer_request("/etc/passwd"),
        infer_request("http://127.0.0.1/a.png"),
        {"messages": []},
        {"messages": [{"role": "user", "content": "no image"}], "images": [fleet.images()[0]]},
        "garbage",
        infer_request(fleet.images()[0].replace(".png", "-missing.png")),
    ]
    items = client.infer([good_one, *bad, good_one])
    assert ids(items[0]) == ids(items[-1]) == ids(client.infer([good_one])[0])
    for item in items[1:-1]:
        assert item["error"]["code"] == "bad_request" and item["error"]["message"]
    (long,) = client.infer([infer_request(fleet.images()[0]) | {"messages": [LONG]}])
    assert "256" in long["error"]["message"]


LONG = {"role": "user", "content": "<image>" + "Detect all objects. " * 200}


def test_a_learner_that_leaves_half_way_is_replaced_and_its_weights_are_never_used(client, fleet):
    weights, request = model_weights(), [infer_request(fleet.images()[0])]
    before = client.infer(request)
    with client.learner("first") as group:
        assert_ok(client.join(group=group))
        body = {"group": "second", "port": client.port, "world_size": 2}
        second = httpx.post(f"{client.url}/init_communicator/", json=body, trust_env=False, timeout=30)
        assert second.status_code == 409 and "test:1" in second.text
        assert_ok(client.post("/begin_update/", group=group, version="1"))
        assert_ok(client.send(weights[:20], group=group))
    wait_for(lambda: client.http.get("/version/").json()["learner"] is None, 20)
    refused = client.post("/infer/", infer_requests=request, request_config=GREEDY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_weights")
    assert client.http.get("/version/").json()["weight_version"] is None
    client.group.close()
    with client.learner("second") as group:
        assert_ok(client.join(group=group))
        client.update(weights, "2", group)
    assert [ids(item) for item in client.infer(request)] == [ids(item) for item in before]


def leave_out_a_weight(client: PlainClient, weights: Any, group: str) -> httpx.Response:
    assert_ok(client.send(weights[1:], group=group))
    return client.post("/finish_update/", group=group)


def cut_off_a_row(client: PlainClient, weights: Any, group: str) -> httpx.Response:
    """The weight and the one before it are parts of one layer in the engine."""
    parts = [part for part in weights if part[0].endswith(("q_proj.weight", "k_proj.weight"))]
    return client.send([parts[0], (parts[1][0], parts[1][1][:-1])], group=group)


def send_a_nan(client: PlainClient, weights: Any, group: str) -> httpx.Response:
    name, tensor = weights[30]
    broken = tensor.clone()
    broken.view(-1)[-1] = float("nan")
    return client.send([*weights[:30], (name, broken)], group=group)


def send_another_number_of_bytes(client: PlainClient, weights: Any, group: str, more: int) -> httpx.Response:
    metadatas, buffer = flatten(weights, torch.empty(0, dtype=torch.uint8))
    size, body = buffer.numel(), {"group": group, "metadatas": metadatas}
    says = f"this end expects a bucket of {size + more} bytes, and the other end one of {size} bytes"
    send = concurrently(lambda: client.post("/load_bucket/", **body))
    with send as answer, pytest.raises(ValueError, match=says):
        client.group.broadcast(torch.cat([buffer, buffer])[: size + more])
    return answer[0]


def send_nothing(client: PlainClient, weights: Any, group: str) -> httpx.Response:
    metadatas, _ = flatten(weights, torch.empty(0, dtype=torch.uint8))
    return client.post("/load_bucket/", group=group, metadatas=metadatas)


FAULTS = {
    "a weight is missing": (leave_out_a_weight, "1 weights of the engine were not sent"),
    "a weight does not fit": (cut_off_a_row, "_proj.weight"),
    "a weight has a NaN": (send_a_nan, "has NaN or Inf values"),
    "more bytes than announced": (partial(send_another_number_of_bytes, more=300), "expects a bucket of"),
    "fewer bytes than announced": (partial(send_another_number_of_bytes, more=-300), "expects a bucket of"),
    "no bytes": (send_nothing, ""),
}


@pytest.mark.parametrize(("fault", "words"), FAULTS.values(), ids=FAULTS)
def test_an_update_that_fails_is_refused_in_time_and_the_server_takes_whole_weights_after_it(
    client, fleet, fault, words
):
    weights, request = model_weights(), [infer_request(fleet.images()[0])]
    before = [ids(item) for item in client.infer(request)]
    with client.learner("learner") as group:
        assert_ok(client.join(group=group, timeout_s=3.0))
        assert_ok(client.post("/begin_update/", group=group, version="1"))
        began = time.monotonic()
        error = fault(client, weights, group).json()["error"]
        assert time.monotonic() - began < 8
        assert error["code"] == "update_failed" and words in error["message"]
        assert client.http.get("/version/").json()["weight_version"] is None
        client.group.close()
        assert_ok(client.join(group=group))
        client.update(weights, "2", group)
    assert [ids(item) for item in client.infer(request)] == before


def test_an_update_during_32_running_requests_mixes_no_versions(client, fleet):
    images = fleet.images()[:8]
    versions = {"old": model_weights(), "new": model_weights(0.3)}
    expected: dict[str, list[list[int]]] = {}
    with client.learner("learner") as group:
        assert_ok(client.join(group=group))
        for version in ("new", "old"):
            client.update(versions[version], version, group)
            items = client.infer([infer_request(image, guard=False) for image in images])
            expected[version] = [ids(item) for item in items]
        assert all(old != new for old, new in zip(expected["old"], expected["new"], strict=True))
        responses: list[list[dict[str, Any]]] = []

        def call() -> None:
            with httpx.Client(base_url=client.url, timeout=60, trust_env=False) as http:
                many = [infer_request(image, guard=False) for image in images * 3]  # enough to be seen running
                body = {"infer_requests": many, "request_config": GREEDY}
                responses.append(http.post("/infer/", json=body).json())

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers[:2]:
            caller.start()
        wait_for(lambda: "coordexp_running_requests 0.0" not in client.http.get("/metrics").text, 20)
        with concurrently(lambda: client.post("/begin_update/", group=group, version="later")) as first:
            wait_for(lambda: client.http.get("/version/").json()["updating"], 20)
            second = client.post("/begin_update/", group=group, version="other")
            for caller in callers[2:]:
                caller.start()
        assert_ok(first[0])
        assert (second.status_code, second.json()["error"]["code"]) == (409, "update_running")
        assert_ok(client.send(versions["new"], group=group))
        assert_ok(client.post("/finish_update/", group=group, version="later"))
        for caller in callers:
            caller.join(60)
    assert len(responses) == 4
    seen = set()
    for items in responses:
        (version,) = {item["rollout_infos"]["weight_version"] for item in items}
        seen.add(version)
        assert [ids(item) for item in items] == expected["old" if version == "old" else "new"] * 3
    assert seen == {"old", "later"}


@pytest.mark.scenario("R10.C6", "R10.S2", on="engine")
def test_a_server_decodes_as_many_answers_at_once_as_decode_batch_size_allows_and_no_more(client, fleet):
    """The fleet's is 4 on one device. vLLM's own gauge shows how many sequences it is computing."""
    running: list[float] = []
    many = [infer_request(image, guard=False) for image in fleet.images()[:8] * 6]
    with concurrently(lambda: client.infer(many)) as items:
        while not items:
            lines = httpx.get(f"{client.url}/metrics", timeout=20, trust_env=False).text.splitlines()
            running += [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")]
    assert max(running) == 4
    (answers,) = items
    assert [ids(item) for item in answers] == [ids(item) for item in client.infer(many[:8])] * 6


@pytest.mark.scenario("R33.S1", "R33.S3", on="engine")
def test_one_looping_answer_of_eight_ends_and_the_others_are_bit_identical(client, fleet):
    """The guard is the server's own: the request has no settings for it."""
    table, guard = VocabularyTable.from_folder(MODEL), RepeatTerminate(**GUARD)

    def loops_at(tokens: list[int]) -> int | None:
        counter = KeyCounter(key_pattern(table))
        whole = range(1, len(tokens) + 1)
        return next((k for k in whole if loop_in(tokens[:k], counter.count(tokens[:k]), guard)), None)

    with client.learner("learner") as group:
        assert_ok(client.join(group=group))
        client.update(model_weights(0.3), "babbling", group)
    images = fleet.images()
    free = client.infer([infer_request(image, guard=False) for image in images])
    at = {image: loops_at(ids(item)) for image, item in zip(images, free, strict=True)}
    looping = next(image for image, k in at.items() if k is not None and k < GREEDY["max_tokens"] - 2)
    others = [image for image, k in at.items() if k is None][:7]
    batch = [*others[:3], looping, *others[3:]]
    assert len(batch) == 8
    without = client.infer([infer_request(image, guard=False) for image in batch])
    with_guard = client.infer([infer_request(image) for image in batch])
    for image, guarded, unguarded in zip(batch, with_guard, without, strict=True):
        choice, free_choice = guarded["response"]["choices"][0], unguarded["response"]["choices"][0]
        if image != looping:
            assert choice == free_choice and guarded["rollout_infos"]["ended_by_guard"] == [False]
            continue
        ended = at[looping]
        assert choice["token_ids"] == [*free_choice["token_ids"][:ended], table.end_of_turn]
        assert choice["finish_reason"] == "stop" and guarded["rollout_infos"]["ended_by_guard"] == [True]


@pytest.mark.scenario("R33.S2", on="engine")
@pytest.mark.parametrize("reason", ["disagree", "class"])
def test_a_guard_that_cannot_be_loaded_stops_the_server_at_its_start_with_the_reason(fleet, reason):
    name = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON"
    variables = {
        "disagree": {name: RepeatTerminate(enabled=True).model_dump_json()},
        "class": {},
    }[reason]
    words = [*SERVE]
    if reason == "class":
        words[1] = f"import coordexp.rollout.start as r; r.ENGINE_GUARD = 'coordexp.nothing:Guard'; {words[1]}"
    other = fleet.config("guarded", rollout_matching__vllm__server__servers=[FREE])
    with started([*words, "--config", str(other)], **variables) as run:
        assert run.wait(120) == 1
        problem = {
            "disagree": "unset it: `coordexp serve` takes the guard from",
            "class": "coordexp.nothing:Guard cannot be loaded: No module named 'coordexp.nothing'",
        }[reason]
        assert problem in run.shown and "Traceback" not in run.shown
        assert run.remains() == {}


FREE = {"base_url": "http://127.0.0.1:1", "group_port": 2}


def test_a_server_whose_port_is_taken_says_so_before_it_starts_an_engine(fleet):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        servers = [{"base_url": f"http://127.0.0.1:{port}", "group_port": 2}]
        other = fleet.config("taken", rollout_matching__vllm__server__servers=servers)
        with started([*SERVE, "--config", str(other)]) as run:
            assert run.wait(60) == 1
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in run.shown
            assert run.remains() == {}


def test_two_workers_that_share_a_model_take_weights_and_fail_together(tmp_path_factory):
    """Tensor parallelism: both workers are in the group, and an error in both is reported once."""
    two = Fleet(tmp_path_factory.mktemp("two"), 1)
    two.file = two.config("two", rollout_matching__vllm__tensor_parallel_size=2)
    weights, images = model_weights(0.3), two.images()[:4]
    try:
        two.start(0)
        client = PlainClient(two.url(0), two.servers[0]["group_port"])
        with client.learner("learner") as group:
            assert_ok(client.join(group=group))
            for version in ("1", "3"):
                client.update(weights, version, group)
                items = client.infer([infer_request(image, guard=False) for image in images])
                assert [ids(item) for item in items] == answer_with_transformers(weights, images)
                if version == "1":
                    assert_ok(client.post("/begin_update/", group=group, version="2"))
                    assert_ok(client.send(weights[:9], group=group))
                    error = client.post("/finish_update/", group=group).json()["error"]
                    assert error["code"] == "update_failed" and "were not sent" in error["message"]
                    client.group.close()
                    assert_ok(client.join(group=group))
                    weights = model_weights(0.3, seed=1)
        client.close()
    finally:
        two.close()
