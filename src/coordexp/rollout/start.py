"""Start a vLLM engine in this process, and say what to do if it does not start.

Every rank has an engine in its own process. With tensor parallelism, the engines of neighbouring ranks compute the
same batches together, each on its own device: they are started, and asked, by all of these ranks at the same time.
"""

import gc
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed as dist

from coordexp.answers.table import COORD_TOKENS, VocabularyTable
from coordexp.child_processes import make_folder
from coordexp.config.rollout import VLLM, RolloutMatching
from coordexp.errors import EngineError, UserError, explain
from coordexp.rollout import OR_USE_HF
from coordexp.rollout.backend import TOLERANCE
from coordexp.rollout.guard import ENGINE_GUARD

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of max_lora_rank that vLLM accepts
IN_MEMORY = "/given-in-memory"  # stands for the folder of an adapter, which vLLM never reads
# What a user can do if an engine does not start, or fails. vLLM's own message says what is too large or too small.
TRAINING_FIX = (
    "change gpu_memory_utilization, max_model_len or tensor_parallel_size of rollout_matching.vllm, "
    "rollout_matching.decode_batch_size or model.max_pixels, or free the learner's memory while the engine "
    f"generates (rollout_matching.offload) and the engine's while the learner trains (vllm.sleep), {OR_USE_HF}"
)


@dataclass(frozen=True)
class EngineSetup:
    """The model that an engine serves, and how it serves it.

    `device` is the device of this process. `precision` is the one that the learner computes in, if it is not the
    engine's dtype. `kv_cache_bytes` replaces the share of memory in the settings. `image_size` has the limits on
    the pixels of an image (`prompt.read_image_size`), if they are known, and `has_image_limits` says that they are
    not those of the folder."""

    folder: Path
    dtype: str
    settings: RolloutMatching
    table: VocabularyTable
    device: torch.device
    precision: str = ""
    kv_cache_bytes: int | None = None
    fix: str = TRAINING_FIX
    image_size: Mapping[str, int] = field(default_factory=dict)
    has_image_limits: bool = False

    @property
    def coarsest_dtype(self) -> str:
        """The least exact of the data types that the engine and the learner compute in."""
        return max(self.dtype, self.precision or self.dtype, key=TOLERANCE.__getitem__)

    @property
    def size(self) -> int:
        """The number of devices that share one engine."""
        return self.settings.vllm.tensor_parallel_size or 1

    @property
    def replicas(self) -> int:
        """The number of engines in one rollout server, each with all weights."""
        return self.settings.vllm.data_parallel_size

    @property
    def world_size(self) -> int:
        """The number of devices of one rollout server."""
        return self.settings.vllm.devices_per_server


def start_engine(setup: EngineSetup, adapters: bool = False) -> Any:
    """Start an engine in this process, on the device of this rank. Return vLLM's `LLM`. With `adapters`, it has
    room for one LoRA adapter. All ranks call this at the same time."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks % setup.size:
        raise EngineError(
            f"rollout_matching.vllm.tensor_parallel_size: {setup.size} ranks share an engine, but this machine "
            f"has {ranks}",
            f"set it to a divisor of the number of ranks on each machine, {OR_USE_HF}",
        )
    extra = lora_arguments(setup.settings.vllm) if adapters else {}
    if setup.settings.vllm.sleep:
        if setup.device.type != "cuda":
            raise EngineError(
                f"rollout_matching.vllm.sleep: only an engine on a GPU can sleep, this one is on {setup.device}",
                "set it to false",
            )
        extra["enable_sleep_mode"] = True
    with undisturbed(), explain_start(setup.fix):
        from vllm import LLM, envs
        from vllm.distributed.parallel_state import destroy_model_parallel

        from coordexp.rollout.update import RankExecutor

        if not dist.is_initialized():  # vLLM needs a group of ranks, also for one
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        envs.disable_envs_cache()  # of an engine before
        destroy_model_parallel()  # those of another model may be others
        engine = LLM(**engine_arguments(setup), **extra, distributed_executor_backend=RankExecutor)
    engine.llm_engine.engine_core._finalizer.detach()  # it would destroy the process groups of the learner
    check_vocabulary(engine.get_tokenizer(), engine.llm_engine.model_config.get_vocab_size(), setup.table)
    return engine


def stop_engine(engine: Any) -> None:
    """Free the memory of an engine. vLLM's own way to do that would also destroy the process groups of the
    learner."""
    engine.llm_engine.model_executor.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def engine_arguments(setup: EngineSetup) -> dict[str, Any]:
    """Return the arguments that every engine gets, beside the learner or in a server."""
    settings, vllm = setup.settings, setup.settings.vllm
    images = {"images_kwargs": {"size": dict(setup.image_size)}} if setup.has_image_limits else None
    return {
        "model": str(setup.folder),
        "dtype": setup.dtype,
        "tensor_parallel_size": setup.size,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "kv_cache_memory_bytes": setup.kv_cache_bytes,
        "max_model_len": vllm.max_model_len,
        "max_num_seqs": settings.decode_batch_size * setup.size,
        "enforce_eager": vllm.enforce_eager,
        "enable_prefix_caching": True,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "mm_processor_kwargs": images,
        "use_tqdm_on_load": False,
        "seed": 0,
        "logits_processors": [ENGINE_GUARD] if settings.repeat_terminate.enabled else None,
        **vllm.engine_args.model_dump(exclude_none=True),
    }


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep what belongs to the rest of this process while vLLM starts: variables of the environment, random
    numbers, the number of threads, and the objects that the garbage collector looks at. vLLM sets these as if the
    process were its own."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # also for what is imported or logged later
    before = dict(os.environ)
    folder = make_folder()  # of sockets between ranks, which need no path when they are connected
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_FLOAT32_MATMUL_PRECISION": torch.get_float32_matmul_precision(),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    with ExitStack() as at_end:
        at_end.callback(_restore_environment, before)
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        at_end.callback(gc.unfreeze)
        at_end.enter_context(keep_random_numbers())
        at_end.enter_context(warnings.catch_warnings(action="ignore"))
        at_end.enter_context(patch.object(torch, "set_num_threads", torch.set_num_threads))
        yield


@contextmanager
def keep_random_numbers() -> Iterator[None]:
    """Leave the generators of random numbers as they are: those of Python, numpy and torch."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with ExitStack() as at_end:
        at_end.callback(random.setstate, random.getstate())
        at_end.callback(np.random.set_state, np.random.get_state())
        at_end.enter_context(torch.random.fork_rng(devices))
        yield


