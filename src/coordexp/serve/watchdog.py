"""Notices an engine that hangs: its processes are there, and nothing comes back from them any more.

Every few seconds all workers of all replicas are asked to answer. vLLM passes the question on between two steps,
so an answer shows that the engine's loop and its workers go on, with requests or without. On a GPU a step takes
seconds at most. With a large model on a slow CPU it may take longer than the deadline, which is a setting
therefore.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from coordexp.serve.refusal import Refusal

PING = 5.0  # seconds between two questions, at most
LOOK = 0.5  # seconds between two looks at the one that is out


class Watchdog:
    """`ping` returns when every worker has answered. It may take `deadline` seconds. While workers wait for a
    learner's weights, it may take the seconds that `busy` returns on top of that."""

    def __init__(self, ping: Callable[[], Awaitable[None]], deadline: float, busy: Callable[[], float]) -> None:
        self._ping, self._deadline, self._busy = ping, deadline, busy
        self.silent = 0.0  # seconds for which a question has been out
        self._allowed = 0.0  # seconds more that it may be, because workers have waited meanwhile

    @property
    def problem(self) -> Refusal | None:
        if self.silent <= self._deadline + max(self._allowed, self._busy()):
            return None
        message = f"the engine hangs: its processes are alive and have not answered for {self.silent:.0f} s"
        fix = (
            "the server ends itself: start it again, as `coordexp launch` does; if a step takes that long here, "
            "raise rollout_matching.vllm.server.hung_after_s"
        )
        return Refusal(503, "engine_hung", message, fix)

    async def run(self) -> None:
        """Ask until cancelled, or until the engine cannot be asked, which others notice."""
        while True:
            asked = asyncio.ensure_future(self._ping())
            try:
                await self._until_answered(asked)
            finally:
                asked.cancel()
            if asked.cancelled() or asked.exception() is not None:
                return
            self.silent = self._allowed = 0.0
            await asyncio.sleep(min(PING, self._deadline / 4))

    async def _until_answered(self, asked: "asyncio.Future[None]") -> None:
        """Count the seconds. A process that was stopped itself looks late: what it has slept through is no silence
        of its engine."""
        look = min(LOOK, self._deadline / 4)
        while not asked.done():
            began = time.monotonic()
            self._allowed = max(self._allowed, self._busy())
            await asyncio.wait({asked}, timeout=look)
            self._allowed = max(self._allowed, self._busy())
            self.silent += min(time.monotonic() - began, 2 * look)
