"""Which requests a rollout server lets in, and the socket that it listens on. Imports no torch, so that the port
can be reserved before slow imports.

The parser limits the size of a header, and this module that of a body. A client that opens connections and sends
nothing is not closed: a server that listens for more than a trusted network belongs behind a proxy.
"""

import hmac
import json
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import Response

from coordexp.config.rollout import is_loopback_host
from coordexp.errors import EngineError, explain
from coordexp.servers.protocol import KEEP_ALIVE, Refusal, bad_request

MOST_HEADER = 2**14  # bytes of a header or trailer, unless it comes whole in one read
BACKLOG = 256  # connections that wait to be accepted
MOST_BYTES = 256 * 2**20  # bytes in the body of one call
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


# The arguments that uvicorn is started with. Of its two HTTP parsers, only h11 limits the size of a header.
UVICORN: dict[str, Any] = {
    "http": "h11",
    "h11_max_incomplete_event_size": MOST_HEADER,
    "ws": "none",
    "backlog": BACKLOG,
    "log_config": None,  # its records are written as all others are
    "log_level": "warning",
    "access_log": False,
    "timeout_graceful_shutdown": 3,
}


class AccessControl:
    """ASGI middleware that refuses requests with a missing token, for another host, or with a body that is too
    large."""

    def __init__(self, app: Any, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if refusal := self._check(scope["path"], scope["headers"]):
            response = to_response(refusal)
            response.headers["Connection"] = "close"  # the rest of the request is not read
            await response(scope, receive, send)
            return
        left = MOST_BYTES

        async def receive_checked() -> Any:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413)
            return message

        await self.app(scope, receive_checked, send)

    def _check(self, path: str, lines: list[tuple[bytes, bytes]]) -> Refusal | None:
        headers, expected = dict(lines), f"Bearer {self.token}".encode()
        values = [value for name, value in lines if name == b"authorization"]
        is_known = len(values) == 1 and hmac.compare_digest(values[0], expected)
        if self.token and path not in PROBES and not is_known:
            fix = "set COORDEXP_SERVER_TOKEN to the same value for the server and the learner"
            return Refusal(401, "no_token", "this server requires a token", fix)
        if not self.token and path not in PROBES and not _is_for_this_machine(headers):
            problem = "the request is from a web page or names another host, and this server has no token"
            fix = "use 127.0.0.1 or localhost in base_url, or set COORDEXP_SERVER_TOKEN on both ends"
            return Refusal(421, "other_host", problem, fix)
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


def too_large(limit: str) -> Refusal:
    fix = "send fewer requests in a call, or paths of images"
    return Refusal(413, "too_large", f"more than {limit} in one call", fix)


def to_response(refusal: Refusal) -> Response:
    """Return the refusal as JSON in ASCII: what it quotes from a request may have no form in UTF-8."""
    return Response(json.dumps(refusal.to_json()), refusal.status, media_type="application/json")
