"""Rollouts by a vLLM engine that shares the learner's devices, and gets its weights in memory (R07, D23).

An engine serves `tensor_parallel_size` neighbouring ranks; the first of them speaks with it for the others. It is
started when it is first needed, after the learner has made room for it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from coordexp.errors import EngineError
from coordexp.ranks import gather_texts, together
from coordexp.rollout.adapter_fallback import AdapterRefused, SyncMode
from coordexp.rollout.backend import (
    AdapterWeights,
    Decode,
    Picture,
    Request,
    Rollout,
    RolloutBackend,
    Weights,
)
from coordexp.rollout.canary import PROBE, difference
from coordexp.rollout.connection import Connection, asked
from coordexp.rollout.engine import start_engine, stop_engine
from coordexp.rollout.group import Group
from coordexp.rollout.installed import OTHERWISE
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.setup import Setup
from coordexp.rollout.vllm import answers

WAVES = 8  # full batches of a call: the engine fills up as answers end, so only the end of a call is slow


class Room(Protocol):
    def drop(self) -> None:
        """Frees what reading the learner's weights has brought back into memory."""


class ColocateBackend:
    """`learner` answers with the learner's own model, and `probe` is the picture that both are asked to see that
    the engine has the same weights. Inside `room`, the learner is out of the engine's way; its weights can still
    be read. `tell` hears what takes long. `adapter` gives the learner's adapter, where it can be sent alone; the
    engine is then started with a place for it. `record` gets the facts of the run's manifest when they change."""

    def __init__(
        self,
        about: Setup,
        prompts: PromptBuilder,
        learner: RolloutBackend,
        probe: Picture,
        room: Callable[[], AbstractContextManager[Room]],
        tell: Callable[[str], None] = lambda _: None,
        adapter: Callable[[], AdapterWeights] | None = None,
        record: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.about, self.prompts, self.learner, self.probe = about, prompts, learner, probe
        self.room, self.tell = room, tell
        self.adapter, self.record = adapter, record
        self.sync_mode = SyncMode(about.settings.vllm.sync, adapter is not None, tell, OTHERWISE)
        self.group = Group.of(about.settings.vllm.tensor_parallel_size or 1)
        self.engine: Any = None
        self.version: int | None = None
        self._probed: int | None = None
        self._connection: Connection | None = None
        self._session: ExitStack | None = None
        self._away: Room | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """The learner makes room when the engine is first needed in it, and is back at its end."""
        assert self._session is None, "sessions are not nested"
        try:
            with ExitStack() as self._session:
                yield
        finally:
            self._session = None

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        self._make_room()
        return self.group.answered(requests, self._answers)

    @property
    def requests_per_call(self) -> int:
        return WAVES * self.about.settings.decode_batch_size

    def sync(self, weights: Weights, version: int) -> None:
        """A transaction (D23): all ranks begin it together, and end it with the new version or the same error. A
        version that the engine has is not sent again."""
        if version == self.version:
            return
        due = self._probed is None or version - self._probed >= self.about.settings.vllm.sync.canary_every
        assert not due or self._away is None, "the learner answers before it makes room"
        probe = [Request(self.probe, Decode.greedy(PROBE))]
        own = self.learner.generate(probe) if due else []
        together(self._make_room)
        self.version = None
        together(self._start)
        self._send(weights, version)
        assert self._away is not None
        self._away.drop()
        if due:
            theirs = self.generate(probe)
            together(lambda: self._compare(own[0], theirs[0]))
            if self._probed is None:
                self.tell("the engine answers as the learner does")
            self._probed = version
        self.version = version

    def close(self) -> None:
        if self.engine is not None:
            stop_engine(self.engine.llm_engine.engine_core)
        self.engine = self.version = self._connection = None

    def described(self) -> dict[str, Any]:
        """Return the facts that the run's manifest records."""
        return self.sync_mode.described()

    def _make_room(self) -> None:
        if self._away is None:
            assert self._session is not None, "outside of a session"
            self._away = self._session.enter_context(self.room())
            self._session.callback(setattr, self, "_away", None)

    def _start(self) -> None:
        if self._connection is not None:
            return
        if self.group.leads:
            since = time.perf_counter()
            self.tell(f"starting vLLM (tensor_parallel_size {self.group.size}), which takes about a minute")
            self.engine = start_engine(self.about, adapters=self.sync_mode.is_adapter)
            self.tell(f"vLLM is ready after {time.perf_counter() - since:.0f} s")
        self._connection = Connection(self.engine, self.about.device, self.about.settings.vllm.sync.timeout_s)

    def _send(self, weights: Weights, version: int) -> None:
        """Send the adapter alone, or whole weights. If any engine refuses the adapter, all engines get whole
        weights."""
        if self.sync_mode.is_adapter:
            refusal = together(lambda: self._send_adapter(version))
            refusals = [text for text in gather_texts(refusal) if text]
            if not refusals:
                return
            self.sync_mode.fall_back(refusals[0])
            self.record(self.described())
        together(lambda: self._send_whole(weights, version))

    def _send_adapter(self, version: int) -> str:
        """Return the reason why this rank's engine refused the adapter, or an empty string."""
        assert self._connection is not None and self.adapter is not None
        config, weights = self.adapter()
        tensors = list(weights)  # where they are sharded, all ranks take part in gathering them
        if not self.group.leads:
            return ""
        try:
            self._connection.send_adapter(config, tensors, version)
        except AdapterRefused as error:
            return str(error)
        except EngineError:
            self.close()
            raise
        return ""

    def _send_whole(self, weights: Weights, version: int) -> None:
        assert self._connection is not None
        try:
            self._connection.send(weights, version, self.group.place)
        except EngineError:
            self.close()  # it has neither the old weights nor the new ones
            raise

    def _answers(self, requests: Sequence[Request]) -> list[Rollout]:
        if self.engine is None or self._connection is None:
            raise EngineError("answers were asked for before any weights were sent")
        lora_request = self._connection.lora_request
        return asked(
            self.engine, lambda: answers(self.engine, self.prompts, self.about.table, requests, lora_request)
        )

    def _compare(self, learner: Rollout, engine: Rollout) -> None:
        if told := difference(learner, engine, self.about.precision or self.about.dtype):
            raise EngineError(
                f"the engine does not have the learner's weights: to {self.probe.path}, with version "
                f"{engine.version}, {told}\n  this should not happen; please report it, {OTHERWISE}"
            )
