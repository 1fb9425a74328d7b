"""Connections of a rollout server: who says nothing is cut off, and strangers cannot take all the room.

uvicorn waits for a header and for a body as long as a client likes. Here, a connection is closed when it has not
sent a whole header in `HEADER` seconds, or no byte of a body or taken no byte of an answer in `BODY` seconds. How
long an answer takes, or a session is held, is not limited: by then the request is there.
"""

import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER = 10.0  # seconds from the first byte, or from the beginning of a connection, to a whole header
BODY = 30.0  # seconds without a byte of the body, or without a byte of an answer that is taken
LOOKS = 1.0  # seconds between looks at a connection
MOST_STRANGERS = 2048  # or a quarter of the files that may be open, if that is less
CUT_AT_ONCE = 8  # so large a part of the strangers: to count them again for every connection would take the time
BACKLOG = 256  # connections that are accepted at once, before the first of them can be cut off
CONNECTION = "coordexp.connection"  # in the scope of a request


def raise_file_limit() -> int:
    """Allow this process as many open files as the system lets it, and return how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def most_strangers() -> int:
    return min(MOST_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class Deadlines:
    """What is added to a connection of uvicorn, of either implementation of HTTP. A stranger is one that has not
    shown a token and has no request that is being answered. When there are too many of them, an eighth of them is
    cut off, those that came first: an honest client sends its header at once, and does not wait behind those that
    do not."""

    is_known = False  # by its token; the app says so
    loop: Any
    cycle: Any  # the request that came last
    flow: Any
    transport: Any
    connections: Any

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        now = self.loop.time()
        self._since = self._heard = self._taken = now
        self._waiting = 0  # bytes of answers that the client has not taken yet
        self._header_since: float | None = now
        self._timer = self.loop.call_later(LOOKS, self._look)
        if len(self.connections) > (most := most_strangers()):
            strangers = sorted((one for one in self.connections if one.is_stranger), key=_age)
            if len(strangers) > most:
                for stranger in strangers[: max(1, most // CUT_AT_ONCE)]:
                    stranger.cut_off()

    def data_received(self, data: bytes) -> None:
        before, self._heard = self.cycle, self.loop.time()
        super().data_received(data)  # type: ignore[misc]
        if self.cycle is not before:
            self._header_since = None
            self.cycle.scope[CONNECTION] = self  # the request is handled later than this
        elif self._header_since is None and self._has_no_request:
            self._header_since = self._heard

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(error)  # type: ignore[misc]

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
        before, self._waiting = self._waiting, self.transport.get_write_buffer_size()
        if self._waiting == 0 or self._waiting != before:
            self._taken = now
        if now - self._taken > BODY:
            is_late = True
        elif self._has_no_request:
            is_late = self._header_since is not None and now - self._header_since > HEADER
        else:
            if self.flow.read_paused:  # the app has not taken what came
                self._heard = now
            is_late = self.cycle.more_body and now - self._heard > BODY
        if is_late:
            self.cut_off()
        else:
            self._timer = self.loop.call_later(LOOKS, self._look)


class Connection(Deadlines, AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    pass


# How uvicorn is started.
UVICORN: dict[str, Any] = {
    "http": Connection,
    "ws": "none",
    "backlog": BACKLOG,
    "log_level": "warning",
    "access_log": False,
    "timeout_graceful_shutdown": 3,
}


def _age(connection: Any) -> float:
    return float(connection._since)
