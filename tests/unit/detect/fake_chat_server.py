"""A chat server without a model, for faults that a real one does not have on request. It answers each call with
the next response of a list; the last one is repeated."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS: dict[str, Any] = {"data": [{"id": "scenes", "max_model_len": 1024}]}


@dataclass
class FakeResponse:
    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait: threading.Event | None = None


@dataclass
class FakeChatServer:
    """The server's address, and the calls that it got: the path, the headers and the body of each."""

    url: str = ""
    models: FakeResponse = field(default_factory=lambda: FakeResponse(MODELS))
    answers: list[FakeResponse] = field(default_factory=list)
    calls: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)

    @property
    def bodies(self) -> list[Any]:
        return [body for path, _, body in self.calls if path == "/v1/chat/completions"]


@contextmanager
def run_fake_chat_server() -> Iterator[FakeChatServer]:
    fake = FakeChatServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.calls.append((self.path, dict(self.headers), None))
            self._send(fake.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.calls.append((self.path, dict(self.headers), body))
            self._send(fake.answers.pop(0) if len(fake.answers) > 1 else fake.answers[0])

        def _send(self, response: FakeResponse) -> None:
            if response.wait is not None:
                response.wait.wait(30)
            content = response.body if isinstance(response.body, bytes) else json.dumps(response.body).encode()
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            with suppress(BrokenPipeError):  # the client did not wait
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join(10)
