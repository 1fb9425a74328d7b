"""Detects an engine that hangs: its processes are alive but no longer respond.

Every few seconds, all workers of all replicas get a ping. vLLM forwards it between two decoding steps, so a reply
shows that the engine's loop and its workers make progress, with or without requests. On a GPU a step takes seconds
at most. A large model on a slow CPU may need longer than the deadline, so the deadline is a setting.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from coordexp.servers.refusal import Refusal

PING = 5.0  # seconds between two pings, at most
LOOK = 0.5  # seconds between two checks for a reply


class Watchdog:
    """Pings the engine. `ping` returns once every worker has replied, which may take `deadline` seconds.
    `extra_seconds` returns how much longer it may take right now, because workers wait for a learner's weights."""

    def __init__(
        self, ping: Callable[[], Awaitable[None]], deadline: float, extra_seconds: Callable[[], float]
    ) -> None:
        self._ping, self._deadline, self._extra_seconds = ping, deadline, extra_seconds
        self.silent = 0.0  # seconds since the ping that has no reply yet
        self._allowed = 0.0  # the largest `extra_seconds` since that ping

    @property
    def problem(self) -> Refusal | None:
        if self.silent <= self._deadline + max(self._allowed, self._extra_seconds()):
            return None
        problem = f"the engine hangs: its processes are alive and have not answered for {self.silent:.0f} s"
        fix = (
            "this server stops itself: start it again, as `coordexp launch` does; if one decoding step takes that "
            "long here, raise rollout_matching.vllm.server.hung_after_s"
        )
        return Refusal(503, "engine_hung", problem, fix)

    async def run(self) -> None:
        """Ping until cancelled, or until a ping fails because the engine has ended."""
        while True:
            ping = asyncio.ensure_future(self._ping())
            try:
                await self._wait_for_reply(ping)
            finally:
                ping.cancel()
            if ping.cancelled() or ping.exception() is not None:
                return
            self.silent = self._allowed = 0.0
            await asyncio.sleep(min(PING, self._deadline / 4))

    async def _wait_for_reply(self, ping: "asyncio.Future[None]") -> None:
        """Count the seconds without a reply. A check that comes late counts as two intervals at most: then this
        process itself was suspended."""
        look = min(LOOK, self._deadline / 4)
        while not ping.done():
            began = time.monotonic()
            self._allowed = max(self._allowed, self._extra_seconds())
            await asyncio.wait({ping}, timeout=look)
            self._allowed = max(self._allowed, self._extra_seconds())
            self.silent += min(time.monotonic() - began, 2 * look)
