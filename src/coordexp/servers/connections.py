"""Connections of a rollout server: the socket it listens on, which requests it lets in, and which connections it
closes. Imports no torch, so that the port can be reserved before slow imports.

uvicorn by itself waits for a header and for a body as long as a client likes. Here a connection is closed when it
has not sent a whole header within `HEADER` seconds and `MOST_HEADER` bytes, or when for `BODY` seconds it has sent
no byte of a body or read no byte of a response. An answer or a session may take as long as it needs.
"""

import asyncio
import hashlib
import hmac
import json
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.exceptions import HTTPException
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordexp.config.rollout import is_loopback_host
from coordexp.errors import EngineError, explain
from coordexp.servers.protocol import DIGEST, KEEP_ALIVE, Refusal, bad_request, format_digest, is_damaged

HEADER = 10.0  # seconds for a whole header, from the first byte or from the start of the connection
BODY = 30.0  # seconds without a byte of the body, or in which the client reads no byte of a response
MOST_HEADER = 2**14  # bytes of a header or trailer, unless it comes whole in one read
MOST_READ = 2**16  # bytes that are read from a socket, and parsed, before others have their turn
LOOKS = 1.0  # seconds between two checks of a connection
MOST_STRANGERS = 2048  # or a quarter of the files that may be open, if that is less
CUT_AT_ONCE = 8  # one in so many strangers is closed at once: counting them for every connection takes too long
BACKLOG = 256  # connections that are accepted at once, before the first of them can be closed
CONNECTION = "coordexp.connection"  # the key of the connection in the scope of a request
LEAVING = 0.5  # seconds that a request may take to clean up when the server stops
MOST_BYTES = 256 * 2**20  # bytes in the body of one call
LARGE_BODY = 2**20  # bytes of a response that a thread hashes, so that the event loop goes on
PROBES = ("/health/", "/ready/")  # routes without a token