def _restore_environment(before: Mapping[str, str]) -> None:
    """Set the variables that have changed. Other threads may read the environment meanwhile."""
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@contextmanager
def explain_start(fix: str, log: Path | None = None) -> Iterator[None]:
    """Raise what vLLM raises as EngineError, with its cause and the fix. The processes of an engine write their
    errors to `log`."""
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        cause = first_error(log.read_text(encoding="utf-8")) if log else None
        problem = cause or first_sentence(str(error))
        raise EngineError(f"vLLM did not start: {problem}", fix) from error


def lora_arguments(vllm: VLLM) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter at a time, on the vision tower too. vLLM accepts only certain ranks:
    the next higher one is taken."""
    if not vllm.enable_lora:
        return {}
    arguments: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "enable_tower_connector_lora": True}
    if (rank := vllm.max_lora_rank) is None:
        return arguments
    if rank > LORA_RANKS[-1]:
        raise EngineError(
            f"rollout_matching.vllm.max_lora_rank: {rank}, but vLLM takes adapters up to rank {LORA_RANKS[-1]}",
            "use a lower model.adapter.rank, or set enable_lora: false, which sends whole weights",
        )
    return arguments | {"max_lora_rank": min(accepted for accepted in LORA_RANKS if accepted >= rank)}


def lora_request(id: int) -> Any:
    """Return the argument with which vLLM's `generate` uses the adapter that the workers hold under this id."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{id}", id, IN_MEMORY)


def check_guard_class() -> None:
    """Raise EngineError if vLLM's workers could not import the repeat guard by its name."""
    module, _, name = ENGINE_GUARD.partition(":")
    problem = f"rollout_matching.repeat_terminate is enabled, and {ENGINE_GUARD} cannot be loaded"
    fix = "run `coordexp doctor` to see whether the right release of vLLM is installed, or set enabled: false"
    with explain((ImportError, AttributeError), problem, fix, to=EngineError):
        getattr(import_module(module), name)


def check_vocabulary(tokenizer: Any, size: int, table: VocabularyTable) -> None:
    """Raise EngineError unless the engine's coordinate tokens are those of the learner. A model for native answers
    may have none."""
    if table.coord_start is None:
        return
    ids = list(range(table.coord_start, table.coord_start + len(COORD_TOKENS)))
    if tokenizer.convert_tokens_to_ids(list(COORD_TOKENS)) != ids or size <= ids[-1]:
        raise EngineError(
            f"the engine's vocabulary ({size} tokens) does not have the learner's coordinate tokens, "
            f"{ids[0]} to {ids[-1]}",
            "run `coordexp model add-coords` on the checkpoint, and set model.path to the folder that it writes",
        )


def first_error(log: str) -> str | None:
    """Return the first exception in a log, which caused the others, or None."""
    match = re.search(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)): (.+)$", log, re.MULTILINE)
    return match and (match[2] if match[1] in ("ValueError", "RuntimeError") else f"{match[1]}: {match[2]}")


def first_sentence(message: str) -> str:
    """Return the line of an error message that says what is wrong. pydantic's first line only counts its
    errors."""
    if match := re.search(r"Value error, (.+?)(?: \[type=|$)", message, re.MULTILINE):
        return match[1]
    return next((line.strip() for line in message.splitlines() if line.strip()), "vLLM gave no reason")
