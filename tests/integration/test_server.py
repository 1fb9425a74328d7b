"""A real rollout server, spoken to as ms-swift's clients do, in plain HTTP and a real group for the weights."""

import base64
import io
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.config.rollout import RepeatTerminate
from coordexp.rollout.backend import Decode, Picture, Request
from coordexp.rollout.broadcast import flattened
from coordexp.rollout.guard import KeyCounter, key_pattern, loop_in
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.vocab import VocabularyTable
from tests.integration.servers import (
    GREEDY,
    GUARD,
    SERVE,
    Fleet,
    PlainClient,
    asked,
    base64_of,
    concurrently,
    good,
    model_weights,
    wait_for,
)
from tests.integration.stage2_runs import MODEL, started
from tests.unit.data.test_images import EPS
from tests.unit.serve.bombs import memory, png_bomb

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


@pytest.fixture
def client(fleet: Fleet) -> Iterator[PlainClient]:
    """Of a server that has the committed model's weights, whatever the test before has sent."""
    fleet.ensure(1)
    found = PlainClient(fleet.url(0), fleet.servers[0]["group_port"])
    wait_for(lambda: found.http.get("/version/").json()["session"] is None, 20)
    yield found
    found.close()
    again = PlainClient(fleet.url(0), fleet.servers[0]["group_port"])
    with again.session("the fixture") as session:
        good(again.join(session=session))
        again.update(model_weights(), "restored", session)
    again.close()


def ids(item: dict[str, Any]) -> list[int]:
    return list(item["response"]["choices"][0]["token_ids"])


