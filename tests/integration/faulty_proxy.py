"""Proxies between a learner and a real rollout server. `FaultyProxy` forwards all requests, except those that a
test spoils. `Relay` forwards bytes, and a test may delay, change or drop any of them.

Weights do not go through them: the learner connects to the server's group_port directly.
"""

import json
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tests.fake_server import Action, Handler, _Listener


class FaultyProxy:
    """Forwards requests to one server. Each request to a path takes the next of `faults[path]`, which answers it
    or runs before the request is forwarded."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.server = (str(address.hostname), int(address.port or 80))
        self.faults: dict[str, list[Action]] = {}
        self.sockets: list[socket.socket] = []
        self._listener = _Listener(("127.0.0.1", 0), type("Bound", (_Forwarder,), {"proxy": self}))
        self._listener.fake = self  # type: ignore[assignment]
        threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    def add_faults(self, path: str, *faults: Action) -> None:
        self.faults.setdefault(path, []).extend(faults)

    def is_clear(self) -> bool:
        """Return True if all faults have happened."""
        return not any(self.faults.values())

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        for connection in self.sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Forwarder(Handler):
    proxy: FaultyProxy

    def _handle(self, body: dict[str, Any]) -> None:
        waiting = self.proxy.faults.get(self.path.partition("?")[0])
        if waiting and waiting.pop(0)(self):
            return
        with suppress(OSError):  # if the server is gone, the learner gets no answer
            self._forward(json.dumps(body).encode() if self.command == "POST" else b"")

    def _forward(self, body: bytes) -> None:
        passed = {name: self.headers[name] for name in ("Authorization", "Content-Type") if self.headers[name]}
        headers = {"Host": "127.0.0.1", "Connection": "close", "Content-Length": str(len(body))} | passed
        lines = [f"{self.command} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        with socket.create_connection(self.proxy.server) as server:
            server.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            while self.connection not in select.select([server, self.connection], [], [])[0]:
                if not (part := server.recv(2**16)):
                    break
                self.wfile.write(part)


class Relay:
    """Forwards every connection to a port of this machine. `alter` gets the bytes that arrive together, and True
    if they are from the server. It returns the bytes to forward, and may wait. If they are fewer, or None, the
    connection is closed after them."""

    def __init__(self, port: int, alter: Callable[[bytes, bool], bytes | None] = lambda part, _: part) -> None:
        self.port, self.alter = port, alter
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listening.settimeout(0.1)
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        self._closed.set()

    def _accept(self) -> None:
        with self._listening:
            while not self._closed.is_set():
                with suppress(TimeoutError):
                    client, _ = self._listening.accept()
                    threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as server:
            answers = threading.Thread(target=self._forward, args=(server, client, True), daemon=True)
            answers.start()
            self._forward(client, server, False)
            answers.join()

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        """Forward until one end closes or breaks, and then close both."""
        with suppress(OSError):
            while not self._closed.is_set() and (part := source.recv(2**16)):
                altered = self.alter(part, is_answer)
                target.sendall(altered or b"")
                if altered is None or len(altered) < len(part):
                    break
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


# Faults, in addition to those of the fake server.


def does(work: Callable[[], Any]) -> Action:
    """Do some work before the request is forwarded."""

    def act(_: Handler) -> bool:
        work()
        return False

    return act
