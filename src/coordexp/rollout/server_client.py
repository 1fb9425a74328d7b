"""One rollout server over HTTP: health, what it is, a session, weights, answers. Used from several threads.

No call outlives its server: while one is out, the server's health is asked for, and one that has died, or is
silent for long, ends the call (D24).
"""

import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import torch

from coordexp.config.rollout import Server
from coordexp.errors import EngineError
from coordexp.rollout.broadcast import WeightGroup, join
from coordexp.rollout.tasks import Task
from coordexp.rollout.wire import (
    GUARD_ROUTE,
    KEEP_ALIVE,
    TOKEN,
    ServerFacts,
    error_told,
    read_facts,
    read_field,
    read_plugin_guard,
)

LARGEST = 2**30  # bytes of an answer
LATE = 0.5  # seconds, in which a thread that waits as long as we do ends by itself
Health = Literal["ok", "refused", "silent", "failed"]


class ServerLost(EngineError):
    """The server is gone, or has no weights: it may be asked again only after a full sync."""


class ServerFault(ServerLost):
    """It answered with an error of its own (5xx)."""

    def __init__(self, told: str, status: int, code: str = "") -> None:
        super().__init__(told)
        self.status, self.code = status, code


class Refused(EngineError):
    """The server answers, and says that the request or the setup is wrong (4xx)."""

    def __init__(self, told: str, status: int, code: str) -> None:
        super().__init__(told)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Patience:
    """Seconds."""

    poll: float = 1.0  # between two questions for a server's health
    health: float = 2.0  # for one answer to it
    silence: float = 10.0  # without any, a server is lost
    session: float = 30.0  # without a line of it
    taken: float = 15.0  # for the session of a learner that has died to end
    call: float = 30.0  # for an answer to what takes no time


