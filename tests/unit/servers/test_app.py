"""The access control and the routes of a server, over real HTTP. The engine is a fake."""

import asyncio
import base64
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from coordexp.errors import EngineError
from coordexp.servers import app as app_module
from coordexp.servers import connections, updates
from coordexp.servers.app import RolloutApp, ServerMetrics
from coordexp.servers.connections import UVICORN, listen
from coordexp.servers.protocol import ServerVersion, read_version
from tests.unit.servers.served import wait_until
from tests.unit.servers.test_updates import FakeEngine

TOKEN = "a token"
GROUP = {"group": "a secret", "learner": "host:1", "port": 1, "world_size": 2}


class FakeAnswering:
    async def answer(self, body: Any, config: Any, version: str) -> tuple[dict[str, Any], int]:
        await asyncio.sleep(body.get("seconds", 0))
        if body.get("fails"):
            raise RuntimeError("the engine failed")
        return {"response": body, "rollout_infos": {"weight_version": version}}, 3


def rollout_app(token: str | None, engine: Any = None) -> RolloutApp:
    facts = ServerVersion(
        server="coordexp",
        protocol=4,
        boot="1",
        model={},
        dtype="float32",
        world_size=1,
        max_model_len=100,
        guard={},
        devices=[],
    )
    options: dict[str, Any] = {"host": "127.0.0.1", "token": token}
    metrics = ServerMetrics(CollectorRegistry())
    answering: Any = FakeAnswering()
    return RolloutApp(engine or fake_engine(), answering, facts, **options, metrics=metrics)


def fake_engine() -> Any:
    engine: Any = FakeEngine()
    engine.has_ended = False
    return engine


