"""Slow connections are closed, and connections without a token cannot lock others out. App and uvicorn are real,
the engine is a fake."""

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from coordexp.servers import connections
from tests.source import SOURCE
from tests.unit.servers.bombs import memory
from tests.unit.servers.test_app import TOKEN, Server

ROOT = Path(__file__).parents[3]
KNOWN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(params=[None, TOKEN])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(connections, "HEADER", 1.0)
    monkeypatch.setattr(connections, "BODY", 2.0)
    monkeypatch.setattr(connections, "LOOKS", 0.1)
    running = Server(request.param)
    yield running
    running.close()


@contextmanager
def connect(url: str, first: bytes = b"") -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(first)
        yield client


def seconds_until_closed(client: socket.socket, trickle: bytes = b"") -> float:
    since = time.monotonic()
    client.settimeout(0.2)
    while True:
        try:
            if trickle:
                client.sendall(trickle)
            if client.recv(65536) == b"":
                break
        except TimeoutError:
            assert time.monotonic() - since < 15, "it was never closed"
        except OSError:
            break
    return time.monotonic() - since


HEAD = b"POST /infer/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("first", [b"", b"POST /infer/ HTT", HEAD])
def test_a_connection_without_a_whole_header_is_closed_however_it_trickles(server, first):
    trickle = b"A: b\r\n" if first == HEAD else b""
    with connect(server.url, first) as client:
        assert 0.5 < seconds_until_closed(client, trickle) < 4


@pytest.mark.timeout(60)
def test_a_second_request_on_a_connection_has_the_same_deadline(server):
    whole = b"GET /health/ HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(server.url, whole) as client:
        assert b"200 OK" in client.recv(65536)
        client.sendall(b"GET /hea")
        assert 0.5 < seconds_until_closed(client) < 4


@pytest.mark.timeout(60)
def test_a_body_that_stops_is_closed_and_one_that_comes_slowly_is_not(server):
    with connect(server.url, HEAD + b"Content-Length: 30\r\n\r\n{") as client:
        assert 1.5 < seconds_until_closed(client) < 5
    body = b'{"infer_requests": [{"a": 1}]}'
    with connect(server.url, HEAD + b"Content-Length: %d\r\n\r\n" % len(body)) as client:
        for byte in range(0, len(body), 5):
            client.sendall(body[byte : byte + 5])
            time.sleep(0.6)  # together longer than both deadlines
        assert b"200 OK" in client.recv(65536)


@pytest.mark.timeout(60)
def test_a_client_that_reads_no_response_is_closed(server):
    """It sends 5,000 requests and never reads, so the responses pile up in the server."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(5.0)
        client.connect((host, int(port)))
        with suppress(OSError):
            client.sendall(b"GET /health/ HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)
        since = time.monotonic()
        while server.uvicorn.server_state.connections:
            assert time.monotonic() - since < 30, "it was never closed"
            time.sleep(0.1)


@pytest.mark.timeout(60)
def test_a_client_that_was_refused_and_goes_on_sending_is_closed():
    server = Server(TOKEN)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "HEADER", 1.0)
            patch.setattr(connections, "LOOKS", 0.1)
            with connect(
                server.url, b"POST /infer/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
            ) as client:
                assert b"401 Unauthorized" in client.recv(65536)
                assert seconds_until_closed(client, b"x") < 5
    finally:
        server.close()


@pytest.mark.timeout(60)
def test_long_answers_open_sessions_and_repeated_requests_are_not_cut_off(server):
    with (
        server.client(**KNOWN) as http,
        server.client(**KNOWN) as other,
        http.stream("POST", "/session/", json={"session": "a"}) as held,
    ):
        lines = held.iter_lines()
        assert next(lines)
        answer = other.post("/infer/", json={"infer_requests": [{"seconds": 4}]})  # longer than both deadlines
        assert answer.status_code == 200
        for _ in range(4):
            assert other.get("/version/").json()["session"] is not None
            time.sleep(0.5)
        assert not held.is_closed and server.app.updates.session is not None


@contextmanager
def fake_engine_server(limits: tuple[int, int], token: str, header: float = 3.0) -> Iterator[tuple[str, int, int]]:
    """Yield its URL, its process id and the number of files that it may open."""
    command = [sys.executable, "-m", "tests.unit.servers.fake_engine_server", token, str(header), "30"]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": f"{SOURCE}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    try:
        assert process.stdout is not None
        port, limit = process.stdout.readline().split()
        yield f"http://127.0.0.1:{port}", process.pid, int(limit)
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture
def many_files() -> Iterator[int]:
    """Let this process open enough files to be 1,100 clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1500:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("is_hard", [True, False])
