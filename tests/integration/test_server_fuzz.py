"""A real server under calls that are drawn from its own OpenAPI document, and under garbage at its weight port.
Whatever comes, it answers or refuses with a code and a message, in time, and gives the right answers afterwards
with the files and the memory that it had before.

Other attacks have tests of their own: tokens, headers, bodies, JSON and descriptions of weights in
tests/unit/servers/test_app.py, paths in test_requests.py there, image bombs in test_answering.py there, and wrong
weights in test_server.py.
"""

import base64
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from coordexp.servers.protocol import InferRequest
from tests.integration.servers import (
    GREEDY,
    Fleet,
    PlainClient,
    assert_ok,
    concurrently,
    infer_request,
    model_weights,
    wait_for,
)
from tests.unit.servers.test_app import rollout_app

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EXAMPLES = int(os.environ.get("COORDEXP_FUZZ_EXAMPLES", "12"))  # per route and kind of call
MOST_SECONDS = 30.0  # of one call; the machine does other work too
# The documented codes of errors that are not the client's, besides those of an engine that has ended.
DOCUMENTED = {"no_group", "update_failed", "no_weights", "updating"}
SECRET = b"zqxsecret"


class Attacked:
    """The server under attack: calls to it, and its state before."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.url = fleet, fleet.url(0)
        self.group_port = int(fleet.servers[0]["group_port"])
        self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)  # the first answer takes longer
        self.restore()  # another test may have sent other weights
        self.answers = self.answer()
        self.http.timeout = httpx.Timeout(MOST_SECONDS)
        server = psutil.Process(fleet[0].process.pid)
        living = (child for child in server.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE)
        engine = [child for child in living if child.name().startswith("VLLM::")]
        self.processes = [server, *engine]
        self.files, self.memory = self.count_files(), self.measure_memory()

    def answer(self) -> list[list[int]]:
        body = {"infer_requests": [infer_request(image) for image in self.fleet.images()[:3]]}
        answer = self.http.post("/infer/", json=body | {"request_config": GREEDY})
        assert_ok(answer)
        return [item["response"]["choices"][0]["token_ids"] for item in answer.json()]

    def count_files(self) -> int:
        return sum(process.num_fds() for process in self.processes)

    def measure_memory(self) -> float:
        return sum(process.memory_full_info().uss for process in self.processes) / 2**20

    def restore(self) -> None:
        """Send the weights that the server had."""
        wait_for(lambda: self.http.get("/version/").json()["learner"] is None, 20)
        client = PlainClient(self.url, self.group_port)
        with client.learner("the attacked") as group:
            assert_ok(client.join(group=group))
            client.update(model_weights(), "restored", group)
        client.close()

    def check_unharmed(self) -> None:
        """The server gives the same answers as before, and its files and memory come back."""
        assert self.http.get("/health/").status_code == 200
        if self.http.get("/ready/").status_code != 200:
            self.restore()
        assert self.answer() == self.answers
        assert all(process.is_running() for process in self.processes)
        wait_for(lambda: self.count_files() <= self.files + 4, 40, lambda: f"{self.files} -> {self.count_files()}")
        grown = self.measure_memory() - self.memory
        print(f"files {self.files} -> {self.count_files()}, memory {self.memory:.0f} MiB, grown by {grown:.0f}")
        assert grown < 400


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> Iterator[Attacked]:
    fleet.ensure(1)
    attacked = Attacked(fleet)
    yield attacked
    attacked.http.close()


@pytest.fixture
def attacked(server: Attacked) -> Iterator[Attacked]:
    """The first server, which is as it was before the first attack after each."""
    yield server
    server.check_unharmed()


def check_answer(answer: httpx.Response) -> None:
    """A success, or a refusal with its code, message and fix. The server's own errors are the documented ones."""
    assert SECRET not in answer.content
    if answer.status_code == 200:
        return
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "fix"} and error["code"] and error["message"]
    assert answer.status_code < 500 or error["code"] in DOCUMENTED, answer.text
    assert len(answer.content) < 20_000


def check_items(items: list[dict[str, Any]]) -> None:
    for item in items:
        if "error" in item:
            assert item["error"]["code"] == "bad_request" and item["error"]["message"], item