def by_transformers(weights: list[tuple[str, torch.Tensor]], pictures: list[str]) -> list[list[int]]:
    """What the same weights answer here, with the end of turn."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
    assert not model.load_state_dict(dict(weights), strict=False).unexpected_keys
    prompts = PromptBuilder(AutoProcessor.from_pretrained(MODEL), "Detect all objects.")
    table = VocabularyTable.from_folder(MODEL)
    backend = HuggingFaceBackend(lambda: model, prompts, table, 8)
    decode = Decode.greedy(GREEDY["max_tokens"])
    answers = backend.generate([Request(Picture(one, 64, 64), decode) for one in pictures])
    return [[*one.ids, *([table.end_of_turn] if one.finish_reason == "stop" else [])] for one in answers]


def test_the_recorded_calls_of_an_ms_swift_client_are_answered_in_its_form(client, fleet):
    """Written by hand from the contract: these payloads, these fields."""
    http = client.http
    assert http.get("/health/").status_code == 200
    assert http.get("/get_world_size/").json() == {"world_size": 1}
    assert http.post("/get_engine_type/").json()["engine_type"] == "AsyncLLMEngine"
    keys = http.get("/get_model_state_keys/").json()["keys"]
    assert any("embed_tokens" in name for name in keys)
    request = {
        "messages": [{"role": "user", "content": "<image>Detect all objects."}],
        "images": [fleet.pictures()[0]],
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
    picture = fleet.pictures()[0]
    sources = [picture, base64_of(picture), f"data:image/png;base64,{base64_of(picture)}"]
    items = client.infer([asked(source) for source in sources])
    assert len({tuple(item["response"]["prompt_token_ids"]) for item in items}) == 1
    prompts = PromptBuilder(AutoProcessor.from_pretrained(MODEL), "Detect all objects.")
    assert items[0]["response"]["prompt_token_ids"] == prompts.ids(64, 64)
    assert len({tuple(ids(item)) for item in items}) == 1


def test_a_bad_request_fails_alone_and_says_why(client, fleet):
    good_one = asked(fleet.pictures()[0])
    bad = [
        asked("/etc/passwd"),
        asked("http://127.0.0.1/a.png"),
        {"messages": []},
        {"messages": [{"role": "user", "content": "no picture"}], "images": [fleet.pictures()[0]]},
        "garbage",
        asked(fleet.pictures()[0].replace(".png", "-missing.png")),
    ]
    items = client.infer([good_one, *bad, good_one])
    assert ids(items[0]) == ids(items[-1]) == ids(client.infer([good_one])[0])
    for item in items[1:-1]:
        assert item["error"]["code"] == "bad_request" and item["error"]["message"]
    (long,) = client.infer([asked(fleet.pictures()[0]) | {"messages": [LONG]}])
    assert "256" in long["error"]["message"]


def test_eight_image_bombs_in_one_call_are_refused_from_their_headers(client, fleet):
    """Each is a file of 16 KB and 2^27 pixels. Decoded at once, they took 6 GB."""
    bomb = base64.b64encode(png_bomb(11585, 11585)).decode()
    server = fleet[0].process.pid
    before = memory(server, "VmHWM")
    items = client.infer([asked(bomb)] * 8)
    after = memory(server, "VmHWM")
    print(f"peak memory of the server: {before} MiB before, {after} MiB after")
    for item in items:
        assert (
            item["error"]["code"] == "bad_request" and "tokens, and prompt and answer" in item["error"]["message"]
        )
    assert after - before < 300
    assert ids(client.infer([asked(fleet.pictures()[0])])[0])


def test_what_the_engine_could_not_take_is_refused_by_name(client, fleet):
    picture = fleet.pictures()[0]
    thin = io.BytesIO()
    Image.new("RGB", (1, 5000)).save(thin, "PNG")
    bad = {
        "not a PNG, JPEG, WEBP, BMP, GIF or TIFF image": asked(base64.b64encode(EPS).decode()),
        "the longer side is more than 200 times": asked(base64.b64encode(thin.getvalue()).decode()),
        "half a character": asked(picture) | {"messages": [{"role": "user", "content": "<image>caf\ud83d"}]},
        "labels: not served here": asked(picture) | {"labels": [1]},
    }
    body = {"infer_requests": list(bad.values()), "request_config": GREEDY}
    headers = {"content-type": "application/json"}
    items = client.http.post("/infer/", content=json.dumps(body), headers=headers).json()
    for told, item in zip(bad, items, strict=True):
        assert item["error"]["code"] == "bad_request" and told in item["error"]["message"]
    for changes in ({"top_k": 1e20}, {"logit_bias": {"5": 1}}, {"ignore_eos": True}):
        answer = client.post("/infer/", infer_requests=[asked(picture)], request_config=GREEDY | changes)
        assert answer.status_code == 422 and next(iter(changes)) in answer.json()["error"]["message"]


LONG = {"role": "user", "content": "<image>" + "Detect all objects. " * 200}


def test_weights_of_a_plain_client_are_taken_and_answer_as_transformers_does(client, fleet):
    """No session, no beginning, no end: one tensor by name, the others in two buckets."""
    weights = model_weights(0.3)
    good(client.join())
    name, alone = weights[0]
    told = {"name": name, "dtype": str(alone.dtype), "shape": list(alone.shape)}
    with concurrently(lambda: client.post("/update_named_param/", **told)) as answer:
        client.group.broadcast(flattened([weights[0]], torch.empty(0, dtype=torch.uint8))[1])
    good(answer[0])
    half = len(weights) // 2
    for bucket in (weights[1:half], weights[half:]):
        good(client.send(bucket))
    for path in ("process_weights_after_loading", "reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache"):
        good(client.post(f"/{path}/"))
    pictures = fleet.pictures()[:8]
    items = client.infer([asked(picture, guard=False) for picture in pictures])
    assert {item["rollout_infos"]["weight_version"] for item in items} == {"plain-1"}
    assert [ids(item) for item in items] == by_transformers(weights, pictures)
    good(client.post("/close_communicator/"))


def test_a_learner_that_leaves_half_way_is_replaced_and_its_half_is_never_answered_with(client, fleet):
    weights, request = model_weights(), [asked(fleet.pictures()[0])]
    before = client.infer(request)
    with client.session("first") as session:
        good(client.join(session=session))
        second = httpx.post(f"{client.url}/session/", json={"session": "second"}, trust_env=False)
        assert second.status_code == 409 and "test:1" in second.text
        good(client.post("/start_update/", session=session, version="1"))
        good(client.send(weights[:20], session=session))
    wait_for(lambda: client.http.get("/version/").json()["session"] is None, 20)
    refused = client.post("/infer/", infer_requests=request, request_config=GREEDY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_weights")
    assert client.http.get("/version/").json()["weight_version"] is None
    client.group.close()
    with client.session("second") as session:
        good(client.join(session=session))
        client.update(weights, "2", session)
    assert [ids(item) for item in client.infer(request)] == [ids(item) for item in before]


def test_weights_that_are_not_whole_or_do_not_fit_are_refused_with_their_name(client, fleet):
    weights = model_weights()
    fused = {name: tensor for name, tensor in weights if name.endswith(("q_proj.weight", "k_proj.weight"))}
    (first, whole), (name, tensor) = list(fused.items())[:2]  # parts of one layer in the engine
    with client.session("learner") as session:
        good(client.join(session=session))
        good(client.post("/start_update/", session=session, version="1"))
        good(client.send(weights[1:], session=session))
        told = client.post("/finish_update/", session=session, version="1").json()["error"]
        assert told["code"] == "update_failed" and "1 weights of the engine were not sent" in told["message"]
        client.group.close()
        good(client.join(session=session))
        good(client.post("/start_update/", session=session, version="2"))
        told = client.send([(first, whole), (name, tensor[:-1])], session=session).json()["error"]
        assert told["code"] == "update_failed" and name in told["message"]
        client.group.close()
        good(client.join(session=session))
        client.update(weights, "3", session)
    assert client.infer([asked(fleet.pictures()[0])])[0]["rollout_infos"]["weight_version"] == "3"


def test_a_bucket_with_a_nan_is_refused_with_the_name_of_the_weight_and_the_server_takes_whole_weights_after_it(
    client, fleet
):
    weights, request = model_weights(), [asked(fleet.pictures()[0])]
    before = [ids(item) for item in client.infer(request)]
    name, tensor = weights[30]
    broken = tensor.clone()
    broken.view(-1)[-1] = float("nan")
    with client.session("learner") as session:
        good(client.join(session=session))
        good(client.post("/start_update/", session=session, version="1"))
        told = client.send([*weights[:30], (name, broken)], session=session).json()["error"]
        assert told["code"] == "update_failed" and f"{name} has NaN or Inf values" in told["message"]
        assert "lower training.learning_rate" in told["fix"] and "a full sync brings it back" in told["fix"]
        assert client.http.get("/version/").json()["weight_version"] is None
        client.group.close()
        good(client.join(session=session))
        client.update(weights, "2", session)
    assert [ids(item) for item in client.infer(request)] == before


def shorter(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[:-300]


def longer(buffer: torch.Tensor) -> torch.Tensor:
    return torch.cat([buffer, buffer[-300:]])


@pytest.mark.parametrize(("spoil", "differs"), [(longer, 300), (shorter, -300)])
def test_more_or_fewer_bytes_than_told_are_an_error_at_both_ends_and_the_server_goes_on(
    client, fleet, spoil, differs
):
    weights, request = model_weights(), [asked(fleet.pictures()[0])]
    before = [ids(item) for item in client.infer(request)]
    told, buffer = flattened(weights, torch.empty(0, dtype=torch.uint8))
    size = buffer.numel()
    with client.session("learner") as session:
        good(client.join(session=session))
        good(client.post("/start_update/", session=session, version="1"))
        body = {"session": session, "metadatas": told}
        began = time.monotonic()
        with concurrently(lambda: client.post("/update_flattened_params/", **body)) as answer:
            says = f"this end expects a bucket of {size + differs} bytes, and the other end one of {size} bytes"
            with pytest.raises(ValueError, match=says):
                client.group.broadcast(spoil(buffer))
        assert time.monotonic() - began < 5
        error = answer[0].json()["error"]
        assert error["code"] == "update_failed"
        assert f"expects a bucket of {size} bytes, and the other end one of {size + differs}" in error["message"]
        client.group.close()
        good(client.join(session=session))
        client.update(weights, "2", session)
    assert [ids(item) for item in client.infer(request)] == before


def test_a_bucket_that_is_told_and_never_sent_ends_the_update_in_time_and_the_server_goes_on(client, fleet):
    weights, request = model_weights(), [asked(fleet.pictures()[0])]
    before = [ids(item) for item in client.infer(request)]
    told, _ = flattened(weights, torch.empty(0, dtype=torch.uint8))
    with client.session("learner") as session:
        good(client.join(session=session, timeout_s=3.0))
        good(client.post("/start_update/", session=session, version="1"))
        began = time.monotonic()
        answer = client.post("/update_flattened_params/", session=session, metadatas=told)
        assert time.monotonic() - began < 8
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "update_failed")
        client.group.close()
        good(client.join(session=session))
        client.update(weights, "2", session)
    assert [ids(item) for item in client.infer(request)] == before


def test_an_update_during_32_running_requests_mixes_no_versions(client, fleet):
    pictures = fleet.pictures()[:8]
    versions = {"old": model_weights(), "new": model_weights(0.3)}
    expected: dict[str, list[list[int]]] = {}
    with client.session("learner") as session:
        good(client.join(session=session))
        for version in ("new", "old"):
            client.update(versions[version], version, session)
            expected[version] = [ids(item) for item in client.infer([asked(one, guard=False) for one in pictures])]
        assert all(one != other for one, other in zip(expected["old"], expected["new"], strict=True))
        found: list[list[dict[str, Any]]] = []

        def call() -> None:
            with httpx.Client(base_url=client.url, timeout=60, trust_env=False) as http:
                many = [asked(one, guard=False) for one in pictures * 3]  # enough to be seen running
                body = {"infer_requests": many, "request_config": GREEDY}
                found.append(http.post("/infer/", json=body).json())

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers[:2]:
            caller.start()
        wait_for(lambda: "coordexp_running_requests 0.0" not in client.http.get("/metrics").text, 20)
        with concurrently(lambda: client.post("/start_update/", session=session, version="later")) as first:
            wait_for(lambda: client.http.get("/version/").json()["updating"], 20)
            second = client.post("/start_update/", session=session, version="other")
            for caller in callers[2:]:
                caller.start()
        good(first[0])
        assert (second.status_code, second.json()["error"]["code"]) == (409, "update_running")
        good(client.send(versions["new"], session=session))
        good(client.post("/finish_update/", session=session, version="later"))
        for caller in callers:
            caller.join(60)
    assert len(found) == 4
    seen = set()
    for items in found:
        (version,) = {item["rollout_infos"]["weight_version"] for item in items}
        seen.add(version)
        assert [ids(item) for item in items] == expected["old" if version == "old" else "new"] * 3
    assert seen == {"old", "later"}


@pytest.mark.scenario("R10.C6", "R10.S2", on="engine")
def test_a_server_decodes_as_many_answers_at_once_as_decode_batch_size_allows_and_no_more(client, fleet):
    """The fleet's is 4 on one device. vLLM's own gauge tells how many sequences it is computing."""
    running: list[float] = []
    many = [asked(one, guard=False) for one in fleet.pictures()[:8] * 6]
    with concurrently(lambda: client.infer(many)) as items:
        while not items:
            lines = httpx.get(f"{client.url}/metrics", timeout=20, trust_env=False).text.splitlines()
            running += [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")]
    assert max(running) == 4
    (answers,) = items
    assert [ids(one) for one in answers] == [ids(one) for one in client.infer(many[:8])] * 6


def test_health_is_told_at_once_during_answers_and_updates(client, fleet):
    weights = model_weights()
    taken: list[float] = []
    ended = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=client.url, trust_env=False) as http:
            while not ended.is_set():
                since = time.perf_counter()
                assert http.get("/health/").status_code == 200
                taken.append(time.perf_counter() - since)
                time.sleep(0.01)

    watcher = threading.Thread(target=look)
    watcher.start()
    client.infer([asked(picture) for picture in fleet.pictures()])
    with client.session("learner") as session:
        good(client.join(session=session))
        for version in ("1", "2", "3"):
            client.update(weights, version, session)
    ended.set()
    watcher.join(20)
    print(f"health: median {statistics.median(taken) * 1000:.1f} ms, most {max(taken) * 1000:.1f} ms")
    assert len(taken) > 5 and statistics.quantiles(taken, n=20)[-1] < 0.1


@pytest.mark.scenario("R33.S1", "R33.S3", on="engine")
def test_one_looping_answer_of_eight_ends_and_the_others_are_bit_identical(client, fleet):
    """The guard is the server's own: nothing of it is said by the request."""
    table, guard = VocabularyTable.from_folder(MODEL), RepeatTerminate(**GUARD)

    def loops_at(tokens: list[int]) -> int | None:
        counter = KeyCounter(key_pattern(table))
        whole = range(1, len(tokens) + 1)
        return next((k for k in whole if loop_in(tokens[:k], counter.count(tokens[:k]), guard)), None)

    with client.session("learner") as session:
        good(client.join(session=session))
        client.update(model_weights(0.3), "babbling", session)
    pictures = fleet.pictures()
    free = client.infer([asked(picture, guard=False) for picture in pictures])
    at = {picture: loops_at(ids(item)) for picture, item in zip(pictures, free, strict=True)}
    looping = next(picture for picture, k in at.items() if k is not None and k < GREEDY["max_tokens"] - 2)
    others = [picture for picture, k in at.items() if k is None][:7]
    batch = [*others[:3], looping, *others[3:]]
    assert len(batch) == 8
    without = client.infer([asked(picture, guard=False) for picture in batch])
    with_guard = client.infer([asked(picture) for picture in batch])
    for picture, one, other in zip(batch, with_guard, without, strict=True):
        choice, free_choice = one["response"]["choices"][0], other["response"]["choices"][0]
        if picture != looping:
            assert choice == free_choice and one["rollout_infos"]["ended_by_guard"] == [False]
            continue
        ended = at[looping]
        assert choice["token_ids"] == [*free_choice["token_ids"][:ended], table.end_of_turn]
        assert choice["finish_reason"] == "stop" and one["rollout_infos"]["ended_by_guard"] == [True]


