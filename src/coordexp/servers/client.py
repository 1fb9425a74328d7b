"""The HTTP client of one rollout server: health, facts, session, weights and answers. Several threads may use it.

No call outlives its server. While a call is running, the client polls the server's health, and ends the call if
the server has died or has been silent for too long.
"""

import json
import os
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import torch

from coordexp.config.rollout import ServerEndpoint
from coordexp.engine.weights import WeightGroup, join
from coordexp.errors import EngineError
from coordexp.servers.protocol import (
    GUARD_ROUTE,
    KEEP_ALIVE,
    TOKEN,
    ServerFacts,
    read_error,
    read_facts,
    read_field,
    read_plugin_guard,
)
from coordexp.tasks import Task

LARGEST = 2**30  # bytes of a response
LATE = 0.5  # seconds in which a thread with the same deadline ends by itself
Health = Literal["ok", "refused", "silent", "failed"]


class ServerLost(EngineError):
    """The server is gone or has no weights. It may be asked again only after a full sync."""


class ServerFault(ServerLost):
    """The server answered with an error of its own (5xx)."""

    def __init__(self, problem: str, fix: str, status: int, code: str = "") -> None:
        super().__init__(problem, fix)
        self.status, self.code = status, code


class RequestRefused(EngineError):
    """The server answered that the request or the setup is wrong (4xx)."""

    def __init__(self, problem: str, fix: str, status: int, code: str) -> None:
        super().__init__(problem, fix)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ClientTimeouts:
    """How long the client waits, in seconds."""

    poll: float = 1.0  # between two health checks of a server
    health: float = 2.0  # for the response to a health check
    silence: float = 10.0  # without any response, until a server counts as lost
    session: float = 30.0  # without a line in the session's stream, until the session counts as ended
    taken: float = 15.0  # for the session of a learner that has died to end
    call: float = 30.0  # for the response to a call that takes no time on the server


