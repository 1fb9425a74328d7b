"""The parts of an engine in this process that need vLLM: its executor, its memory, and updates of its weights.

Each update is one transaction: the weights are loaded, everything that was computed with the old ones is dropped,
and only then do answers carry the new version.

vLLM can sleep in two ways. At level 1 the weights are copied to host memory, and at level 2 they are dropped.
Level 2 would be enough for a run that sends all weights at every step, but it also drops tensors that no sync
sends: vLLM's Qwen3-VL adds `deepstack_input_embeds` to the hidden states of every token, expects zeros there where
no image is, and keeps them in plain tensors beside the weights, which a wake-up from level 2 does not restore. So
the engine sleeps at level 1. It then has its weights after every wake-up, with or without a sync. This was never
run on a GPU; on a CPU, vLLM accepts the calls, and frees nothing.
"""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import distributed as dist
from vllm.config import set_current_vllm_config
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from coordexp.errors import EngineError, UserError
from coordexp.ranks import max_over_ranks, together
from coordexp.rollout import OR_USE_HF
from coordexp.rollout.backend import AdapterWeights, Weights
from coordexp.rollout.load import build_adapter, clear_kv_caches, load_all, replace_adapter
from coordexp.rollout.start import lora_request
from coordexp.tasks import ignore

LEVEL = 1  # of vLLM's sleep
REPORT = f"this should not happen; please report it, {OR_USE_HF}"


class RankExecutor(UniProcExecutor):
    """Runs the one worker of an engine, which is this process. vLLM takes the learner's ranks for its own, as with
    its executor `external_launcher`. That one would wait for ever for a rank whose engine does not start; here the
    others learn of it."""

    def _init_executor(self) -> None:
        # On a CPU, vLLM would bind the memory of this process to one node of the machine.
        with patch.object(torch.ops._C, "init_cpu_memory_env", ignore, create=True):
            super()._init_executor()
        together(ignore)  # all ranks have mapped the memory that they share on a CPU, so its names can be removed
        for file in Path("/dev/shm").glob(f"{self._name}-*-cpushm_*"):  # noqa: S108
            file.unlink(missing_ok=True)

    def _distributed_args(self) -> tuple[str, int, int]:
        # No connection is made: the ranks are connected.
        return f"tcp://localhost:{self._name}", dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def _name(self) -> str:
        """Return the text that takes the place of a port in the address, the same on all ranks of a machine. vLLM
        names shared memory after it."""
        return os.environ.get("MASTER_PORT", str(os.getpid()))

    def determine_available_memory(self) -> list[int]:
        """Return the memory for the KV cache: the least of all ranks, since those of one engine need the same."""
        (memory,) = together(super().determine_available_memory)
        return [-max_over_ranks(-memory)]


class EngineUpdates:
    """Updates the weights of `engine`. Its memory is free between its uses, if `sleeps` says so: that of the
    weights comes back first, and that of the KV cache only when the new weights have arrived, because a sync needs
    memory of its own."""

    def __init__(self, engine: Any, sleeps: bool) -> None:
        self.engine, self._sleeps = engine, sleeps
        self.state: Literal["awake", "only weights", "asleep"] = "awake"
        self._adapters = 0  # adapters so far; also the id of the latest
        self._is_whole = False  # whole weights were loaded
        self.lora_request: Any = None  # selects the adapter that answers are made with

    @property
    def runner(self) -> Any:
        """The model runner of vLLM on this rank."""
        return self.engine.llm_engine.model_executor.driver_worker.worker.model_runner

    def wake_for_weights(self) -> None:
        """Return once the engine can load weights."""
        if self.state == "asleep":
            self.engine.wake_up(["weights"])
            self.state = "only weights"

    def wake(self) -> None:
        """Return once the engine can generate. The KV cache is new memory with unknown contents, which could be
        NaN."""
        self.wake_for_weights()
        if self.state == "only weights":
            self.engine.wake_up(["kv_cache"])
            clear_kv_caches(self.runner.kv_caches)
            self.state = "awake"

    def sleep(self) -> None:
        """Free the engine's memory, if the settings say so. No request may be running."""
        if not self._sleeps or self.state == "asleep":
            return
        self.wake()  # vLLM does not put a half-awake engine to sleep
        self.engine.sleep(level=LEVEL)
        self.state = "asleep"

    def load(self, weights: Weights, version: int) -> None:
        """Load whole weights. If they are sharded over ranks, all of these must call it. After an error the engine
        has neither the old weights nor the new ones."""
        self._check_idle()
        passing = weights()
        try:
            self._load(passing)
        except UserError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not load the weights: {error}", REPORT) from error
        finally:
            deque(passing, maxlen=0)  # after an error: other ranks take part in gathering the rest
        self._commit(version)

    def _load(self, weights: Any) -> None:
        self.wake_for_weights()
        self._is_whole = True
        if self._adapters:  # the adapter belongs to the weights that are replaced now
            self.lora_request = None
            self.runner.lora_manager.remove_all_adapters()
        with set_current_vllm_config(self.engine.llm_engine.vllm_config):
            load_all(self.runner, weights)

    def load_adapter(self, adapter: Callable[[], AdapterWeights], version: int) -> str:
        """Load an adapter for the weights that the engine was started with. Return the reason if the engine
        cannot use it, or an empty string: whole weights can still be loaded."""
        assert not self._is_whole, "whole weights were loaded: an adapter belongs to the weights of the start"
        self._check_idle()
        self.wake()
        config, weights = adapter()
        tensors = {name: weight.to("cpu", copy=True) for name, weight in weights}
        self._adapters += 1
        try:
            built = build_adapter(self.runner.lora_manager, tensors, config, self._adapters)
        except UserError:  # it is not finite
            raise
        except Exception as error:  # noqa: BLE001 - whatever vLLM cannot load, whole weights are sent instead
            problem = (str(error) or type(error).__name__).splitlines()[0]
            return f"the engine cannot use the adapter: {problem}"
        replace_adapter(self.runner.lora_manager, built)
        self._commit(version)
        self.lora_request = lora_request(self._adapters)
        return ""

    def _check_idle(self) -> None:
        assert not self.engine.llm_engine.has_unfinished_requests(), "weights change while the engine generates"

    def _commit(self, version: int) -> None:
        """Drop everything that was computed with the old weights, then set the new version. vLLM's own calls only
        forget what the blocks of the KV cache contain, and leave the values in them."""
        core = self.engine.llm_engine
        self.wake()
        clear_kv_caches(self.runner.kv_caches)
        if not core.reset_prefix_cache():
            raise EngineError("vLLM could not clear its prefix cache, which the old weights computed", REPORT)
        core.reset_mm_cache()
        core.reset_encoder_cache()
        core.set_weight_version(str(version))