def openapi_document(group_port: int, images: list[str]) -> dict[str, Any]:
    """Return the document of the server's routes, in which requests have their form too. Numbers that only say how
    long the server works are small, and the workers are sent to no port but the fleet's own."""
    document = rollout_app(None).api.openapi()
    schemas = document["components"]["schemas"]
    request = InferRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= request.pop("$defs") | {"InferRequest": request}
    request["properties"]["images"] = {"type": "array", "maxItems": 2, "items": {"enum": images}}
    text = {"enum": ["<image>Detect all objects.", "Hello", "<image><image>", "", "<|im_end|>", "\u0000"]}
    schemas["ChatMessage"]["properties"]["content"] = text
    calls = schemas["InferCall"]["properties"]
    calls["infer_requests"] = {
        "type": "array", "maxItems": 3, "items": {"anyOf": [{"$ref": "#/components/schemas/InferRequest"}, {}]},
    }  # fmt: skip
    limits = schemas["RequestConfig"]["properties"]
    limits["max_tokens"], limits["n"] = ({"type": "integer", "minimum": 1, "maximum": k} for k in (8, 2))
    schemas["RequestConfig"]["required"] = ["max_tokens"]
    calls["request_config"] = {"$ref": "#/components/schemas/RequestConfig"}
    schemas["InferCall"]["required"] = ["infer_requests", "request_config"]
    group = schemas["JoinGroup"]["properties"]
    group |= {"port": {"enum": [group_port]}, "timeout_s": {"type": "number", "minimum": 0.1, "maximum": 1}}
    schemas["JoinGroup"]["required"] = ["group", "port", "timeout_s", "world_size"]
    return document


@pytest.mark.parametrize("mode", GenerationMode)
def test_any_call_of_the_openapi_document_is_answered_or_refused(attacked, mode, tmp_path):
    (tmp_path / "secret.png").write_bytes(SECRET)
    good = attacked.fleet.images()[0]
    images = [
        good,
        base64.b64encode(SECRET).decode(),
        str(tmp_path / "secret.png"),
        f"{good}/../../x.png",
        "",
        "\0",
    ]
    schema = schemathesis.openapi.from_dict(openapi_document(attacked.group_port, images))
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == 10
    counts: dict[str, int] = {}
    for operation in operations:

        @settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            call = case.as_transport_kwargs(base_url=attacked.url)
            content = json.dumps(call["json"]).encode() if "json" in call else call.get("data") or b""
            headers = {"content-type": "application/json"} if "json" in call else {}
            answer = attacked.http.request(
                call["method"], call["url"], params=call.get("params"), content=content, headers=headers
            )
            check_answer(answer)
            name = f"{answer.status_code}"
            counts[name] = counts.get(name, 0) + 1
            if case.path == "/infer/" and answer.status_code == 200:
                check_items(answer.json())

        with suppress(Unsatisfiable):  # a route without a body or parameters cannot be called wrongly
            check()
    print(f"{mode.value}: {sum(counts.values())} calls, by status {counts}")


def test_garbage_at_the_weight_port_does_not_stop_a_sync(attacked):
    """While nobody listens, while the workers wait for the learner, in a sync, and after it."""
    draws = random.Random(3)
    magic = b"\0" + struct.pack("<I", 0x3C85F7CE)  # the first message of a client of torch's TCPStore
    contents = [
        b"",
        b"\0" * 100,
        draws.randbytes(5000),
        b"GET / HTTP/1.1\r\n\r\n",
        magic[:3],
        magic + b"\xff" * 100,
        magic + b"\x01" + struct.pack("<Q", 2**62) + b"a",  # a key of 4 EiB
    ]

    def throw() -> int:
        reached = 0
        for content in contents:
            with suppress(OSError), socket.create_connection(("127.0.0.1", attacked.group_port), 2) as client:
                reached += 1
                client.sendall(content)
        return reached

    assert throw() == 0
    body = {"group": "nobody", "port": attacked.group_port, "world_size": 2, "timeout_s": 6}
    since = time.monotonic()
    with concurrently(lambda: attacked.http.post("/init_communicator/", json=body)) as answer:
        wait_for(lambda: throw() == len(contents), 20)
    assert '"no_group"' in answer[0].text and time.monotonic() - since < MOST_SECONDS  # no learner came
    reached, is_over = [], threading.Event()

    def throw_until_the_end() -> bool:
        while not is_over.wait(0.05):
            reached.append(throw())
        return True

    with concurrently(throw_until_the_end):
        attacked.restore()
        is_over.set()
    assert sum(reached) > 0
    throw()
    assert attacked.answer() == attacked.answers
    print(f"{sum(reached)} connections in a sync")