def listen(host: str, port: int) -> socket.socket:
    """Reserve the port. Clients can connect once uvicorn starts to accept. The kernel detects a learner whose
    machine is gone, by TCP keep-alive."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is named. With it, every response is 40 ms late.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for option in KEEP_ALIVE:
        listening.setsockopt(*option)
    fix = "end the process that uses it, or change rollout_matching.vllm.server.servers"
    with explain(OSError, f"cannot listen on {host}:{port}", fix, to=EngineError):
        listening.bind((host, port))
    return listening


def raise_file_limit() -> int:
    """Allow this process as many open files as the system permits, and return that number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def most_strangers() -> int:
    return min(MOST_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class TimedConnection(H11Protocol):
    """A connection of uvicorn with deadlines. Of uvicorn's two HTTP parsers, only h11 limits the size of a header.

    A stranger is a connection that has not shown the token and has no request that is being answered. When there
    are too many, the oldest eighth of them is closed: an honest client sends its header at once, and must not wait
    behind those that do not."""

    is_known = False  # the app sets it when a request has the token
    cycle: Any  # the latest request
    connections: Any

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = MOST_READ
        now = self.loop.time()
        self.since = self._received = self._read = now
        self._unread = 0  # bytes of responses that the client has not read yet
        self._header_since: float | None = now
        self._timer = self.loop.call_later(LOOKS, self._look)
        if len(self.connections) > (most := most_strangers()):
            strangers = [connection for connection in self.connections if connection.is_stranger]
            if len(strangers) > most:
                strangers.sort(key=attrgetter("since"))
                for stranger in strangers[: max(1, most // CUT_AT_ONCE)]:
                    stranger.cut_off()

    def data_received(self, data: bytes) -> None:
        before, self._received = self.cycle, self.loop.time()
        if len(data) > MOST_HEADER and before is not None and before.response_complete and before.more_body:
            self.transport.close()  # nobody reads this body
            return
        super().data_received(data)
        if self.cycle is not before:
            self._header_since = None
            self.cycle.scope[CONNECTION] = self  # the app handles the request after this call
        elif self._header_since is None and self._has_no_request:
            self._header_since = self._received

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(error)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, unless the request that they belong to has a response already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.cut_off()
        if self.cycle is not None:
            self.cycle.disconnected = True  # so that the app's own response is not sent

    @property
    def is_stranger(self) -> bool:
        is_answered = not self._has_no_request and not self.cycle.more_body and not self.flow.write_paused
        return not self.is_known and not is_answered and not self.transport.is_closing()

    def cut_off(self) -> None:
        self.transport.abort()

    @property
    def _has_no_request(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _look(self) -> None:
        now = self.loop.time()
        before, self._unread = self._unread, self.transport.get_write_buffer_size()
        if self._unread == 0 or self._unread != before:
            self._read = now
        if now - self._read > BODY:
            is_late = True
        elif self._has_no_request:
            is_late = self._header_since is not None and now - self._header_since > HEADER
        else:
            if self.flow.read_paused:  # the client may have sent more: the app has not read it yet
                self._received = now
            is_late = self.cycle.more_body and now - self._received > BODY
        if is_late:
            self.cut_off()
        else:
            self._timer = self.loop.call_later(LOOKS, self._look)


# The arguments that uvicorn is started with.
UVICORN: dict[str, Any] = {
    "http": TimedConnection,
    "h11_max_incomplete_event_size": MOST_HEADER,
    "ws": "none",
    "backlog": BACKLOG,
    "log_level": "warning",
    "access_log": False,
    "timeout_graceful_shutdown": 3,
}


class AccessControl:
    """ASGI middleware that refuses requests with a missing token, for another host, or with a body that is too
    large or does not have the digest in its header. It adds the digest to responses. Once the server is `ending`,
    it also ends the requests that are being answered, with the refusal that `reason` returns."""

    def __init__(self, app: Any, token: str | None, ending: asyncio.Event, reason: Callable[[], Refusal]) -> None:
        self.app, self.token, self.ending, self.reason = app, token, ending, reason

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = _add_digest(send)
        headers = dict(scope["headers"])
        is_known = self._has_token([value for name, value in scope["headers"] if name == b"authorization"])
        if refusal := self._check(scope["path"], headers, is_known):
            response = to_response(refusal)
            response.headers["Connection"] = "close"  # the rest of the request is not read
            await response(scope, receive, send)
            return
        if is_known and CONNECTION in scope:
            scope[CONNECTION].is_known = True
        left = MOST_BYTES
        digest, expected = hashlib.sha256(), headers.get(DIGEST.encode())

        async def receive_checked() -> Any:
            nonlocal left
            message = await receive()
            body = message.get("body", b"")
            left -= len(body)
            if left < 0:
                raise HTTPException(413)
            if expected is not None and message["type"] == "http.request":
                digest.update(body)
                if not message.get("more_body") and is_damaged(expected.decode("latin-1"), digest.digest()):
                    raise HTTPException(400, DIGEST)
            return message

        await self._run_until_ending(scope, receive_checked, send)

    async def _run_until_ending(self, scope: Any, receive: Any, send: Any) -> None:
        last: list[Any] = []  # the latest message that was sent

        async def send_noted(message: Any) -> None:
            last[:] = [message]
            await send(message)

        work = asyncio.ensure_future(self.app(scope, receive, send_noted))
        ending = asyncio.ensure_future(self.ending.wait())
        with cancel_at_end(ending, work):
            await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return
        await asyncio.wait({work}, timeout=LEAVING)
        if not last:
            await to_response(self.reason())(scope, receive, send)
        elif last[0]["type"] == "http.response.start" or last[0].get("more_body"):
            await send(body_chunk("", is_last=True))

    def _has_token(self, values: list[bytes]) -> bool:
        expected = f"Bearer {self.token}".encode()
        return bool(self.token) and len(values) == 1 and hmac.compare_digest(values[0], expected)

    def _check(self, path: str, headers: dict[bytes, bytes], is_known: bool) -> Refusal | None:
        is_probe = path in PROBES
        if self.token and not is_probe and not is_known:
            return Refusal(
                401,
                "no_token",
                "this server requires a token",
                "set COORDEXP_SERVER_TOKEN to the same value for the server and the learner",
            )
        if not self.token and not is_probe and not _is_for_this_machine(headers):
            return Refusal(
                421,
                "other_host",
                "the request is from a web page or names another host, and this server has no token",
                "use 127.0.0.1 or localhost in base_url, or set COORDEXP_SERVER_TOKEN on both ends",
            )
        if int(headers.get(b"content-length", b"0")) > MOST_BYTES:
            return too_large(f"{MOST_BYTES} bytes")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            return bad_request("Content-Length and Transfer-Encoding contradict each other", "send one of them")
        return None


def _is_for_this_machine(headers: dict[bytes, bytes]) -> bool:
    """Return True if a request names this machine, or no host, and is not from a web page. A browser on this
    machine sends a page's requests to 127.0.0.1, with the header Origin, and the page can make the name of its own
    site stand for 127.0.0.1."""
    if b"origin" in headers:
        return False
    host = headers.get(b"host", b"localhost").decode("latin-1")
    with suppress(ValueError):  # an address that is not one
        return is_loopback_host(urlsplit(f"//{host}").hostname or "")
    return False


def _add_digest(send: Any) -> Any:
    """Return a function that sends messages, with the digest of the body among the headers if the whole body comes
    in one message. A stream of several has none."""
    start: list[Any] = []

    async def send_with_digest(message: Any) -> None:
        if message["type"] == "http.response.start":
            start.append(message)
            return
        if start:
            first = start.pop()
            if not message.get("more_body"):
                body = message.get("body", b"")
                compute = partial(hashlib.sha256, body)
                sha256 = await asyncio.to_thread(compute) if len(body) > LARGE_BODY else compute()
                value = format_digest(sha256.digest())
                first = first | {"headers": [*first.get("headers", ()), (DIGEST.encode(), value.encode())]}
            await send(first)
        await send(message)

    return send_with_digest


def too_large(limit: str) -> Refusal:
    return Refusal(
        413, "too_large", f"more than {limit} in one call", "send fewer requests in a call, or paths of images"
    )


def to_response(refusal: Refusal) -> Response:
    """Return the refusal as JSON in ASCII: what it quotes from a request may have no form in UTF-8."""
    return Response(json.dumps(refusal.to_json()), refusal.status, media_type="application/json")


def body_chunk(text: str, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": not is_last}


@contextmanager
def cancel_at_end(*tasks: "asyncio.Future[Any]") -> Iterator[None]:
    """Cancel the tasks that are still running when the block ends, also by an exception."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
