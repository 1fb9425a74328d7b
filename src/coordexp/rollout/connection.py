"""The learner's connection to its engine, over which whole weights or adapters are sent: one transaction, with a
deadline (D23)."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from coordexp.errors import EngineError
from coordexp.rollout.adapter_fallback import AdapterRefused
from coordexp.rollout.backend import AdapterConfig, Weights
from coordexp.rollout.buckets import non_finite, not_sent
from coordexp.rollout.engine import cause, has_ended, lora_request
from coordexp.rollout.installed import OTHERWISE
from coordexp.rollout.memory_file import ALIGNMENT, MemoryFile, write_tensors

T = TypeVar("T")


class Connection:
    """The learner's end of the weight transfer, in which no call takes longer than a deadline allows."""

    def __init__(self, engine: Any, device: torch.device, timeout: float) -> None:
        self.engine, self.device, self.timeout = engine, device, timeout
        self._until = 0.0
        self._version = ""
        self._failed: EngineError | None = None
        self._sender: Any = None
        self._adapters = 0  # adapters sent so far; also the id of the latest
        self.lora_request: Any = None  # of the adapter that answers are made with

    def send(self, weights: Weights, version: int, place: int) -> None:
        """On every rank; `place` 0 speaks with the engine."""
        from coordexp.rollout.transfer import LearnerWeights, connect

        self._begin(version)
        source = LearnerWeights(lambda: self._checked(weights()))
        if self._sender is None:
            self._sender = connect(self.device, place, self, source)
        self._sender.source = source
        self._sender.send_weights()
        if self._failed is not None:
            raise self._failed
        if place == 0:
            self._commit()

    def send_adapter(self, config: AdapterConfig, tensors: Sequence[tuple[str, Tensor]], version: int) -> None:
        """Send an adapter for the weights that the engine was started with. Call it on the rank that speaks with
        the engine. Raise AdapterRefused if the engine cannot use the adapter: whole weights can still be sent."""
        assert self._sender is None, "whole weights were sent: an adapter belongs to those of the start"
        self._begin(version)
        if (name := non_finite(tensors)) is not None:
            raise not_sent(name)
        self._adapters += 1
        file = MemoryFile.new(ALIGNMENT)
        self._ask_workers("coordexp_read_adapter", write_tensors(file, tensors))
        self._ask_workers("coordexp_build_adapter", config, self._adapters)
        self.lora_request = None
        self._ask_workers("coordexp_use_adapter")
        self._commit()
        self.lora_request = lora_request(self._adapters)

    def _checked(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the weights on. A weight that is not finite fails the update before its bucket is sent."""
        for name, weight in weights:
            if self._failed is None and non_finite([(name, weight)]) is not None:
                self._failed = not_sent(name)
            yield name, weight

    def _begin(self, version: int) -> None:
        assert self.engine is None or not self.engine.llm_engine.has_unfinished_requests(), (
            "weights come between answers"
        )
        self._until, self._version, self._failed = time.monotonic() + self.timeout, str(version), None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._unless_failed(lambda: self.engine.init_weight_transfer_engine({"init_info": init_info}))

    def start_weight_update(self) -> None:
        if self._adapters:  # an adapter belongs to the weights before
            self.lora_request = None
            self._unless_failed(lambda: self.engine.collective_rpc("coordexp_remove_adapter"))
        self._unless_failed(self.engine.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._unless_failed(lambda: self.engine.update_weights({"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._unless_failed(self.engine.finish_weight_update)

    def _unless_failed(self, work: Callable[[], Any]) -> None:
        """After a failure the pass over the weights goes on without the engine: other ranks may take part in
        gathering them."""
        if self._failed is None:
            try:
                self._call(work)
            except EngineError as error:
                self._failed = error

    def _ask_workers(self, method: str, *arguments: Any) -> None:
        """Call a method about adapters in every worker. What goes wrong there is returned, not raised: vLLM would
        leave the answers of the other workers in their queues."""
        refusals = self._call(lambda: self.engine.collective_rpc("coordexp_try", args=(method, *arguments)))
        for refusal in refusals:
            if refusal is not None:
                raise AdapterRefused(f"the engine cannot use the adapter: {refusal.splitlines()[0]}")

    def _commit(self) -> None:
        """What was computed with the old weights is forgotten before the new version is given out. vLLM's own
        calls forget what the blocks of the KV cache hold, and leave it in them."""
        core = self.engine.llm_engine
        self._call(lambda: self.engine.collective_rpc("coordexp_clear_kv_cache"))
        if not self._call(core.reset_prefix_cache):
            raise EngineError("vLLM could not forget the prompts that it computed with the old weights")
        self._call(core.reset_mm_cache)
        self._call(core.reset_encoder_cache)
        self._call(lambda: core.set_weight_version(self._version))
        if (found := self._call(core.get_weight_version)) != self._version:
            raise EngineError(f"weights of version {self._version} were sent, and the engine says it has {found}")

    def _call(self, work: Callable[[], T]) -> T:
        try:
            return asked(self.engine, work, self._until)
        except TimeoutError:
            raise EngineError(
                f"sending weights to vLLM took longer than {self.timeout:g} s\n"
                "  if the model is large, raise rollout_matching.vllm.sync.timeout_s; else look at the memory and "
                f"load of this machine; {OTHERWISE}"
            ) from None
        except EngineError:
            raise
        except Exception as error:
            problem, _, fix = cause(str(error)).partition("\n  ")
            raise EngineError(
                f"sending weights to vLLM failed: {problem}\n"
                f"  {fix or f'this should not happen; please report it, {OTHERWISE}'}"
            ) from error


def asked(engine: Any, work: Callable[[], T], until: float = math.inf) -> T:
    """What `work` gives, which asks the engine. vLLM by itself waits without an end for an engine that does not
    answer, even for one that has ended."""
    found: list[T] = []
    failed: list[Exception] = []
    done = Event()

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that waits for it
            failed.append(error)
        done.set()

    Thread(target=run, daemon=True).start()
    while not done.wait(max(0.0, min(0.2, until - time.monotonic()))):
        if has_ended(engine.llm_engine.engine_core):
            break
        if time.monotonic() >= until:
            raise TimeoutError
    if found:
        return found[0]
    if failed and not has_ended(engine.llm_engine.engine_core):
        raise failed[0]
    raise EngineError(
        "the vLLM engine has ended\n  what it printed above may say why; if there is nothing, the system may have "
        "killed it for its memory: lower rollout_matching.vllm.gpu_memory_utilization, "
        f"{OTHERWISE}; --resume goes on from the last checkpoint, if there is one"
    ) from None