class ServerClient:
    """Calls one server. `is_swift` is set once the server is known to be one of ms-swift. `infer_timeout_s` limits
    generation calls; without it, or if it is not positive, they have no limit."""

    def __init__(
        self,
        index: int,
        server: ServerEndpoint,
        infer_timeout_s: float | None = None,
        timeouts: ClientTimeouts | None = None,
    ) -> None:
        self.index, self.url, self.group_port = index, server.base_url, server.group_port
        self.timeouts = timeouts or ClientTimeouts()
        self.is_swift = False
        self._infer_timeout = infer_timeout_s if infer_timeout_s and infer_timeout_s > 0 else None
        token = os.environ.get(TOKEN)
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,  # no proxy stands between a learner and its servers
            follow_redirects=False,
            timeout=None,  # noqa: S113 - `_call` ends a call
            transport=httpx.HTTPTransport(
                verify=ssl.create_default_context(),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                socket_options=[*KEEP_ALIVE, (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
            ),
        )

    @property
    def name(self) -> str:
        return f"rollout server {self.index} ({self.url})"

    def health(self) -> Health:
        try:
            with self._http.stream("GET", f"{self.url}/health/", timeout=self.timeouts.health) as response:
                return "ok" if response.status_code == 200 else "failed"
        except httpx.TimeoutException:
            return "silent"
        except httpx.TransportError:
            return "refused"

    def facts(self) -> ServerFacts:
        """Return what the server reports about itself. A server without our version route is one of ms-swift."""
        size = read_field(self.get("/get_world_size/"), self.name, "/get_world_size/", "world_size", int)
        if size < 1:
            raise EngineError(f"{self.name}: it reports a world size of {size}")
        body = self._get_if_present("/version/")
        if body is None:
            self.is_swift = True
            plugin = self._get_if_present(GUARD_ROUTE)
            guard = read_plugin_guard(plugin, self.name, size) if plugin is not None else None
            return ServerFacts(size, is_swift=True, guard=guard)
        facts = read_facts(body, self.name)
        if facts.world_size != size:
            raise EngineError(
                f"{self.name}: /get_world_size/ says {size}, but /version/ says {facts.world_size}",
                "this should not happen; start the server again",
            )
        return facts

    def _get_if_present(self, path: str) -> bytes | None:
        """Return the response, or None if the server does not have this route."""
        try:
            return self.get(path)
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            return None

    def weight_version(self) -> str | None:
        """Return the version that the server reports, or None while it has no whole weights."""
        return read_field(self.get("/version/"), self.name, "/version/", "weight_version", object)

    def get(self, path: str) -> bytes:
        return self._call("GET", path, None, self.timeouts.call)

    def post(self, path: str, body: dict[str, Any], seconds: float | None = None) -> bytes:
        """Return the response. Raise ServerLost if the server dies meanwhile, or needs more than `seconds`."""
        return self._call("POST", path, body, seconds)

    def infer(self, payload: dict[str, Any]) -> bytes:
        """Return the response. `infer_timeout_s` limits this call alone."""
        return self._call("POST", "/infer/", payload, self._infer_timeout)

    def close(self) -> None:
        self._http.close()

    def join(
        self, size: int, session: str | None, device: torch.device, seconds: float, sync: float
    ) -> WeightGroup:
        """Return the group for weights: the server's `size` workers, and this process as the last rank. Raise
        ServerLost if it is not complete in `seconds`. Later, a transfer over it may take `sync` seconds."""
        host = urlsplit(self.url).hostname or "127.0.0.1"
        body: dict[str, Any] = {"host": host, "port": self.group_port, "world_size": size + 1}
        timeout = max(seconds, sync)
        if not self.is_swift:
            body |= {"session": session, "timeout_s": timeout}
        until, changed = time.monotonic() + seconds, Event()
        request = Task(self.post, "/init_communicator/", body, seconds + self.timeouts.call, changed=changed)
        self._wait_until_open(host, request, until)
        group = Task(join, host, self.group_port, size, size + 1, device, timeout, self.is_swift, changed=changed)
        while not (request.done.is_set() and group.done.is_set()) and not (request.error or group.error):
            if not changed.wait(max(0.0, until + LATE - time.monotonic())):
                raise self._no_group(f"it was not complete after {seconds:g} s")
            changed.clear()
        for error in (request.error, group.error):
            if isinstance(error, EngineError):
                raise error
            if error is not None:
                raise self._no_group(str(error).splitlines()[0]) from error
        return group.result(0)

    def _wait_until_open(self, host: str, request: Task[bytes], until: float) -> None:
        """Wait until the group's port is open. An attempt to join before that, which nobody waits for any more,
        could disturb the next one."""
        while True:
            if request.done.is_set():
                request.result()
            with suppress(OSError):
                socket.create_connection((host, self.group_port), timeout=1).close()
                return
            if time.monotonic() >= until:
                raise self._no_group("nothing listens there")
            time.sleep(0.02)

    def _no_group(self, reason: str) -> ServerLost:
        return ServerLost(
            f"{self.name}: no group for weights at its group_port {self.group_port}: {reason}",
            "the port must be free on the server's machine and open to the learner's",
        )

    def _call(self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None) -> bytes:
        exchange = _Exchange(self._http, self.name)
        began = last_response = time.monotonic()
        task = Task(exchange.run, method, f"{self.url}{path}", body)
        try:
            while not task.done.wait(self._next_look(began, seconds)):
                if seconds is not None and time.monotonic() - began >= seconds:
                    raise ServerLost(f"{self.name}: no answer in {seconds:.1f} s")
                last_response = self._check_alive(last_response)
            status, content = task.result()
        except httpx.TransportError as error:
            raise ServerLost(f"{self.name}: the connection failed in {path} ({_describe(error)})") from error
        except ServerLost as lost:
            raise ServerLost(f"{lost.problem} (in {path})", lost.fix) from None
        finally:
            exchange.cut()
        if status == 200:
            return content
        raise self.to_error(status, path, content)

    def _next_look(self, began: float, seconds: float | None) -> float:
        left = seconds - (time.monotonic() - began) if seconds is not None else self.timeouts.poll
        return max(0.0, min(self.timeouts.poll, left))

    def _check_alive(self, last_response: float) -> float:
        """Return when the server last responded. Raise ServerLost if it has ended or has been silent for too long.
        A server of ms-swift responds to nothing while it generates."""
        health = self.health()
        if health == "refused":
            raise ServerLost(f"{self.name}: it has ended")
        if health == "failed" and not self.is_swift:
            raise ServerLost(f"{self.name}: its engine has ended or hangs")
        if health == "ok" or self.is_swift:
            return time.monotonic()
        if (silent := time.monotonic() - last_response) >= self.timeouts.silence:
            raise ServerLost(f"{self.name}: no response for {silent:.0f} s")
        return last_response

    def to_error(self, status: int, path: str, body: bytes) -> ServerFault | RequestRefused:
        """Return the error that a response stands for."""
        content: Any = {}
        with suppress(ValueError, RecursionError):
            content = json.loads(body)
        reason, fix, code = read_error(content)
        problem = f"{self.name}: {path} answered {status}" + (f" {code}" if code else "")
        problem += f": {reason}" if reason else ""
        if status >= 500:
            return ServerFault(problem, fix, status, code)
        if status == 401:
            fix = fix or f"set {TOKEN} to the same value for the server and the learner"
        elif 300 <= status < 400:
            fix = "base_url must lead to the server itself, without a redirect"
        return RequestRefused(problem, fix, status, code)


class _Exchange:
    """One request and its response. Another thread may cut it off."""

    def __init__(self, http: httpx.Client, server: str) -> None:
        self._http, self._server = http, server
        self._stream: Any = None

    def run(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """Return the status and the body of the response."""
        with self._http.stream(method, url, json=body, extensions={"trace": self._trace}) as response:
            content = bytearray()
            for part in response.iter_bytes():
                content += part
                if len(content) > LARGEST:
                    raise EngineError(f"{self._server}: its answer has more than {LARGEST >> 20} MiB")
            return response.status_code, bytes(content)

    def hold(self, url: str, body: dict[str, Any], begun: Event, silence: float) -> None:
        """Read a response that stays open, until it ends or is silent for `silence` seconds. Set `begun` at its
        first line."""
        timeout, trace = httpx.Timeout(silence), {"trace": self._trace}
        with self._http.stream("POST", url, json=body, timeout=timeout, extensions=trace) as response:
            if response.status_code != 200:
                raise _NotOpened(response.status_code, response.read())
            for _ in response.iter_lines():
                begun.set()

    def cut(self) -> None:
        """End the exchange by closing its socket."""
        if self._stream is not None and (connection := self._stream.get_extra_info("socket")) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._stream = info["return_value"]


class _NotOpened(Exception):
    """The response to a request for a session was an error."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body


class ServerSession:
    """This learner's right to send weights to a server. It lasts as long as its connection stays open."""

    def __init__(self, client: ServerClient, identity: str) -> None:
        self.identity, self.ended = identity, Event()
        self._client, self._begun = client, Event()
        self._exchange = _Exchange(client._http, client.name)
        body = {"session": identity, "learner": f"{socket.gethostname()}:{os.getpid()}"}
        self._task = Task(self._hold, body)

    @classmethod
    def open(cls, client: ServerClient, identity: str) -> "ServerSession":
        """Open a session. If another learner holds the server, retry for a while: that learner may have just
        died."""
        until = time.monotonic() + client.timeouts.taken
        while True:
            session = cls(client, identity)
            try:
                session._wait_until_open()
                return session
            except RequestRefused as refused:
                if refused.code != "session_taken" or time.monotonic() >= until:
                    raise
            time.sleep(min(1.0, client.timeouts.poll))

    def close(self) -> None:
        self._exchange.cut()

    def _hold(self, body: dict[str, Any]) -> None:
        try:
            self._exchange.hold(f"{self._client.url}/session/", body, self._begun, self._client.timeouts.session)
        finally:
            self.ended.set()
            self._begun.set()

    def _wait_until_open(self) -> None:
        if not self._begun.wait(self._client.timeouts.call):
            self.close()
            raise ServerLost(f"{self._client.name}: it did not begin a session")
        if self.ended.is_set():
            self._task.done.wait(1)
            error = self._task.error
            if isinstance(error, _NotOpened):
                raise self._client.to_error(error.status, "/session/", error.body)
            raise ServerLost(f"{self._client.name}: the session ended at once ({_describe(error)})")


def _describe(error: BaseException | None) -> str:
    return str(error) or type(error).__name__ if error is not None else "without an error"
