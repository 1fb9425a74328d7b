"""The weights of a server. Every answer comes from whole weights of one version, and one learner at a time may
change them.

An update holds back new answers and begins when the running ones have ended, so no answer mixes versions. If an
update fails, the server has no weights, reports that, and can be given whole weights again.

An adapter is loaded beside the weights in use and replaces the previous adapter in one step at the end. If it
fails before that step, the old version stays. An adapter belongs to the weights that the server was started with:
once an update of whole weights has begun, the server takes no adapter any more.

A learner holds the server by a session, which is a connection that it keeps open. When the connection closes, the
server abandons the learner's update and leaves its group. A client of ms-swift has no session (`swift_clients`).
Another such client may replace it at any time, but nobody may replace a learner with a session.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from coordexp.engine.weights import Metadata, check_metadata
from coordexp.errors import EngineError, explain
from coordexp.servers.engine import ServedEngine
from coordexp.servers.protocol import UPDATE_TIMEOUT, Refusal, bad_request
from coordexp.tasks import ignore

STARTED = "default"  # vLLM's name for the weights that it was started with


@dataclass(frozen=True)
class LearnerSession:
    id: str
    learner: str


@dataclass
class Update:
    """An update that is running."""

    session: str | None
    version: str
    since: float
    adapter: bool = False
    config: dict[str, Any] | None = None  # the adapter's config, as peft writes it
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
        self.session: LearnerSession | None = None
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
            while self.update is not None:
                await self._changed.wait()
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

    async def claim(self, session: LearnerSession) -> None:
        """Let the session hold the server. While it does, its own connection is open, so every other claim is a
        stranger's, even one with the same id."""
        if self.session is not None:
            raise Refusal(
                409,
                "session_taken",
                f"learner {self.session.learner} holds this server",
                "end that one, or give this run servers of its own",
            )
        self.session = session
        try:
            await self._clear()
        except BaseException:
            self.session = None  # no connection holds it
            raise

    async def release(self, session: LearnerSession) -> None:
        if self.session is session:
            try:
                await self._clear()
            finally:
                if self.session is session:
                    self.session = None

    async def join(self, session: str | None, host: str, port: int, world_size: int, timeout: float) -> None:
        self.check_session(session)
        self._timeout = timeout
        await self._clear()
        async with self._engine:
            try:
                await self.engine.join(host, port, world_size, timeout, plain=session is None)
            except EngineError as error:
                problem = f"the learner and this server's workers formed no group at port {port}: {error.problem}"
                raise Refusal(500, "no_group", problem, _PORT) from error

    async def leave(self, session: str | None) -> None:
        self.check_session(session)
        await self._clear()

    async def begin(self, session: str | None, version: str, adapter: bool = False) -> None:
        """Begin an update, once the answers that are running have ended."""
        self.check_session(session)
        async with self._changed:
            if self.update is not None:
                raise Refusal(409, "update_running", f"weights of version {self.update.version} are being sent")
            if adapter:
                self._check_adapters()
            self.update = update = Update(session, version, time.perf_counter(), adapter)
            self._restart_timer(update)
            while self.answering != 0 and self.update is update:
                await self._changed.wait()
        update.begun = True
        if adapter:
            await self._apply(update, self.engine.begin_adapter)
            return
        update.touched = True
        await self._apply(update, self._begin_whole)

    async def _begin_whole(self) -> None:
        self.base_changed = True
        await self.engine.begin()

    async def load(self, session: str | None, metadatas: Sequence[dict[str, Any]], next_bytes: int = 0) -> None:
        """Load one bucket of whole weights. `next_bytes` is the length of the next bucket, if it comes at once."""
        update = self._prepare_to_load(session, adapter=False)
        await self._apply(update, self.engine.load, metadatas, next_bytes)
        update.bytes += _bucket_bytes(metadatas)

    async def load_adapter(
        self, session: str | None, config: dict[str, Any], metadatas: Sequence[dict[str, Any]]
    ) -> None:
        """Load one bucket of an adapter."""
        update = self._prepare_to_load(session, adapter=True)
        if update.config not in (None, config):
            raise bad_request(
                "peft_config: it differs from the one that came with the first tensors of this adapter"
            )
        update.config = config
        await self._apply(update, self.engine.load_adapter, metadatas)
        update.bytes += _bucket_bytes(metadatas)

    def _prepare_to_load(self, session: str | None, *, adapter: bool) -> Update:
        """Return the running update that a bucket belongs to."""
        self.check_session(session)
        update = self._running_update(session)
        if update.adapter != adapter:
            begun, other = ("an adapter", "whole weights") if update.adapter else ("whole weights", "an adapter")
            raise Refusal(
                409, "other_kind", f"the running update is of {begun}, but {other} came", "end that update first"
            )
        self._restart_timer(update)
        return update

    async def finish(self, session: str | None, version: str) -> str:
        """Put the loaded weights into use, and return their version."""
        self.check_session(session)
        update = self._running_update(session)
        if version != update.version:
            raise Refusal(
                409, "other_version", f"the running update is of version {update.version}, not of {version}"
            )
        if update.adapter:
            await self._apply(update, self._build_adapter, update, to_refusal=_adapter_refused)
        await self._apply(update, self._commit, update)
        return version

    async def _build_adapter(self, update: Update) -> None:
        if update.config is None:
            raise EngineError("none of its tensors were sent")
        await self.engine.build_adapter(update.config)

    async def _commit(self, update: Update) -> None:
        if update.adapter:
            update.touched = True
            await self.engine.finish_adapter(update.version)
        else:
            await self.engine.finish(update.version)
        await self._end(update, "done", update.version)

    def check_session(self, session: str | None) -> None:
        if session != (self.session.id if self.session else None):
            holder = f"learner {self.session.learner} holds it" if self.session else "nobody holds it"
            problem = f"session {session or '(none)'} does not hold this server: {holder}"
            raise Refusal(409, "no_session", problem, "open one at /session/, and keep the connection open")

    def _check_adapters(self) -> None:
        if not self.engine.takes_adapters:
            raise Refusal(
                409,
                "no_lora",
                "this server was started without support for adapters",
                "start it with rollout_matching.vllm.enable_lora: true, or send whole weights",
            )
        if self.base_changed:
            raise Refusal(
                409,
                "base_changed",
                "whole weights were sent to this server, but an adapter belongs to those it was started with",
                "start the server again, or send whole weights",
            )

    def _running_update(self, session: str | None) -> Update:
        if self.update is None or self.update.session != session or not self.update.begun:
            raise Refusal(409, "no_update", "no weight update is running", "begin one at /start_update/")
        return self.update

    async def _apply(
        self,
        update: Update,
        work: Callable[..., Awaitable[None]],
        *arguments: Any,
        to_refusal: Callable[[EngineError], Refusal] | None = None,
    ) -> None:
        """Do one piece of the update's work in the engine. If that fails, the update fails."""
        try:
            async with self._engine:
                if self.update is not update:
                    raise Refusal(500, "update_failed", "the update was ended before it was complete", _SYNC)
                await work(*arguments)
        except EngineError as error:
            await self._fail(update)
            raise (to_refusal or _update_failed)(error) from error
        except Refusal:  # the engine has ended
            await self._fail(update)
            raise

    async def _fail(self, update: Update) -> None:
        async with self._engine:
            if self.update is not update:
                return
            try:
                if update.adapter:
                    await self.engine.abandon_adapter()
                elif update.touched:
                    await self.engine.abandon()
            finally:  # answers must not wait for this update, even if the engine cannot abandon it
                await self._end(update, "failed", None if update.touched else self.version)

    async def _end(self, update: Update, outcome: str, version: str | None) -> None:
        async with self._changed:
            self.update, self.version = None, version
            if update.timer:
                update.timer.cancel()
            self.count(outcome, time.perf_counter() - update.since, update.bytes)
            self._changed.notify_all()

    async def _clear(self) -> None:
        """Abandon the running update and leave the group of the previous learner."""
        if self.update is not None:
            await self._fail(self.update)
        async with self._engine:
            await self.engine.leave()

    def _restart_timer(self, update: Update) -> None:
        """End the update if nothing more comes within the timeout, since answers wait for it."""
        if update.timer:
            update.timer.cancel()
        update.timer = asyncio.get_running_loop().call_later(self._timeout, self._expire, update)

    def _expire(self, update: Update) -> None:
        self._expired = asyncio.get_running_loop().create_task(self._fail(update))


def no_weights() -> Refusal:
    return Refusal(503, "no_weights", "this server has no weights: the last weight update failed", _SYNC)


def check_bucket(metadatas: Sequence[Metadata]) -> None:
    """Refuse a bucket that cannot be read, before it begins or fails an update."""
    if not metadatas:
        raise bad_request("metadatas: empty", "send at least one tensor")
    with explain(ValueError, "metadatas", to=bad_request):
        check_metadata(metadatas)


def _bucket_bytes(metadatas: Sequence[dict[str, Any]]) -> int:
    return max(int(tensor["end_idx"]) for tensor in metadatas)


def _update_failed(error: EngineError) -> Refusal:
    fix = f"{error.fix}; {_SYNC}" if error.fix else _SYNC
    return Refusal(500, "update_failed", f"the weights could not be loaded: {error.problem}", fix)


def _adapter_refused(error: EngineError) -> Refusal:
    problem = f"the adapter cannot be used: {error.problem}"
    return Refusal(409, "adapter_refused", problem, error.fix or "send whole weights")


_PORT = "group_port of the config must be free on the server's machine and open to the learner's"
_SYNC = "a full sync brings it back: the learner does that by itself at its next step"