def test_1100_slow_connections_at_a_limit_of_1024_files_do_not_stop_answers(many_files, token, is_hard):
    limits = (1024, 1024 if is_hard else many_files)
    with fake_engine_server(limits, token) as (url, pid, limit), ExitStack() as stack:
        assert limit == limits[1]
        half = b"POST /infer/ HTTP/1.1\r\nHost: localhost\r\n"
        slow = [stack.enter_context(connect(url, half)) for _ in range(1100)]
        with httpx.Client(base_url=url, headers=KNOWN, trust_env=False, timeout=5) as http:
            since = time.monotonic()
            assert http.post("/infer/", json={"infer_requests": [{"a": 1}]}).status_code == 200
            assert http.get("/health/").status_code == 200
            assert time.monotonic() - since < 3
            if is_hard:
                assert len(os.listdir(f"/proc/{pid}/fd")) < 256 + 100  # noqa: PTH208
                assert sum(is_closed(client) for client in slow) >= 1100 - 256
            until = time.monotonic() + 20
            while not all(is_closed(client) for client in slow):
                assert time.monotonic() < until
                time.sleep(0.2)
            assert http.post("/infer/", json={"infer_requests": [{"a": 1}]}).status_code == 200


def is_closed(client: socket.socket) -> bool:
    client.settimeout(0)
    try:
        return client.recv(100) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.timeout(120)
def test_a_flood_of_strangers_does_not_push_out_a_client_with_the_token(many_files):
    with fake_engine_server((1024, 1024), TOKEN) as (url, _, _), ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=url, headers=KNOWN, trust_env=False, timeout=10))
        held = stack.enter_context(http.stream("POST", "/session/", json={"session": "a"}))
        lines = held.iter_lines()
        assert next(lines)
        ended = threading.Event()

        def flood() -> None:
            while not ended.is_set():
                with ExitStack() as some:
                    for _ in range(400):
                        some.enter_context(connect(url, b"GET /"))

        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            for _ in range(10):
                answer = http.post("/infer/", json={"infer_requests": [{"seconds": 0.3}]})
                assert answer.status_code == 200
                assert http.get("/version/").json()["session"] is not None
        finally:
            ended.set()
            flooding.join(30)


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.timeout(300)
def test_headers_without_end_on_six_connections_take_no_memory_and_are_cut_off():
    attacks = {
        "header": (b"GET /health/ HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n"),
        "path": (b"GET /health/?", b"x"),
        "trailer": (CHUNKED + b"0\r\n", b"a: b\r\n"),
        "extension of a chunk": (CHUNKED + b"1;", b"x"),
    }

    def send_until_closed(url: str, first: bytes, then: bytes) -> bool:
        """Send for 2 s, and then until the connection has been closed at least once."""
        is_closed, since = False, time.monotonic()
        while time.monotonic() < since + (2 if is_closed else 60):
            with connect(url, first) as client:
                try:
                    while time.monotonic() < since + (2 if is_closed else 60):
                        client.sendall(then * 2**14)
                except OSError:
                    is_closed = True
        return is_closed

    with (
        fake_engine_server((1024, 1024), TOKEN, 10.0) as (url, pid, _),
        ThreadPoolExecutor(6) as pool,
        httpx.Client(base_url=url, trust_env=False, timeout=20) as http,
    ):
        assert http.get("/health/").status_code == 200
        before = memory(pid, "VmRSS")
        for name, (first, then) in attacks.items():
            closed = [pool.submit(send_until_closed, url, first, then) for _ in range(6)]
            assert all(future.result(70) for future in closed), name
            assert http.get("/health/").status_code == 200
            assert memory(pid, "VmHWM") < before + 40, name


@pytest.mark.timeout(300)
def test_chunks_of_one_byte_from_strangers_do_not_hold_up_the_others():
    """Parsing such a chunk takes longer than sending it. Strangers are answered before their bodies have come."""
    is_over = threading.Event()

    def flood(url: str, route: str) -> None:
        first = f"{route} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        while not is_over.is_set():
            with suppress(OSError), connect(url, first.encode()) as client:
                while not is_over.is_set():
                    client.sendall(b"1\r\na\r\n" * 2**14)

    with fake_engine_server((1024, 1024), TOKEN, 60.0) as (url, _, _), ThreadPoolExecutor(2) as pool:
        for route in ("GET /health/", "POST /infer/"):
            pool.submit(flood, url, route)
        try:
            with httpx.Client(base_url=url, headers=KNOWN, trust_env=False, timeout=30) as http:
                seconds = []
                for _ in range(8):
                    since = time.monotonic()
                    assert http.get("/version/").status_code == 200
                    seconds.append(time.monotonic() - since)
        finally:
            is_over.set()
    assert sorted(seconds)[4] < 10.0, seconds


def test_the_limit_of_open_files_is_raised_to_the_hard_limit():
    code = (
        "import resource; from coordexp.servers.connections import raise_file_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300));"
        "assert raise_file_limit() == 300 and resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 300)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(SOURCE)})
