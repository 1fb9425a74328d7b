"""Updates of the weights of an engine in this process. Each is one transaction: the weights are loaded, everything
that was computed with the old ones is dropped, and only then do answers carry the new version."""

from collections import deque
from typing import Any

from vllm.config import set_current_vllm_config

from coordexp.errors import EngineError, UserError
from coordexp.rollout import OR_USE_HF
from coordexp.rollout.backend import AdapterWeights, Weights
from coordexp.rollout.load import ModelReload, build_adapter, clear_kv_caches, replace_adapter
from coordexp.rollout.sleep import EngineMemory
from coordexp.rollout.start import lora_request

REPORT = f"this should not happen; please report it, {OR_USE_HF}"


class EngineUpdates:
    """Updates the weights of `engine`, whose memory sleeps between its uses, if `sleeps` says so."""

    def __init__(self, engine: Any, sleeps: bool) -> None:
        self.engine = engine
        self.memory = EngineMemory(engine, sleeps, self._clear_kv_cache)
        self._adapters = 0  # adapters so far; also the id of the latest
        self._is_whole = False  # whole weights were loaded
        self.lora_request: Any = None  # selects the adapter that answers are made with

    @property
    def runner(self) -> Any:
        """The model runner of vLLM on this rank."""
        return self.engine.llm_engine.model_executor.driver_worker.worker.model_runner

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
        self.memory.wake_for_weights()
        self._is_whole = True
        if self._adapters:  # the adapter belongs to the weights that are replaced now
            self.lora_request = None
            self.runner.lora_manager.remove_all_adapters()
        with set_current_vllm_config(self.engine.llm_engine.vllm_config):
            ModelReload(self.runner).load(weights)

    def load_adapter(self, adapter: AdapterWeights, version: int) -> str:
        """Load an adapter for the weights that the engine was started with. Return the reason if the engine
        cannot use it, or an empty string: whole weights can still be loaded."""
        assert not self._is_whole, "whole weights were loaded: an adapter belongs to the weights of the start"
        self._check_idle()
        self.memory.wake()
        config, weights = adapter
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
        self.memory.wake()
        self._clear_kv_cache()
        if not core.reset_prefix_cache():
            raise EngineError("vLLM could not clear its prefix cache, which the old weights computed", REPORT)
        core.reset_mm_cache()
        core.reset_encoder_cache()
        core.set_weight_version(str(version))

    def _clear_kv_cache(self) -> None:
        clear_kv_caches(self.runner.kv_caches)
