"""The learner's client of its colocated engine. It makes every sync, of whole weights or of an adapter, one
transaction with a deadline."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from coordexp.engine import OR_USE_HF
from coordexp.engine.start import TRAINING_FIXES, cause, has_ended, lora_request
from coordexp.engine.weights import (
    ALIGNMENT,
    BUCKET_BYTES,
    AdapterRefused,
    Bucket,
    MemoryFile,
    buckets,
    find_non_finite,
    non_finite_error,
)
from coordexp.errors import EngineError
from coordexp.rollout.backend import AdapterConfig, Weights
from coordexp.tasks import Task, ignore

if TYPE_CHECKING:
    from coordexp.engine.sleep import EngineMemory

T = TypeVar("T")
REPORT = f"this should not happen; please report it, {OR_USE_HF}"


class EngineConnection:
    """Sends weights to the engine, which `memory` wakes up for it. No call of a sync waits past its deadline.

    After the first failure, `start_weight_update`, `update_weights` and `finish_weight_update` do nothing, and
    `send` raises the failure at the end: the pass over the weights must go on, because other ranks take part in
    gathering them. On GPUs, vLLM's own sender calls these methods."""

    def __init__(self, engine: Any, device: torch.device, timeout: float, memory: "EngineMemory") -> None:
        self.engine, self.device, self.timeout, self.memory = engine, device, timeout, memory
        self._deadline = 0.0
        self._version = ""
        self._failure: EngineError | None = None
        self._sender: Any = None  # of vLLM, on GPUs
        self._files: list[MemoryFile] = []  # on a CPU: while the engine reads one, the other is filled
        self._adapters = 0  # adapters sent so far; also the id of the latest
        self._is_whole = False  # whole weights were sent
        self.lora_request: Any = None  # selects the adapter that answers are made with

    def send(self, weights: Weights, version: int, place: int) -> None:
        """Send whole weights. All ranks of the group call it; the one with `place` 0 talks to the engine."""
        self._begin(version)
        self._is_whole = True
        checked = partial(self._check_while_passing, weights)
        if self.device.type == "cuda":
            self._send_on_gpu(checked, place)
        else:
            self._send_in_memory(buckets(checked(), BUCKET_BYTES), place)
        if self._failure is not None:
            raise self._failure
        if place == 0:
            self._commit()

    def _send_on_gpu(self, weights: Weights, place: int) -> None:
        from coordexp.engine.cuda_ipc import LearnerWeights, connect

        source = LearnerWeights(weights)
        if self._sender is None:
            self._sender = connect(place, self, source)
        self._sender.source = source
        self._sender.send_weights()

    def _send_in_memory(self, parts: Iterator[Bucket], place: int) -> None:
        """Send the buckets through memory that the engine maps too. While it loads one, the next is filled."""
        if place != 0:
            deque(parts, maxlen=0)  # all ranks take part in gathering the weights
            return
        if not self._files:
            self._files = [MemoryFile.new(BUCKET_BYTES) for _ in range(2)]
            self.init_weight_transfer_engine({})
        self.start_weight_update()
        loading = Task(ignore)
        try:
            for number, bucket in enumerate(parts):
                file = self._files[number % 2]
                contents = {"metadatas": file.write(bucket), "file": file.address}
                loading.result()
                loading = Task(self.update_weights, contents)
        finally:
            loading.done.wait()  # the engine may still read, also if a weight could not be gathered
        loading.result()
        self.finish_weight_update()

    def send_adapter(self, config: AdapterConfig, tensors: Bucket, version: int) -> None:
        """Send an adapter for the weights that the engine was started with. Call it on the rank that talks to the
        engine. Raise AdapterRefused if the engine cannot use the adapter: whole weights can still be sent."""
        assert not self._is_whole, "whole weights were sent: an adapter belongs to the weights of the start"
        self._begin(version)
        if (name := find_non_finite(tensors)) is not None:
            raise non_finite_error(name)
        self._call(self.memory.wake)
        self._adapters += 1
        file = MemoryFile.new(ALIGNMENT)
        metadatas = file.write(tensors)
        self._ask_workers("coordexp_read_adapter", file.address, metadatas)
        self._ask_workers("coordexp_build_adapter", config, self._adapters)
        self.lora_request = None
        self._ask_workers("coordexp_use_adapter")
        self._commit()
        self.lora_request = lora_request(self._adapters)

    def _check_while_passing(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights. A weight that is not finite fails the update before its bucket is sent."""
        for name, weight in weights():
            if self._failure is None and find_non_finite([(name, weight)]) is not None:
                self._failure = non_finite_error(name)
            yield name, weight

    def _begin(self, version: int) -> None:
        assert self.engine is None or not self.engine.llm_engine.has_unfinished_requests(), (
            "weights are sent while the engine generates"
        )
        self._deadline, self._version, self._failure = time.monotonic() + self.timeout, str(version), None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call_unless_failed(self.engine.init_weight_transfer_engine, {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call_unless_failed(self.memory.wake_for_weights)
        if self._adapters:  # the adapter belongs to the weights that are replaced now
            self.lora_request = None
            self._call_unless_failed(self.engine.collective_rpc, "coordexp_remove_adapter")
        self._call_unless_failed(self.engine.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._call_unless_failed(self.engine.update_weights, {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_unless_failed(self.engine.finish_weight_update)

    def _call_unless_failed(self, method: Callable[..., Any], *arguments: Any) -> None:
        if self._failure is None:
            try:
                self._call(method, *arguments)
            except EngineError as error:
                self._failure = error

    def _ask_workers(self, method: str, *arguments: Any) -> None:
        """Call a method about adapters in every worker. Workers return their errors instead of raising them: vLLM
        would leave the answers of the other workers in their queues."""
        errors = self._call(partial(self.engine.collective_rpc, "coordexp_try", args=(method, *arguments)))
        for problem, _ in filter(None, errors):
            raise AdapterRefused(f"the engine cannot use the adapter: {problem.splitlines()[0]}")

    def _commit(self) -> None:
        """Drop everything that was computed with the old weights, then set the new version. vLLM's own calls only
        forget what the blocks of the KV cache contain, and leave the values in them."""
        core = self.engine.llm_engine
        self._call(self.memory.wake)
        self._call(self.engine.collective_rpc, "coordexp_clear_kv_cache")
        if not self._call(core.reset_prefix_cache):
            raise EngineError("vLLM could not clear its prefix cache, which the old weights computed", REPORT)
        self._call(core.reset_mm_cache)
        self._call(core.reset_encoder_cache)
        self._call(core.set_weight_version, self._version)
        if (version := self._call(core.get_weight_version)) != self._version:
            raise EngineError(
                f"weights of version {self._version} were sent, and the engine reports version {version}", REPORT
            )

    def _call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the engine. Raise EngineError if it fails or exceeds the deadline."""
        try:
            return ask_engine(self.engine, partial(method, *arguments), self._deadline)
        except TimeoutError:
            raise EngineError(
                f"sending weights to vLLM took longer than {self.timeout:g} s",
                "if the model is large, raise rollout_matching.vllm.sync.timeout_s; else look at the memory and "
                f"load of this machine; {OR_USE_HF}",
            ) from None
        except EngineError:
            raise
        except Exception as error:
            # vLLM passes on the text of a worker's error. That of a UserError has its fix in an indented line.
            problem, _, fix = cause(str(error)).partition("\n  ")
            raise EngineError(f"sending weights to vLLM failed: {problem}", fix or REPORT) from error


def ask_engine(
    engine: Any, work: Callable[[], T], deadline: float = math.inf, fix: str = TRAINING_FIXES.ended
) -> T:
    """Return the result of `work`, which calls the engine. Raise EngineError if the engine ends meanwhile, and
    TimeoutError at the deadline. vLLM by itself would wait forever for an engine that hangs or has ended."""
    core = engine.llm_engine.engine_core

    def check_running() -> None:
        if has_ended(core):
            raise EngineError("the vLLM engine has ended", fix) from None

    try:
        return Task(work).result(deadline=deadline, check=check_running)
    except Exception:
        check_running()  # what vLLM raises when its engine has ended is seldom to the point
        raise
