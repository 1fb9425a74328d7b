"""Rollouts from a vLLM engine that shares the learner's devices and gets its weights in memory.

The engine runs in the process of its rank. With tensor parallelism, `tensor_parallel_size` neighbouring ranks
share one: each of them computes its part of the answers to all their requests. An engine is started when it is
first needed, after the learner has been offloaded, if the settings say so. At the end of a session, before the
learner gets its memory back, the engine falls asleep, if the settings say so.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter

from coordexp.errors import EngineError
from coordexp.ranks import find_rank, gather_texts, together
from coordexp.rollout import OR_USE_HF
from coordexp.rollout.backend import (
    AdapterWeights,
    Canary,
    ImageRef,
    Request,
    Rollout,
    RolloutBackend,
    Weights,
    check_version,
)
from coordexp.rollout.generate import generate_rollouts
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.start import EngineSetup, start_engine, stop_engine
from coordexp.rollout.weights import SyncMode
from coordexp.tasks import ignore, remind

if TYPE_CHECKING:
    from coordexp.rollout.update import EngineUpdates

REQUESTS = TypeAdapter(list[Request])
WAVES = 8  # full batches per call: the engine refills its batch as answers end, so only the end of a call is slow


class ColocateBackend(RolloutBackend):
    """Generates with an engine in this process.

    `reference` answers with the learner's own model. It and the engine answer the images `probes`, to verify that
    the engine has the same weights. `room()` returns a context in which the learner is offloaded, if the settings
    say so, but readable. `notify` gets messages about steps that take long. `adapter` returns the learner's
    adapter, if it contains everything that is trained; the engine is then started with room for one. `record` gets
    the facts of the run's manifest when they change."""

    def __init__(
        self,
        setup: EngineSetup,
        prompts: PromptBuilder,
        reference: RolloutBackend,
        probes: Sequence[ImageRef],
        room: Callable[[], AbstractContextManager[None]],
        notify: Callable[[str], None] = ignore,
        adapter: Callable[[], AdapterWeights] | None = None,
        record: Callable[[dict[str, Any]], None] = ignore,
    ) -> None:
        self.setup, self.prompts = setup, prompts
        self.room, self.notify = room, notify
        self.adapter, self.record = adapter, record
        sync = setup.settings.vllm.sync
        self.sync_mode = SyncMode(sync, adapter is not None, notify, OR_USE_HF)
        self.canary = Canary(reference, probes, sync.canary_every, setup.coarsest_dtype, notify)
        self.engine: Any = None
        self.version: int | None = None  # of the engine's weights
        self._updates: EngineUpdates | None = None
        self._session: ExitStack | None = None
        self._has_room = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Move the learner out of memory when the engine is first needed, and back at the end."""
        assert self._session is None, "sessions are not nested"
        with ExitStack() as self._session:
            self._session.callback(setattr, self, "_session", None)
            yield

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        self._make_room()
        return share_requests(requests, find_rank()[0], self.setup.size, self._ask)

    @property
    def requests_per_call(self) -> int:
        return WAVES * self.setup.settings.decode_batch_size

    def sync(self, weights: Weights, version: int) -> None:
        """Send the weights in one transaction: all ranks begin it together, and end it with the new version or
        with the same error. A version that the engine has is not sent again."""
        if version == self.version:
            return
        due = self.canary.is_due(version)
        assert not due or not self._has_room, (
            "the canary needs the learner's model, so it answers before it is offloaded"
        )
        expected = self.canary.expected_answers() if due else []
        together(self._make_room)
        self.version = None
        together(self._start)
        with ExitStack() as on_error:
            on_error.callback(self.close)  # the weights of the engine are not known any more
            self._update(weights, version)
            on_error.pop_all()
        self.version = version
        self._return_memory()
        if due:
            actual = self.generate(self.canary.requests)
            together(partial(self.canary.compare, "the engine", expected, actual, OR_USE_HF))
            if self.canary.pass_at(version):
                self.notify("the engine answers as the learner does")

    def close(self) -> None:
        if self.engine is not None:
            stop_engine(self.engine)
        self.engine = self.version = self._updates = None

    def describe(self) -> dict[str, Any]:
        return self.sync_mode.describe()

    def _make_room(self) -> None:
        if not self._has_room:
            assert self._session is not None, "outside a session"
            self._session.enter_context(self.room())
            self._has_room = True
            self._session.callback(setattr, self, "_has_room", False)
            self._session.push(self._end_use)  # before the learner is restored
            self._return_memory()

    def _return_memory(self) -> None:
        """Return memory that the learner does not use to the system. Otherwise torch keeps it, and the engine may
        find too little when it first computes a large batch."""
        if self.setup.device.type == "cuda":
            torch.cuda.empty_cache()

    def _end_use(self, kind: type[BaseException] | None, *_: object) -> None:
        """Put the engine to sleep at the end of a session. After an error it stays as it is: it may be broken."""
        if kind is None and self._updates is not None:
            self._updates.sleep()

    def _start(self) -> None:
        if self._updates is not None:
            return
        start = time.perf_counter()
        self.notify(f"starting vLLM (tensor_parallel_size {self.setup.size}), which takes half a minute or more")
        with remind(self.notify, "waiting for vLLM"):
            self.engine = start_engine(self.setup, adapters=self.sync_mode.is_adapter)
        self.notify(f"vLLM is ready after {time.perf_counter() - start:.0f} s")
        from coordexp.rollout.update import EngineUpdates

        self._updates = EngineUpdates(self.engine, self.setup.settings.vllm.sleep)

    def _update(self, weights: Weights, version: int) -> None:
        """Load the adapter alone, or whole weights. If any engine refuses the adapter, all engines get whole
        weights."""
        assert self._updates is not None
        if self.sync_mode.is_adapter:
            assert self.adapter is not None
            refusal = together(partial(self._updates.load_adapter, self.adapter, version))
            refusals = [text for text in gather_texts(refusal) if text]
            if not refusals:
                return
            self.sync_mode.fall_back(refusals[0])
            self.record(self.describe())
        together(partial(self._updates.load, weights, version))

    def _ask(self, requests: Sequence[Request]) -> list[Rollout]:
        if self._updates is None or self.version is None:
            raise EngineError("rollouts were requested before any weights were sent")
        self._updates.wake()
        lora = self._updates.lora_request
        rollouts = generate_rollouts(self.engine, self.prompts, self.setup.table, requests, lora)
        for rollout in rollouts:
            check_version(rollout, self.version)
        return rollouts


def share_requests(
    requests: Sequence[Request], rank: int, size: int, ask: Callable[[Sequence[Request]], list[Rollout]]
) -> list[Rollout]:
    """Return the rollouts of the requests of this rank. All ranks call it. Each `size` neighbouring ranks share an
    engine: every one of them calls `ask` with the requests of all, so that they compute the same batches."""
    if size == 1:
        return ask(requests)
    first = rank - rank % size
    together(ignore)  # wait for all ranks
    texts = gather_texts(json.dumps(REQUESTS.dump_python(list(requests))))
    by_rank = [REQUESTS.validate_python(json.loads(text)) for text in texts[first : first + size]]
    rollouts: list[Rollout] = together(partial(ask, [request for part in by_rank for request in part]))
    start = sum(map(len, by_rank[: rank - first]))
    return rollouts[start : start + len(requests)]
