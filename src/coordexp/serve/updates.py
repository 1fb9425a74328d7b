"""The weights of a server: answers come from whole weights of one version, and one learner at a time changes them.

An update holds back new answers and begins when those that run have ended, so no answer mixes versions. Whatever
goes wrong in it leaves a server that has no weights, says so, and can be given whole ones.

An adapter is taken beside what answers are made with, and takes its place in one step at the end, so whatever goes
wrong before leaves the old version as it was. It belongs to the weights that the server was started with: once
whole weights have been sent, or begun to be, no adapter is taken any more.

A learner holds the server by a session: a connection that it keeps open. When it closes, the learner is gone, and
what it left is cleared. A client of the plain ms-swift contract has none; another one may take its place at any
time, but not that of a session.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from coordexp.errors import EngineError
from coordexp.serve.refusal import Refusal

TIMEOUT = 240.0  # seconds that an update may stand still, unless the learner says otherwise
STARTED = "default"  # vLLM's name for the weights that it was started with


class TakesWeights(Protocol):
    takes_adapters: bool

    async def join(self, host: str, port: int, world_size: int, timeout: float, plain: bool) -> None: ...
    async def leave(self) -> None: ...
    async def begin(self) -> None: ...
    async def take(self, metadatas: Sequence[dict[str, Any]], next_bytes: int) -> None: ...
    async def finish(self, version: str) -> None: ...
    async def abandon(self) -> None: ...
    async def begin_adapter(self) -> None: ...
    async def take_adapter(self, metadatas: Sequence[dict[str, Any]]) -> None: ...
    async def build_adapter(self, config: dict[str, Any]) -> None: ...
    async def finish_adapter(self, version: str) -> None: ...
    async def abandon_adapter(self) -> None: ...
    async def forget(self) -> None: ...


@dataclass(frozen=True)
class Session:
    id: str
    learner: str


@dataclass
class Update:
    session: str | None
    version: str
    began: float
    adapter: bool = False
    config: dict[str, Any] | None = None  # of the adapter, as peft writes it
    begun: bool = False  # no answer runs any more
    touched: bool = False  # once it is, the old weights are gone
    bytes: int = 0
    watch: asyncio.TimerHandle | None = None


class Updates:
    def __init__(self, engine: TakesWeights, done: Callable[[str, float, int], None] = lambda *_: None) -> None:
        """`done` hears of every update that ended: how, after how many seconds, and its bytes."""
        self.engine, self.done = engine, done
        self.version: str | None = STARTED
        self.base_changed = False
        self.session: Session | None = None
        self.update: Update | None = None
        self.answering = 0
        self._timeout = TIMEOUT
        self._changed = asyncio.Condition()
        self._engine = asyncio.Lock()  # one call about weights at a time
        self._plain = 0

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[str]:
        """Inside, weights do not change. Gives their version."""
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

    @property
    def patience(self) -> float:
        """The seconds for which a call about weights may keep the workers waiting for the learner, if one runs."""
        # Agreeing on the length of a bucket and sending it may take the whole deadline each.
        return 2 * self._timeout if self._engine.locked() else 0.0

    async def claim(self, session: Session) -> None:
        """Let the session hold the server. Its connection is open as long as it does, so another claim, also one
        under the same name, is a stranger's."""
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

    async def release(self, session: Session) -> None:
        if self.session is session:
            try:
                await self._clear()
            finally:
                if self.session is session:
                    self.session = None

    async def join(self, session: str | None, host: str, port: int, world_size: int, timeout: float) -> None:
        self._check(session)
        self._timeout = timeout
        await self._clear()
        async with self._engine:
            try:
                await self.engine.join(host, port, world_size, timeout, plain=session is None)
            except EngineError as error:
                message = f"the learner and this server's workers did not come together at port {port}: {error}"
                raise Refusal(500, "no_group", message, _PORT) from error

    async def leave(self, session: str | None) -> None:
        self._check(session)
        await self._clear()

    async def begin(self, session: str | None, version: str, adapter: bool = False) -> None:
        self._check(session)
        async with self._changed:
            if self.update is not None:
                raise Refusal(409, "update_running", f"weights of version {self.update.version} are being sent")
            if adapter:
                self._check_adapters()
            self.update = update = Update(session, version, time.perf_counter(), adapter)
            self._watch(update)
            await self._changed.wait_for(lambda: self.answering == 0 or self.update is not update)
        update.begun = True
        if adapter:
            await self._or_fail(update, self.engine.begin_adapter)
            return
        update.touched = True
        await self._or_fail(update, self._begin_whole)

    async def _begin_whole(self) -> None:
        self.base_changed = True
        await self.engine.begin()

    async def take(self, session: str | None, metadatas: Sequence[dict[str, Any]], next_bytes: int = 0) -> None:
        update = await self._taking(session, metadatas, adapter=False)
        await self._or_fail(update, lambda: self.engine.take(metadatas, next_bytes))
        update.bytes += _length(metadatas)

    async def take_adapter(
        self, session: str | None, config: dict[str, Any], metadatas: Sequence[dict[str, Any]]
    ) -> None:
        update = await self._taking(session, metadatas, adapter=True)
        if update.config not in (None, config):
            raise Refusal(400, "bad_request", "peft_config: not that of the adapter's tensors before")
        update.config = config
        await self._or_fail(update, lambda: self.engine.take_adapter(metadatas))
        update.bytes += _length(metadatas)

    async def _taking(self, session: str | None, metadatas: Sequence[dict[str, Any]], *, adapter: bool) -> Update:
        if not metadatas:
            raise Refusal(400, "bad_request", "metadatas: empty", "send at least one tensor")
        self._check(session)
        if self.update is None and session is None:  # the plain contract has no beginning
            self._plain += 1
            await self.begin(None, f"plain-{self._plain}", adapter)
        update = self._open(session)
        if update.adapter != adapter:
            begun, other = ("an adapter", "whole weights") if update.adapter else ("whole weights", "an adapter")
            raise Refusal(
                409, "other_kind", f"{begun} began to be sent, and {other} came", "end that update first"
            )
        self._watch(update)
        return update

    async def finish(self, session: str | None, version: str) -> str:
        self._check(session)
        update = self._open(session)
        if version != update.version:
            raise Refusal(
                409, "other_version", f"version {update.version} was begun, and {version} is to be ended"
            )
        if update.adapter:
            await self._build(update)

        async def finish() -> None:
            if update.adapter:
                update.touched = True
                await self.engine.finish_adapter(version)
            else:
                await self.engine.finish(version)
            await self._end(update, "done", version)

        await self._or_fail(update, finish)
        return version

    async def _build(self, update: Update) -> None:
        async def build() -> None:
            if update.config is None:
                raise EngineError("nothing was sent of it")
            await self.engine.build_adapter(update.config)

        await self._or_fail(update, build, _adapter_refused)

    async def finish_plain(self) -> None:
        """Ends an update of the plain contract, if one runs: any of the calls that follow it there does."""
        self._check(None)
        if self.update is not None:
            await self.finish(None, self.update.version)

    async def abandon(self, session: str | None) -> None:
        self._check(session)
        if self.update is not None and self.update.session == session:
            await self._fail(self.update)

    def _check(self, session: str | None) -> None:
        if session != (self.session.id if self.session else None):
            held = f"learner {self.session.learner} holds it" if self.session else "nobody holds it"
            message = f"session {session or '(none)'} does not hold this server: {held}"
            raise Refusal(409, "no_session", message, "open one at /session/, and keep the connection open")

    def _check_adapters(self) -> None:
        if not self.engine.takes_adapters:
            raise Refusal(
                409,
                "no_lora",
                "this server was started without a place for adapters",
                "start it with rollout_matching.vllm.enable_lora: true, or send whole weights",
            )
        if self.base_changed:
            raise Refusal(
                409,
                "base_changed",
                "whole weights were sent to this server, and an adapter belongs to those it was started with",
                "start the server again, or send whole weights",
            )

    def _open(self, session: str | None) -> Update:
        if self.update is None or self.update.session != session or not self.update.begun:
            raise Refusal(409, "no_update", "no update of the weights is running", "begin one at /start_update/")
        return self.update

    async def _or_fail(
        self,
        update: Update,
        work: Callable[[], Awaitable[None]],
        refusal: Callable[[EngineError], Refusal] = lambda error: _update_failed(error),
    ) -> None:
        try:
            async with self._engine:
                if self.update is not update:
                    raise Refusal(500, "update_failed", "the update was ended before it was whole", _SYNC)
                await work()
        except EngineError as error:
            await self._fail(update)
            raise refusal(error) from error
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
            finally:  # whatever became of the engine, answers do not wait for this update
                await self._end(update, "failed", None if update.touched else self.version)

    async def _end(self, update: Update, how: str, version: str | None) -> None:
        async with self._changed:
            self.update, self.version = None, version
            if update.watch:
                update.watch.cancel()
            self.done(how, time.perf_counter() - update.began, update.bytes)
            self._changed.notify_all()

    async def _clear(self) -> None:
        """Ends what a learner has left: an update, the group."""
        if self.update is not None:
            await self._fail(self.update)
        async with self._engine:
            await self.engine.leave()

    def _watch(self, update: Update) -> None:
        """An update that stands still for too long is ended, since answers wait for it."""
        if update.watch:
            update.watch.cancel()
        loop = asyncio.get_running_loop()
        update.watch = loop.call_later(self._timeout, lambda: loop.create_task(self._fail(update)))


def no_weights() -> Refusal:
    return Refusal(503, "no_weights", "the last update of the weights failed, so there are none", _SYNC)


def _length(metadatas: Sequence[dict[str, Any]]) -> int:
    return max(int(told["end_idx"]) for told in metadatas)


def _update_failed(error: EngineError) -> Refusal:
    problem, _, fix = str(error).partition("\n  ")
    return Refusal(
        500, "update_failed", f"the weights were not taken: {problem}", f"{fix}; {_SYNC}" if fix else _SYNC
    )


def _adapter_refused(error: EngineError) -> Refusal:
    problem, _, fix = str(error).partition("\n  ")
    return Refusal(409, "adapter_refused", f"the adapter cannot be used: {problem}", fix or "send whole weights")


_PORT = "group_port of the config must be free on the server's machine and open to the learner's"
_SYNC = "a full sync brings it back: the learner does that by itself at its next step"