class ServerClient:
    """`foreign` is set once the server is known to be one of ms-swift."""

    def __init__(
        self, index: int, server: Server, infer_timeout_s: float | None = None, patience: Patience | None = None
    ) -> None:
        self.index, self.url, self.group_port = index, server.base_url, server.group_port
        self.patience = patience or Patience()
        self.foreign = False
        self._infer_timeout = infer_timeout_s if infer_timeout_s and infer_timeout_s > 0 else None
        token = os.environ.get(TOKEN)
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,  # no proxy stands between a learner and its servers
            follow_redirects=False,
            timeout=None,  # noqa: S113 - `_asked` ends a call
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
            with self._http.stream("GET", f"{self.url}/health/", timeout=self.patience.health) as answer:
                return "ok" if answer.status_code == 200 else "failed"
        except httpx.TimeoutException:
            return "silent"
        except httpx.TransportError:
            return "refused"

    def facts(self) -> ServerFacts:
        """What it is. Without our version route, it is taken for ms-swift's."""
        size = read_field(self.get("/get_world_size/"), self.name, "/get_world_size/", "world_size", int)
        if size < 1:
            raise EngineError(f"{self.name}: it says that its world size is {size}")
        try:
            told = read_facts(self.get("/version/"), self.name)
        except Refused as refused:
            if refused.status != 404:
                raise
            self.foreign = True
            return ServerFacts(size, foreign=True, guard=self._plugin_guard(size))
        if told.world_size != size:
            raise EngineError(
                f"{self.name}: /get_world_size/ says {size}, and /version/ {told.world_size}\n"
                "  this should not happen; start the server again"
            )
        return told

    def _plugin_guard(self, world_size: int) -> Mapping[str, Any] | None:
        """Return the guard of a server of ms-swift, or None if it has not loaded our plugin."""
        try:
            return read_plugin_guard(self.get(GUARD_ROUTE), self.name, world_size)
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    def weight_version(self) -> str | None:
        """That it says it has; None while it has no whole weights."""
        return read_field(self.get("/version/"), self.name, "/version/", "weight_version", object)

    def get(self, path: str) -> bytes:
        return self._asked("GET", path, None, self.patience.call)

    def post(self, path: str, body: dict[str, Any], seconds: float | None = None) -> bytes:
        """The answer. A server that dies meanwhile, or takes longer, is lost."""
        return self._asked("POST", path, body, seconds)

    def infer(self, payload: dict[str, Any]) -> bytes:
        """Return the server's answer. `infer_timeout_s` limits this call alone."""
        return self._asked("POST", "/infer/", payload, self._infer_timeout)

    def close(self) -> None:
        self._http.close()

    def join(
        self, size: int, session: str | None, device: torch.device, seconds: float, sync: float
    ) -> WeightGroup:
        """The group that weights go over: the server's workers are in it, and this process, the last one. It is
        there in `seconds`; what is sent over it later may take as long as a `sync`."""
        host = urlsplit(self.url).hostname or "127.0.0.1"
        body: dict[str, Any] = {"host": host, "port": self.group_port, "world_size": size + 1}
        timeout = max(seconds, sync)
        if not self.foreign:
            body |= {"session": session, "timeout_s": timeout}
        until, changed = time.monotonic() + seconds, Event()
        told = Task(lambda: self.post("/init_communicator/", body, seconds + self.patience.call), changed)
        self._until_open(host, told, until)
        joined = Task(lambda: join(host, self.group_port, size, size + 1, device, timeout, self.foreign), changed)
        while not (told.done.is_set() and joined.done.is_set()) and not (told.error or joined.error):
            if not changed.wait(max(0.0, until + LATE - time.monotonic())):
                raise ServerLost(self._no_group(f"it was not there after {seconds:g} s"))
            changed.clear()
        for task in (told, joined):
            if isinstance(task.error, EngineError):
                raise task.error
            if task.error is not None:
                raise ServerLost(self._no_group(str(task.error).splitlines()[0])) from task.error
        return joined.result(0)

    def _until_open(self, host: str, told: Task[bytes], until: float) -> None:
        """An attempt to join that nobody waits for any more could meet the next one, so none is made before."""
        while True:
            if told.done.is_set():
                told.result()
            with suppress(OSError):
                socket.create_connection((host, self.group_port), timeout=1).close()
                return
            if time.monotonic() >= until:
                raise ServerLost(self._no_group("nothing listens there"))
            time.sleep(0.02)

    def _no_group(self, why: str) -> str:
        return (
            f"{self.name}: no group for weights at its group_port {self.group_port}: {why}\n"
            "  the port must be free on the server's machine and open to the learner's"
        )

    def _asked(self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None) -> bytes:
        exchange = _Exchange(self._http, self.name)
        began = heard = time.monotonic()
        task = Task(lambda: exchange.run(method, f"{self.url}{path}", body))
        try:
            while not task.done.wait(self._next_look(began, seconds)):
                if seconds is not None and time.monotonic() - began >= seconds:
                    raise ServerLost(f"{self.name}: no answer in {seconds:.1f} s")
                heard = self._alive(heard)
            status, found = task.result()
        except httpx.TransportError as error:
            raise ServerLost(f"{self.name}: the connection failed in {path} ({_said(error)})") from error
        except ServerLost as lost:
            raise ServerLost(f"{lost} (in {path})") from None
        finally:
            exchange.cut()
        if status == 200:
            return found
        raise self._refusal(status, path, found)

    def _next_look(self, began: float, seconds: float | None) -> float:
        left = seconds - (time.monotonic() - began) if seconds is not None else self.patience.poll
        return max(0.0, min(self.patience.poll, left))

    def _alive(self, heard: float) -> float:
        """When it was last heard of. ms-swift answers nothing while it generates."""
        health = self.health()
        if health == "refused":
            raise ServerLost(f"{self.name}: it has ended")
        if health == "failed" and not self.foreign:
            raise ServerLost(f"{self.name}: its engine has ended, or hangs")
        if health == "ok" or self.foreign:
            return time.monotonic()
        if (silent := time.monotonic() - heard) >= self.patience.silence:
            raise ServerLost(f"{self.name}: nothing was heard of it for {silent:.0f} s")
        return heard

    def _refusal(self, status: int, path: str, body: bytes) -> EngineError:
        try:
            told = httpx.Response(status, content=body).json()
        except ValueError:
            told = {}
        message, fix = error_told(told)
        code = str(told["error"].get("code", "")) if message and isinstance(told["error"], dict) else ""
        said = f"{self.name}: {path} answered {status}" + (f" {code}" if code else "")
        said += f": {message}" if message else ""
        if status >= 500:
            return ServerFault(said + (f"\n  {fix}" if fix else ""), status, code)
        if status == 401:
            fix = fix or f"set {TOKEN} to the same value for the server and the learner"
        elif 300 <= status < 400:
            fix = "base_url must lead to the server itself, without a redirect"
        return Refused(said + (f"\n  {fix}" if fix else ""), status, code)


