"""Between a learner and a real rollout server: passes on what they say, except where a test wants it spoiled.

Weights do not go through it: the learner finds the server's group_port by itself.
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
    """`faults[path]` are met by one request each, in turn: a fault answers it, or does something before it goes on
    to the server."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.server = (str(address.hostname), int(address.port or 80))
        self.faults: dict[str, list[Action]] = {}
        self.sockets: list[socket.socket] = []
        self._listener = _Listener(("127.0.0.1", 0), type("Bound", (_Passing,), {"proxy": self}))
        self._listener.fake = self  # type: ignore[assignment]
        threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    def meet(self, path: str, *faults: Action) -> None:
        self.faults.setdefault(path, []).extend(faults)

    def is_clear(self) -> bool:
        """Whether all faults have been met."""
        return not any(self.faults.values())

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        for one in self.sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Passing(Handler):
    proxy: FaultyProxy

    def _handle(self, body: dict[str, Any]) -> None:
        waiting = self.proxy.faults.get(self.path)
        if waiting and waiting.pop(0)(self):
            return
        with suppress(OSError):  # a server that is gone leaves the learner without an answer
            self._pass_on(json.dumps(body).encode() if self.command == "POST" else b"")

    def _pass_on(self, body: bytes) -> None:
        kept = {name: self.headers[name] for name in ("Authorization", "Content-Type") if self.headers[name]}
        headers = {"Host": "server", "Connection": "close", "Content-Length": str(len(body))} | kept
        lines = [f"{self.command} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        with socket.create_connection(self.proxy.server) as server:
            server.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            while self.connection not in select.select([server, self.connection], [], [])[0]:
                if not (part := server.recv(2**16)):
                    break
                self.wfile.write(part)


# Faults, besides those of the fake server that only answer.


def does(work: Callable[[], Any]) -> Action:
    """Before the request goes on."""

    def act(_: Handler) -> bool:
        work()
        return False

    return act


def says(told: Any) -> Action:
    def act(handler: Handler) -> bool:
        handler.give(200, told)
        return True

    return act