@pytest.mark.scenario("R33.S2", on="engine")
@pytest.mark.parametrize("reason", ["settings", "file", "disagree", "class"])
def test_a_guard_that_cannot_be_loaded_stops_the_server_at_its_start_with_the_reason(fleet, tmp_path, reason):
    name = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON"
    variables = {
        "settings": {name: '{"enabled": true}'},
        "file": {f"{name}_PATH": str(tmp_path / "nothing.json")},
        "disagree": {name: RepeatTerminate(enabled=True).model_dump_json()},
        "class": {},
    }[reason]
    words = [*SERVE]
    if reason == "class":
        words[1] = f"import coordexp.serve.run as r; r.ENGINE_GUARD = 'coordexp.nothing:Guard'; {words[1]}"
    other = fleet.config("guarded", rollout_matching__vllm__server__servers=[FREE])
    with started([*words, "--config", str(other)], **variables) as run:
        assert run.wait(120) == 1
        told = {
            "settings": "the repeat guard cannot be loaded (max_consecutive_token_repeats, max_object_keys,",
            "file": "nothing.json",
            "disagree": "unset it: the command sets it",
            "class": "coordexp.nothing:Guard cannot be loaded: No module named 'coordexp.nothing'",
        }[reason]
        assert told in run.shown and "Traceback" not in run.shown
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
            assert f"127.0.0.1:{port} cannot be listened on (Address already in use)" in run.shown
            assert run.remains() == {}


def test_two_workers_that_share_a_model_take_weights_and_fail_together(tmp_path_factory):
    """Tensor parallelism: both are in the group, and what goes wrong in both is told once."""
    two = Fleet(tmp_path_factory.mktemp("two"), 1)
    two.file = two.config("two", rollout_matching__vllm__tensor_parallel_size=2)
    weights, pictures = model_weights(0.3), two.pictures()[:4]
    try:
        two.start(0)
        client = PlainClient(two.url(0), two.servers[0]["group_port"])
        with client.session("learner") as session:
            good(client.join(session=session))
            for version in ("1", "3"):
                client.update(weights, version, session)
                items = client.infer([asked(picture, guard=False) for picture in pictures])
                assert [ids(item) for item in items] == by_transformers(weights, pictures)
                if version == "1":
                    good(client.post("/start_update/", session=session, version="2"))
                    good(client.send(weights[:9], session=session))
                    told = client.post("/finish_update/", session=session, version="2").json()["error"]
                    assert told["code"] == "update_failed" and "were not sent" in told["message"]
                    client.group.close()
                    good(client.join(session=session))
                    weights = model_weights(0.3, seed=1)
        client.close()
    finally:
        two.close()