class Server:
    """The app and uvicorn, in a thread of this process."""

    def __init__(self, token: str | None) -> None:
        self.engine = fake_engine()
        self.app: Any = None
        self.listening = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve(token)))
        self.thread.start()
        while self.app is None or not self.uvicorn.started:
            self.thread.join(0.01)
            assert self.thread.is_alive()

    async def _serve(self, token: str | None) -> None:
        app = rollout_app(token, self.engine)
        settings = UVICORN | {"log_level": "error", "timeout_graceful_shutdown": 1}
        self.uvicorn = uvicorn.Server(uvicorn.Config(app.api, **settings))
        self.uvicorn.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self.app, self.loop = app, asyncio.get_running_loop()
        await self.uvicorn.serve(sockets=[self.listening])

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=10)

    def close(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(10)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(None)
    yield running
    running.close()


def code(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert error["message"] and set(error) == {"code", "message", "fix"}
    return answer.status_code, error["code"]


@pytest.mark.timeout(60)
def test_with_a_token_every_route_but_health_and_readiness_requires_it():
    server = Server(TOKEN)
    try:
        with server.client() as http, server.client(Authorization=f"Bearer {TOKEN}") as known:
            paths = [(method, path) for method, path, _ in server.app._routes()]
            assert len(paths) == 10
            for method, path in paths:
                answer = http.request(method, path, json={})
                if path in ("/health/", "/ready/"):
                    assert answer.status_code == 200
                else:
                    assert code(answer) == (401, "no_token")
            wrong = {"Authorization": "Bearer other"}
            assert code(http.get("/version/", headers=wrong)) == (401, "no_token")
            assert known.get("/version/").json()["server"] == "coordexp"
    finally:
        server.close()


@pytest.mark.timeout(60)
def test_nothing_but_the_token_in_its_header_opens_a_route():
    server = Server(TOKEN)
    near = (TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN.upper()}", f"Bearer  {TOKEN}", f"Bearer {TOKEN}x", "Bearer")
    values = (*near, f"Basic {base64.b64encode(f':{TOKEN}'.encode()).decode()}")
    paths = ("//version/", "/health/../version/", "/health/..%2fversion/", "/health%2f..%2fversion/", "/Health/")
    try:
        with server.client() as http:
            for value in values:
                assert code(http.get("/version/", headers={"Authorization": value})) == (401, "no_token"), value
            assert code(http.get("/version/", params={"token": TOKEN, "authorization": TOKEN})) == (
                401,
                "no_token",
            )
            twice = f"Authorization: Bearer {TOKEN}\r\n" * 2
            assert send_raw(server, f"GET /version/ HTTP/1.1\r\nHost: 127.0.0.1\r\n{twice}")[9:12] == "401"
            for path in paths:
                answer = send_raw(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n")
                assert answer.startswith("HTTP/1.1 401 ") and "weight_version" not in answer, path
    finally:
        server.close()


@pytest.mark.timeout(60)
def test_a_server_without_a_token_answers_only_requests_that_name_this_machine(server):
    """A web page can make its own host name stand for 127.0.0.1, and a browser here would ask this server."""
    with server.client() as http:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.5", "[", ""):
            assert code(http.get("/version/", headers={"Host": host})) == (421, "other_host"), host
            assert http.get("/health/", headers={"Host": host}).status_code == 200
        page = {"Origin": "http://evil.example"}  # a page's own requests to 127.0.0.1
        assert code(http.post("/infer/", headers=page)) == (421, "other_host")
        for host in ("127.0.0.1", "127.0.0.1:1", "localhost:8000", "LOCALHOST", "[::1]:8000", "127.8.9.1"):
            assert http.get("/version/", headers={"Host": host}).status_code == 200, host
    known = Server(TOKEN)
    try:
        with known.client(Authorization=f"Bearer {TOKEN}", Host="node-5:8000") as http:
            assert http.get("/version/").status_code == 200
    finally:
        known.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "length", ["-1", "x", "1e3", "9" * 5000, "0" * 5000 + "5", "99999999999999", "0x10", "5, 6", ""]
)
def test_a_content_length_that_no_body_has_is_refused_and_the_server_goes_on(server, length):
    head = f"POST /infer/ HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n"
    assert send_raw(server, head)[:12] in ("HTTP/1.1 400", "HTTP/1.1 413")
    with server.client() as http:
        assert http.post("/infer/", json={"infer_requests": [{}]}).status_code == 200


INNER = b"GET /version/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "lines",
    [
        "Content-Length: 400\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 0",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: identity, chunked",
        "Transfer-Encoding : chunked",
        "Content-Length: 0\r\nContent-Length: 5",
    ],
)
def test_a_request_whose_end_is_ambiguous_is_refused_and_what_follows_is_no_request(server, lines):
    """A proxy in front of the server may see its end elsewhere, and would let a second request through unseen."""
    head = f"POST /infer/ HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n\r\n".encode()
    answer = send_until_closed(server, head + b"0\r\n\r\n" + INNER)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("body", [b"zz\r\n", b"1\r\nxyz", b"-5\r\n"])
@pytest.mark.parametrize("host", ["127.0.0.1", "other"])
def test_a_broken_body_is_answered_once(body, host):
    """The app refuses another host before the body is read. With one packet, the body is refused first."""
    server = Server(None)
    try:
        for pause in (0.0, 0.2):
            head = f"POST /infer/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
            answer = send_until_closed(server, head.encode(), body, pause=pause)
            assert answer.count(b"HTTP/1.1 4") == answer.count(b"HTTP/1.1 ") == 1
    finally:
        server.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("first", [b"GET /health/ HTTP/1.1\r\nHost: localhost\r\n", b"GET /health/?"])
def test_a_header_without_end_is_cut_off(server, first):
    sent = 0
    with socket.create_connection(server.listening.getsockname(), timeout=10) as client, suppress(OSError):
        client.sendall(first)
        while sent < 2**26:
            client.sendall(b"a: b\r\n" * 2**12 if first.endswith(b"\n") else b"x" * 2**14)
            sent += 2**14
    assert sent < 2**26
    with server.client() as http:
        assert http.get("/health/").status_code == 200


def send_until_closed(server: Server, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send bytes as they are, and return everything that comes back until the server closes the connection."""
    received = b""
    address = server.listening.getsockname()
    with socket.create_connection(address, timeout=10) as connection, suppress(ConnectionError):
        for part in parts if pause else (b"".join(parts),):
            connection.sendall(part)
            time.sleep(pause)
        while part := connection.recv(65536):
            received += part
    return received


def send_raw(server: Server, head: str) -> str:
    """Send a header as it is and return the answer, however the server closes the connection."""
    with socket.create_connection(server.listening.getsockname(), timeout=10) as connection:
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode())
        return connection.recv(65536).decode()


@pytest.mark.timeout(60)
def test_the_version_has_the_fingerprint_of_the_model_only_if_asked_and_says_if_its_weights_were_changed(server):
    with server.client() as http:
        short, full = http.get("/version/").json(), http.get("/version/?full=1").json()
        assert {"weight_version", "updating", "learner", "release", "base"} <= set(short)
        assert set(full) - set(short) == {"model"} and full == short | {"model": full["model"]}
        assert read_version(http.get("/version/?full=1").content, "server 0").model == full["model"]
        server.app.updates.base_changed = True
        assert (short["base"], http.get("/version/").json()["base"]) == ("original", "changed")


@pytest.mark.timeout(60)
def test_a_route_without_its_slash_is_no_route_and_nobody_is_sent_to_the_host_that_a_request_names(server):
    with server.client() as http:
        assert code(http.get("/get_world_size")) == (404, "no_route")
        for path in ("/health", "/ready"):
            answer = http.get(path, headers={"Host": "evil.example"})
            assert code(answer) == (421, "other_host") and "location" not in answer.headers


@pytest.mark.timeout(60)
def test_calls_that_are_too_large_or_cannot_be_read_are_refused_with_a_reason(server, monkeypatch):
    monkeypatch.setattr(connections, "MOST_BYTES", 1000)
    with server.client() as http:
        assert code(http.post("/infer/", content=b"x" * 1001)) == (413, "too_large")

        def chunks() -> Iterator[bytes]:
            for _ in range(30):
                yield b" " * 100

        assert code(http.post("/infer/", content=chunks())) == (413, "too_large")
        assert code(http.post("/infer/", content=b"{garbage")) == (422, "bad_request")
        assert code(http.post("/infer/", json={"infer_requests": 3})) == (422, "bad_request")
        assert code(http.post("/begin_update/", json={})) == (422, "bad_request")
        group = GROUP | {"world_size": 4}
        assert code(http.post("/init_communicator/", json=group)) == (400, "world_size")
        assert http.post("/infer/", json={"infer_requests": []}).json() == []
        assert code(http.get("/infer/")) == (405, "no_route")
        assert code(http.get("/nothing/")) == (404, "no_route")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a": "\xff\xfe"}', b"9" * 5000, b"{", b"\0", b""])
def test_a_body_that_cannot_be_parsed_is_a_bad_request_and_no_missing_route(server, body):
    with server.client() as http:
        status, error_code = code(http.post("/infer/", content=body, headers={"content-type": "application/json"}))
    assert status in (400, 422) and error_code == "bad_request"


@pytest.mark.timeout(60)
def test_weight_calls_with_half_characters_or_unreadable_descriptions_are_bad_requests_and_begin_no_update(server):
    good = {"name": "a", "shape": [2], "dtype": "float32", "start_idx": 0, "end_idx": 8}
    strange = [None, {}, True, 1e308, -1, [[1]], ["\ud83d"], [-5], [1] * 100, [10**30], "x" * 5000]
    metadatas = [{name: value for name, value in good.items() if name != missing} for missing in good]
    metadatas += [good | {name: value} for name in ("dtype", "shape", "start_idx", "end_idx") for value in strange]
    metadatas += [good | {"dtype": name, "end_idx": 2} for name in ("quint8", "bits8", "torch.qint8")]
    metadatas += [good | {"shape": [0, 2**70], "end_idx": 0}, good | {"shape": [2**40, 2**40]}]
    metadatas += [good | {"shape": [int("9" * 4000)] * 2_000}]  # their product takes minutes
    metadatas += [good | {"name": name} for name in (None, 5, "\ud83d", "", "x" * 501)]
    loads = [("/load_bucket/", {"group": "a", "metadatas": [good, metadata]}) for metadata in metadatas]
    bad = [
        *loads,
        ("/load_bucket/", {"group": "a", "metadatas": []}),
        ("/load_bucket/", {"group": "a", "metadatas": [good], "next_bytes": 2**48 + 1}),
        ("/begin_update/", {"group": "x" * 201, "version": "1"}),
        ("/begin_update/", {"version": "1"}),
        ("/begin_update/", {"group": "a", "version": ""}),
    ]
    with server.client() as http:
        for path, body in bad:
            answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            status, error_code = code(answer)
            assert status in (400, 422) and error_code == "bad_request", (path, body, answer.text)
            assert len(answer.content) < 2000
        assert http.get("/ready/").status_code == 200


@pytest.mark.timeout(60)
def test_4096_requests_are_a_call_and_one_more_is_too_large(server):
    with server.client() as http:
        assert len(http.post("/infer/", json={"infer_requests": [{}] * 4096}).json()) == 4096
        answer = http.post("/infer/", json={"infer_requests": [{}] * 4097})
        assert code(answer) == (413, "too_large") and "4096 requests" in answer.text


@pytest.mark.timeout(60)
def test_unknown_fields_are_refused_by_name_and_those_that_ms_swift_sends_are_accepted(server):
    with server.client() as http:
        for name, value in {"logit_bias": {"5": 1}, "ignore_eos": True, "anything": 0}.items():
            for body in ({"request_config": {name: value}}, {name: value}):
                answer = http.post("/infer/", json={"infer_requests": [{}]} | body)
                assert code(answer) == (422, "bad_request")
                assert f"{name}: not served here; leave it out" in answer.text
        for name, value in {"top_k": 1e20, "temperature": "hot", "stop": ["\ud83d"]}.items():
            content = json.dumps({"infer_requests": [{}], "request_config": {name: value}})
            answer = http.post("/infer/", content=content, headers={"content-type": "application/json"})
            assert code(answer) == (422, "bad_request") and name in answer.text
        # Everything that ms-swift's client sends in addition to the requests.
        more = {"metrics": None, "template": None, "use_tqdm": False, "adapter_request": None}
        for config in (None, {"num_beams": 1, "presence_penalty": 0.0, "structured_outputs_regex": None}):
            body = {"infer_requests": [{}], "request_config": config} | more
            assert http.post("/infer/", json=body).status_code == 200
        assert code(http.post("/infer/", json=body | {"adapter_request": {"name": "x"}})) == (422, "bad_request")


@pytest.mark.timeout(60)
def test_a_server_is_held_by_the_connection_of_its_group(server, monkeypatch):
    monkeypatch.setattr(updates, "HANDOVER", 0.1)
    with server.client() as http, server.client() as other:
        with http.stream("POST", "/init_communicator/", json=GROUP) as held:
            lines = held.iter_lines()
            assert [json.loads(next(lines))["message"] for _ in range(2)] == ["taken", "joined"]
            version = other.get("/version/")
            assert version.json()["learner"] == "host:1" and "a secret" not in version.text
            refused = other.post("/init_communicator/", json=GROUP | {"group": "b"})
            assert code(refused) == (409, "taken") and "host:1" in refused.text
            assert code(other.post("/begin_update/", json={"group": "b", "version": "1"})) == (409, "other_group")
        wait_until(lambda: other.get("/version/").json()["learner"] is None)
        with other.stream("POST", "/init_communicator/", json=GROUP | {"group": "b"}) as held:
            assert held.status_code == 200
        assert "leave" in server.engine.calls


@pytest.mark.timeout(60)
def test_a_learner_that_leaves_while_it_waits_for_another_one_does_not_hold_the_server(server):
    with server.client() as http, server.client() as other:
        with http.stream("POST", "/init_communicator/", json=GROUP) as held:
            lines = held.iter_lines()
            assert next(lines) and next(lines)
            with pytest.raises(httpx.ReadTimeout):
                other.post("/init_communicator/", json=GROUP | {"group": "b"}, timeout=0.3)
        wait_until(lambda: server.engine.calls.count("leave") == 2 and server.app.updates.owner is None)
        assert server.engine.calls.count("join") == 1


@pytest.mark.timeout(60)
def test_a_call_whose_client_disconnects_is_cancelled(server):
    with server.client() as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/infer/", json={"infer_requests": [{"seconds": 30}]}, timeout=0.3)
        wait_until(lambda: server.app.updates.answering == 0)


@pytest.mark.timeout(60)
def test_a_server_that_is_ending_ends_all_requests_and_groups(server):
    body = {"infer_requests": [{"seconds": 30}]}
    with server.client() as http, server.client() as other:
        with http.stream("POST", "/init_communicator/", json=GROUP) as held, ThreadPoolExecutor(1) as pool:
            lines = held.iter_lines()
            next(lines), next(lines)
            call = pool.submit(lambda: other.post("/infer/", json=body))
            wait_until(lambda: server.app.updates.answering == 1)
            server.loop.call_soon_threadsafe(server.app.ending.set)
            assert code(call.result(30)) == (503, "ending")
            assert not any(lines)  # and no error
        wait_until(lambda: server.app.updates.answering == 0)  # the generation is cancelled in a task of its own


@pytest.mark.timeout(60)
def test_requests_and_updates_are_counted(server):
    with server.client() as http:
        http.post("/infer/", json={"infer_requests": [{}, {}]})
        metrics = http.get("/metrics").text
    assert 'coordexp_requests_total{outcome="answered"} 2.0' in metrics
    assert "coordexp_generated_tokens_total 6.0" in metrics


@pytest.mark.timeout(60)
def test_answers_do_not_wait_for_the_acknowledgement_of_their_first_half(server):
    """With Nagle's algorithm, the second of two packets waits 40 ms for it."""
    with server.client() as http:
        seconds = []
        for _ in range(20):
            since = time.perf_counter()
            http.get("/health/")
            seconds.append(time.perf_counter() - since)
    assert statistics.median(seconds) < 0.03


@pytest.mark.timeout(60)
def test_a_call_that_fails_ends_only_after_all_of_its_answers(server):
    with server.client() as http:
        since = time.perf_counter()
        answer = http.post("/infer/", json={"infer_requests": [{"fails": True}, {"seconds": 0.5}]})
        assert code(answer) == (500, "unexpected") and time.perf_counter() - since > 0.4
        wait_until(lambda: server.app.updates.answering == 0)


@pytest.mark.timeout(60)
def test_a_server_is_alive_but_not_ready_while_it_has_no_weights_or_is_being_updated(server):
    with server.client() as http:
        assert http.get("/ready/").json() == {"status": "ready"}
        with http.stream("POST", "/init_communicator/", json=GROUP) as held:
            lines = held.iter_lines()
            assert next(lines) and next(lines)
            good(http.post("/begin_update/", json={"group": GROUP["group"], "version": "1"}))
            assert code(http.get("/ready/")) == (503, "updating") and http.get("/health/").status_code == 200
        wait_until(lambda: http.get("/version/").json()["learner"] is None)
        assert code(http.get("/ready/")) == (503, "no_weights") and http.get("/health/").status_code == 200
        server.engine.has_ended = True
        assert code(http.get("/ready/")) == code(http.get("/health/")) == (503, "engine_ended")
        server.engine.has_ended = False
        server.app.watchdog.silent = 61.0
        assert code(http.get("/ready/")) == code(http.get("/health/")) == (503, "engine_hung")
        assert "have not answered for 61 s" in http.get("/health/").text


def good(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text


def test_a_server_whose_engine_makes_no_first_answer_ends_with_an_error(monkeypatch):
    async def hang() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(app_module, "READY", 0.1)
    app: Any = SimpleNamespace(engine=SimpleNamespace(ready=hang))
    with pytest.raises(EngineError, match="no answer"):
        asyncio.run(asyncio.wait_for(app_module._run(cast("Any", None), cast("Any", None), app, print), 30))
