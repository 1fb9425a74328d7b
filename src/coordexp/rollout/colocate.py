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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from pydantic import TypeAdapter
from torch import distributed as dist

from coordexp.errors import EngineError
from coordexp.ranks import gather_texts, together
from coordexp.rollout import OR_USE_HF
from coordexp.rollout.backend import (
    PROBE,
    AdapterWeights,
    Decode,
    ImageRef,
    Request,
    Rollout,
    RolloutBackend,
    Weights,
    check_version,
    compare_answers,
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


class Offloaded(Protocol):
    """A learner whose memory is free for the engine."""

    def drop(self) -> None:
        """Return unused memory to the system, such as what reading the learner's weights has taken."""


class ColocateBackend:
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
        room: Callable[[], AbstractContextManager[Offloaded]],
        notify: Callable[[str], None] = ignore,
        adapter: Callable[[], AdapterWeights] | None = None,
        record: Callable[[dict[str, Any]], None] = ignore,
    ) -> None:
        self.setup, self.prompts, self.reference, self.probes = setup, prompts, reference, probes
        self.room, self.notify = room, notify
        self.adapter, self.record = adapter, record
        self.sync_mode = SyncMode(setup.settings.vllm.sync, adapter is not None, notify, OR_USE_HF)
        self.group = RankGroup.of(setup.settings.vllm.tensor_parallel_size or 1)
        self.engine: Any = None
        self.version: int | None = None
        # The version sent last. It is copied to `version` when the sync is complete, canary included.
        self._sent: int | None = None
        self._probed: int | None = None
        self._updates: EngineUpdates | None = None
        self._session: ExitStack | None = None
        self._offloaded: Offloaded | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Move the learner out of memory when the engine is first needed, and back at the end."""
        assert self._session is None, "sessions are not nested"
        with ExitStack() as self._session:
            self._session.callback(setattr, self, "_session", None)
            yield

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        self._make_room()
        return self.group.share_requests(requests, self._ask)

    @property
    def requests_per_call(self) -> int:
        return WAVES * self.setup.settings.decode_batch_size

    def sync(self, weights: Weights, version: int) -> None:
        """Send the weights in one transaction: all ranks begin it together, and end it with the new version or
        with the same error. A version that the engine has is not sent again."""
        if version == self.version:
            return
        due = self._probed is None or version - self._probed >= self.setup.settings.vllm.sync.canary_every
        assert not due or self._offloaded is None, (
            "the canary needs the learner's model, so it answers before it is offloaded"
        )
        probes = [Request(image, Decode.greedy(PROBE)) for image in self.probes]
        expected = self.reference.generate(probes) if due else []
        together(self._make_room)
        self.version = self._sent = None
        together(self._start)
        self._update(weights, version)
        self._sent = version
        self._return_memory()
        if due:
            actual = self.generate(probes)
            together(partial(self._compare, expected, actual))
            if self._probed is None:
                self.notify("the engine answers as the learner does")
            self._probed = version
        self.version = version

    def close(self) -> None:
        if self.engine is not None:
            stop_engine(self.engine)
        self.engine = self.version = self._sent = self._updates = None

    def describe(self) -> dict[str, Any]:
        return self.sync_mode.describe()

    def _make_room(self) -> None:
        if self._offloaded is None:
            assert self._session is not None, "outside a session"
            self._offloaded = self._session.enter_context(self.room())
            self._session.callback(setattr, self, "_offloaded", None)
            self._session.push(self._end_use)  # before the learner is restored
            self._return_memory()

    def _return_memory(self) -> None:
        """Return memory that the learner does not use to the system. Otherwise torch keeps it, and the engine may
        find too little when it first computes a large batch."""
        assert self._offloaded is not None
        self._offloaded.drop()
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
        self.notify(f"starting vLLM (tensor_parallel_size {self.group.size}), which takes half a minute or more")
        with remind(self.notify, "waiting for vLLM"):
            self.engine = start_engine(self.setup, adapters=self.sync_mode.is_adapter)
        self.notify(f"vLLM is ready after {time.perf_counter() - start:.0f} s")
        from coordexp.rollout.update import EngineUpdates

        self._updates = EngineUpdates(self.engine, self.setup.settings.vllm.sleep)

    def _update(self, weights: Weights, version: int) -> None:
        """Load the adapter alone, or whole weights. If any engine refuses the adapter, all engines get whole
        weights."""
        if self.sync_mode.is_adapter:
            refusal = together(partial(self._load_adapter, version))
            refusals = [text for text in gather_texts(refusal) if text]
            if not refusals:
                return
            self.sync_mode.fall_back(refusals[0])
            self.record(self.describe())
        together(partial(self._load, weights, version))

    def _load_adapter(self, version: int) -> str:
        """Return the reason why this rank's engine refused the adapter, or an empty string."""
        assert self._updates is not None and self.adapter is not None
        with self._close_on_error():
            return self._updates.load_adapter(self.adapter(), version)

    def _load(self, weights: Weights, version: int) -> None:
        assert self._updates is not None
        with self._close_on_error():
            self._updates.load(weights, version)

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """Close the engine if an update fails: its weights are not known any more."""
        with ExitStack() as on_error:
            on_error.callback(self.close)
            yield
            on_error.pop_all()

    def _ask(self, requests: Sequence[Request]) -> list[Rollout]:
        if self._updates is None or self._sent is None:
            raise EngineError("rollouts were requested before any weights were sent")
        self._updates.wake()
        lora = self._updates.lora_request
        rollouts = generate_rollouts(self.engine, self.prompts, self.setup.table, requests, lora)
        for rollout in rollouts:
            check_version(rollout, self._sent)
        return rollouts

    def _compare(self, learner: Sequence[Rollout], engine: Sequence[Rollout]) -> None:
        """Raise EngineError unless the learner and the engine gave the same answers, apart from rounding."""
        fix = f"this should not happen; please report it, {OR_USE_HF}"
        warning = compare_answers("the engine", learner, engine, self.setup.coarsest_dtype, fix)
        if warning:
            self.notify(warning)


@dataclass(frozen=True)
class RankGroup:
    """The neighbouring ranks that share one engine, seen from `rank`."""

    rank: int
    size: int

    @classmethod
    def of(cls, size: int) -> "RankGroup":
        return cls(dist.get_rank() if dist.is_initialized() else 0, size)

    @property
    def place(self) -> int:
        return self.rank % self.size

    def share_requests(
        self, requests: Sequence[Request], ask: Callable[[Sequence[Request]], list[Rollout]]
    ) -> list[Rollout]:
        """Return the rollouts of this rank's requests. All ranks call it. Every rank of a group calls `ask` with
        the requests of the whole group, so that all of them compute the same batches."""
        if self.size == 1:
            return ask(requests)
        first = self.rank - self.place
        together(ignore)  # wait for all ranks
        texts = gather_texts(json.dumps(REQUESTS.dump_python(list(requests))))
        by_rank = [REQUESTS.validate_python(json.loads(text)) for text in texts]
        of_group = by_rank[first : first + self.size]
        rollouts: list[Rollout] = together(partial(ask, [request for part in of_group for request in part]))
        start = sum(map(len, of_group[: self.place]))
        return rollouts[start : start + len(requests)]