class _Exchange:
    """One request and its answer, which another thread may cut off."""

    def __init__(self, http: httpx.Client, who: str) -> None:
        self._http, self._who = http, who
        self._stream: Any = None

    def run(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        with self._http.stream(method, url, json=body, extensions={"trace": self._trace}) as response:
            found = bytearray()
            for part in response.iter_bytes():
                found += part
                if len(found) > LARGEST:
                    raise EngineError(f"{self._who}: its answer has more than {LARGEST >> 20} MiB")
            return response.status_code, bytes(found)

    def lines(self, url: str, body: dict[str, Any], hear: Callable[[str], None], silence: float) -> None:
        """Of an answer that stays open."""
        trace = {"trace": self._trace}
        with self._http.stream("POST", url, json=body, timeout=httpx.Timeout(silence), extensions=trace) as found:
            if found.status_code != 200:
                raise _NotOpen(found.status_code, found.read())
            for line in found.iter_lines():
                hear(line)

    def cut(self) -> None:
        if self._stream is not None and (wire := self._stream.get_extra_info("socket")) is not None:
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._stream = info["return_value"]


class _NotOpen(Exception):
    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body


class Session:
    """This learner has the server, for as long as the connection stays open."""

    def __init__(self, client: ServerClient, identity: str) -> None:
        self.identity, self.ended = identity, Event()
        self._client, self._begun = client, Event()
        self._exchange = _Exchange(client._http, client.name)
        body = {"session": identity, "learner": f"{socket.gethostname()}:{os.getpid()}"}
        self._task = Task(lambda: self._hold(body))

    @classmethod
    def open(cls, client: ServerClient, identity: str) -> "Session":
        """A server that another learner has is asked again for a while: that one may have died just now."""
        until = time.monotonic() + client.patience.taken
        while True:
            session = cls(client, identity)
            try:
                session._wait()
                return session
            except Refused as refused:
                if refused.code != "session_taken" or time.monotonic() >= until:
                    raise
            time.sleep(min(1.0, client.patience.poll))

    def close(self) -> None:
        self._exchange.cut()

    def _hold(self, body: dict[str, Any]) -> None:
        try:
            url = f"{self._client.url}/session/"
            self._exchange.lines(url, body, lambda line: self._begun.set(), self._client.patience.session)
        finally:
            self.ended.set()
            self._begun.set()

    def _wait(self) -> None:
        if not self._begun.wait(self._client.patience.call):
            self.close()
            raise ServerLost(f"{self._client.name}: it did not begin a session")
        if self.ended.is_set():
            self._task.done.wait(1)
            error = self._task.error
            if isinstance(error, _NotOpen):
                raise self._client._refusal(error.status, "/session/", error.body)
            raise ServerLost(f"{self._client.name}: the session ended at once ({_said(error)})")


def _said(error: BaseException | None) -> str:
    return str(error) or type(error).__name__ if error is not None else "without an error"
