"""The weights of a server. Every answer comes from whole weights of one version, and one learner at a time may
change them.

An update holds back new answers and begins when the running ones have ended, so no answer mixes versions. If an
update fails, the server has no weights, reports that, and can be given whole weights again.

An adapter is loaded beside the weights in use and replaces the previous adapter in one step at the end. If it
fails before that step, the old version stays. An adapter belongs to the weights that the server was started with:
once an update of whole weights has begun, the server accepts no adapter any more.

The group for weights is the ownership: the server belongs to the learner that has joined it, until the connection
of that call closes. Then the server abandons the learner's update and leaves the group.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from coordexp.errors import EngineError, explain
from coordexp.servers.engine import ServedEngine
from coordexp.servers.protocol import UPDATE_TIMEOUT, BeginUpdate, JoinGroup, LoadBucket, Refusal, bad_request
from coordexp.servers.transfer import check_metadata
from coordexp.tasks import ignore

STARTED = "default"  # vLLM's name for the weights that it was started with
HANDOVER = 10.0  # seconds that a learner waits for the end of one that has just died


@dataclass
class Update:
    """An update that is running."""

    version: str
    since: float
    adapter: dict[str, Any] | None = None  # the config of the adapter that is sent, as peft writes it
    begun: bool = False  # the answers that were running have ended
    touched: bool = False  # the old weights are gone
    bytes: int = 0
    timer: asyncio.TimerHandle | None = None


class Updates:
    """The state of a server's weights. `count` is called for every update that ends, with its outcome, its seconds
    and its bytes."""

    def __init__(self, engine: ServedEngine, count: Callable[[str, float, int], None] = ignore) -> None:
        self.engine, self.count = engine, count
        self.version: str | None = STARTED
        self.base_changed = False
        self.owner: JoinGroup | None = None
        self.update: Update | None = None
        self.answering = 0
        self._timeout = UPDATE_TIMEOUT
        self._changed = asyncio.Condition()
        self._engine = asyncio.Lock()  # one call about weights at a time
        self._expired: asyncio.Task[None] | None = None  # the event loop itself keeps no reference to a task

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[str]:
        """Yield the version of the weights. They do not change inside the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.update is None)
            if (version := self.version) is None:
                raise no_weights()
            self.answering += 1
        try:
            yield version
        finally:
            async with self._changed:
                self.answering -= 1
                self._changed.notify_all()

    def waiting_allowance(self) -> float:
        """Return how many seconds a running call about weights may keep the workers waiting for the learner."""
        # Agreeing on the length of a bucket and sending it may each take the whole deadline.
        return 2 * self._timeout if self._engine.locked() else 0.0

    async def claim(self, learner: JoinGroup) -> None:
        """Let the server belong to a learner until it leaves. Wait a while if there is another one, which may have
        just died."""
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(HANDOVER):
                    await self._changed.wait_for(lambda: self.owner is None)
            if self.owner is not None:
                problem = f"learner {self.owner.learner} holds this server"
                raise Refusal(409, "taken", problem, "end that one, or give this run servers of its own")
            self.owner, self._timeout = learner, learner.timeout_s

    async def join(self, learner: JoinGroup, host: str) -> None:
        """Let the workers meet the learner at this host."""
        async with self._engine:
            try:
                await self.engine.join(host, learner.port, learner.world_size, learner.timeout_s)
            except EngineError as error:
                problem = f"the learner and the workers formed no group at port {learner.port}: {error.problem}"
                raise Refusal(500, "no_group", problem, _PORT) from error

    async def leave(self, learner: JoinGroup) -> None:
        """Abandon the learner's update and leave its group. The server is free for another one then."""
        try:
            if self.update is not None:
                await self._fail(self.update)
            async with self._engine:
                await self.engine.leave()
        finally:
            async with self._changed:
                self.owner = None if self.owner is learner else self.owner
                self._changed.notify_all()

    async def begin(self, message: BeginUpdate) -> None:
        """Begin an update, once the answers that are running have ended."""
        self._check_group(message.group)
        async with self._changed:
            if self.update is not None:
                raise Refusal(409, "update_running", f"weights of version {self.update.version} are being sent")
            if message.adapter is not None and not self.engine.accepts_adapters:
                problem = "this server was started without support for adapters"
                fix = "start it with rollout_matching.vllm.enable_lora: true, or send whole weights"
                raise Refusal(409, "no_lora", problem, fix)
            if message.adapter is not None and self.base_changed:
                problem = "whole weights were sent to this server, but an adapter belongs to those of its start"
                raise Refusal(409, "base_changed", problem, "start the server again, or send whole weights")
            self.update = update = Update(message.version, time.perf_counter(), message.adapter)
            self._restart_timer(update)
            await self._changed.wait_for(lambda: self.answering == 0 or self.update is not update)
        update.begun = True
        async with self._working(update):
            if update.adapter is None:
                update.touched = self.base_changed = True
            await self.engine.begin(is_adapter=update.adapter is not None)

    async def load(self, message: LoadBucket) -> None:
        """Load one bucket."""
        metadatas = [metadata.model_dump() for metadata in message.metadatas]
        with explain(ValueError, "metadatas", to=bad_request):
            size = check_metadata(metadatas)
        update = self._running_update(message.group)
        self._restart_timer(update)
        async with self._working(update):
            await self.engine.load(metadatas, message.next_bytes)
        update.bytes += size

    async def finish(self, group: str) -> str:
        """Put the loaded weights into use, and return their version."""
        update = self._running_update(group)
        if update.adapter is not None:
            async with self._working(update, "adapter_refused"):
                await self.engine.build_adapter(update.adapter)
        async with self._working(update):
            update.touched = True
            await self.engine.finish(update.version, is_adapter=update.adapter is not None)
            await self._end(update, "done", update.version)
        return update.version

    def _check_group(self, group: str) -> None:
        if self.owner is None or group != self.owner.group:
            holder = f"learner {self.owner.learner} holds it" if self.owner else "nobody holds it"
            problem = f"group {group} does not hold this server: {holder}"
            fix = "join a group at /init_communicator/, and keep that call open"
            raise Refusal(409, "other_group", problem, fix)

    def _running_update(self, group: str) -> Update:
        self._check_group(group)
        if self.update is None or not self.update.begun:
            raise Refusal(409, "no_update", "no weight update is running", "begin one at /begin_update/")
        return self.update

    @asynccontextmanager
    async def _working(self, update: Update, code: str = "update_failed") -> AsyncIterator[None]:
        """Hold the engine for a piece of the update's work. If that fails, the update fails, with this code."""
        try:
            async with self._engine:
                if self.update is not update:
                    raise Refusal(500, "update_failed", "the update was ended before it was complete", _SYNC)
                yield
        except EngineError as error:
            await self._fail(update)
            if code == "adapter_refused":
                problem, fix = f"the adapter cannot be used: {error.problem}", error.fix or "send whole weights"
                raise Refusal(409, "adapter_refused", problem, fix) from error
            fix = "; ".join(filter(None, (error.fix, _SYNC)))
            raise Refusal(
                500, "update_failed", f"the weights could not be loaded: {error.problem}", fix
            ) from error
        except Refusal:  # the engine has ended
            await self._fail(update)
            raise

    async def _fail(self, update: Update) -> None:
        async with self._engine:
            if self.update is not update:
                return
            try:
                if update.adapter is not None or update.touched:
                    await self.engine.abandon(is_adapter=update.adapter is not None)
            finally:  # answers must not wait for this update, even if the engine cannot abandon it
                await self._end(update, "failed", None if update.touched else self.version)

    async def _end(self, update: Update, outcome: str, version: str | None) -> None:
        async with self._changed:
            self.update, self.version = None, version
            if update.timer:
                update.timer.cancel()
            self.count(outcome, time.perf_counter() - update.since, update.bytes)
            self._changed.notify_all()

    def _restart_timer(self, update: Update) -> None:
        """End the update if nothing more comes within the timeout, since answers wait for it."""
        if update.timer:
            update.timer.cancel()
        loop = asyncio.get_running_loop()

        def expire() -> None:
            self._expired = loop.create_task(self._fail(update))

        update.timer = loop.call_later(self._timeout, expire)


def no_weights() -> Refusal:
    return Refusal(503, "no_weights", "this server has no weights: the last weight update failed", _SYNC)


_PORT = "group_port of the config must be free on the server's machine and open to the learner's"
_SYNC = "the next sync brings it back: the learner does that by itself at its next step"
