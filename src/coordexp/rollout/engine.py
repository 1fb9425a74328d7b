"""Starts and ends a vLLM engine, and says what to do when it cannot.

The engine is a process of its own beside its owner's: a learner, or a rollout server. Signals that ask the owner
to finish do not reach it, and it ends when the owner does, however that is.
"""

import json
import os
import re
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch

from coordexp import leftovers, torchrun
from coordexp.config.rollout import VLLM
from coordexp.errors import EngineError
from coordexp.rollout.guard import ENGINE_GUARD
from coordexp.rollout.installed import OTHERWISE
from coordexp.rollout.setup import Setup
from coordexp.vocab import COORD_TOKENS, VocabularyTable

# How weights come, and what the workers of an engine import for it.
SHARED_MEMORY, CUDA_IPC = "coordexp_shared_memory", "coordexp_cuda_ipc"
ENGINE_SIDE = "coordexp.rollout.engine_side.EngineSide"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM knows for adapters
IN_MEMORY = "/given-in-memory"  # where vLLM would look for an adapter that it does not have: it always has
OWNER = "COORDEXP_ENGINE_OWNER"  # in the environment of the engine's processes: the process that they belong to


def start_engine(about: Setup, adapters: bool = False) -> Any:
    """On the device of this rank, and those of the ranks after it that it shares the engine with. With `adapters`
    it has a place for one."""
    on_cuda = about.device.type == "cuda"
    visible = _visible(_devices(about)) if on_cuda else None
    with starting(about, CUDA_IPC if on_cuda else SHARED_MEMORY, ENGINE_SIDE, visible) as arguments:
        from vllm import LLM

        if adapters:
            arguments |= lora_arguments(about.settings.vllm)
        engine = LLM(**arguments)
    engine.collective_rpc("coordexp_is_ready")
    check_vocabulary(engine.get_tokenizer(), engine.llm_engine.model_config.get_vocab_size(), about.table)
    return engine


@contextmanager
def starting(about: Setup, transfer: str, side: str, visible: str | None = None) -> Iterator[dict[str, Any]]:
    """vLLM's arguments, to start an engine with inside of this: its processes get the surroundings they need, and
    what stops them is told. `transfer` is how it gets weights, `side` what its workers import."""
    settings, vllm = about.settings, about.settings.vllm
    with _surroundings(visible), _hearing() as (logging, heard):
        try:
            yield {
                "model": str(about.folder),
                "dtype": about.dtype,
                "tensor_parallel_size": about.size,
                "gpu_memory_utilization": vllm.gpu_memory_utilization,
                "max_model_len": vllm.max_model_len,
                "max_num_seqs": settings.decode_batch_size * about.size,
                "enforce_eager": vllm.enforce_eager,
                "enable_prefix_caching": vllm.enable_prefix_caching,
                "limit_mm_per_prompt": {"image": 1, "video": 0},
                "use_tqdm_on_load": False,
                "seed": 0,
                "logits_processors": [ENGINE_GUARD] if settings.repeat_terminate.enabled else None,
                "weight_transfer_config": {"backend": transfer},
                "worker_extension_cls": side,
                "logging_config": logging,
            }
        except (RuntimeError, ValueError, OSError) as error:
            told = _cause(heard.read_text()) or _told(str(error))
            raise EngineError(f"vLLM did not start: {told}\n  {_way_out(told)}") from error


def lora_arguments(vllm: VLLM) -> dict[str, Any]:
    """vLLM's, for one adapter at a time, on the vision tower too. It knows a few ranks: the next one is taken."""
    if not vllm.enable_lora:
        return {}
    found: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "enable_tower_connector_lora": True}
    if (rank := vllm.max_lora_rank) is None:
        return found
    if rank > RANKS[-1]:
        raise EngineError(
            f"rollout_matching.vllm.max_lora_rank: {rank}, and vLLM takes adapters up to rank {RANKS[-1]}\n"
            "  use a lower model.adapter.rank, or set enable_lora: false, which sends whole weights"
        )
    return found | {"max_lora_rank": min(one for one in RANKS if one >= rank)}


def lora_request(id: int) -> Any:
    """Return what vLLM's `generate` takes to answer with the adapter that the workers have under this id."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{id}", id, IN_MEMORY)


def check_vocabulary(tokenizer: Any, size: int, table: VocabularyTable) -> None:
    """The coordinate tokens must be those of the learner."""
    ours = list(range(table.first_coord, table.first_coord + len(COORD_TOKENS)))
    if tokenizer.convert_tokens_to_ids(list(COORD_TOKENS)) != ours or size <= ours[-1]:
        raise EngineError(
            f"the engine's vocabulary ({size} tokens) does not have the learner's coordinate tokens, "
            f"{ours[0]} to {ours[-1]}\n  run `coordexp model add-coords` on the checkpoint, and set model.path to "
            "what it writes"
        )


def _devices(about: Setup) -> range:
    """By local rank."""
    first = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if first + about.size > here:
        raise EngineError(
            f"rollout_matching.vllm.tensor_parallel_size: {about.size} ranks from local rank {first} on share an "
            f"engine, and this machine has {here}\n  set it to a divisor of the ranks of each machine, {OTHERWISE}"
        )
    return range(first, first + about.size)


def _visible(devices: range) -> str:
    """Of the GPUs that the learner sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]
    return ",".join(known[k] for k in devices)


def end_with(owner: int) -> None:
    """End this process when its owner ends, however that is. vLLM's would go on, and keep their memory."""
    above = os.getppid()  # with workers, the engine is their parent
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:  # it has ended already; without its worker, so does the engine
        leftovers.remove_engine(leftovers.mapped_segments(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    engine = None if above == owner else (above, os.pidfd_open(above))
    threading.Thread(target=_wait_and_end, args=(watched, engine), daemon=True).start()


def _wait_and_end(owner: int, engine: tuple[int, int] | None) -> None:
    """Nobody else is left to remove what the engine leaves."""
    select.select([owner], [], [])
    segments = leftovers.mapped_segments(os.getpid())
    if engine is not None and not select.select([engine[1]], [], [], 0)[0]:  # its number is still its own
        segments |= leftovers.mapped_segments(engine[0])
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine[1], signal.SIGKILL)
    leftovers.remove_engine(segments)
    os.kill(os.getpid(), signal.SIGKILL)


def has_ended(core: Any) -> bool:
    """`core` is how vLLM's front speaks with an engine."""
    resources = core.resources
    if resources.engine_dead or resources.engine_manager is None:
        return True
    return not all(process.is_alive() for process in _processes(core))


def cause(told: str) -> str:
    """Without what vLLM puts around the error of a worker."""
    told = told.removeprefix("Call to collective_rpc method failed: ")
    return told.removeprefix("Worker failed with error '").removesuffix(
        "', please check the stack trace above for the root cause"
    )


def stop_engine(core: Any) -> None:
    """At once: it has nothing to save. Its workers too, which would wait for it if they were stopped."""
    import psutil

    segments: set[str] = set()
    for process in _processes(core):
        with suppress(psutil.NoSuchProcess):
            segments |= leftovers.mapped_segments(process.pid)
            for worker in psutil.Process(process.pid).children(recursive=True):
                segments |= leftovers.mapped_segments(worker.pid)
                worker.kill()
        process.kill()
    core.shutdown()
    leftovers.remove_segments(segments)


def _processes(core: Any) -> list[Any]:
    """Return the processes of the engine: one for each replica, and with several of them vLLM's coordinator, which
    counts their requests."""
    manager, coordinator = core.resources.engine_manager, core.resources.coordinator
    return [*(manager.processes if manager else ()), *([coordinator.proc] if coordinator else ())]


@contextmanager
def _hearing() -> Iterator[tuple[Any, Path]]:
    """A way of logging by which the errors of vLLM's processes come to a file too: its own exception says only
    that there was one."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import DEFAULT_LOGGING_CONFIG as usual

    with TemporaryDirectory(dir=leftovers.engine_folder()) as folder:
        config, heard = Path(folder) / "logging.json", Path(folder) / "errors"
        heard.touch()
        if os.environ.get("VLLM_LOGGING_CONFIG_PATH"):  # the user's own
            yield None, heard
            return
        level = os.environ["VLLM_LOGGING_LEVEL"]  # what was usual is from when vLLM was imported
        handlers = {
            "vllm": usual["handlers"]["vllm"] | {"level": level},
            "file": {"class": "logging.FileHandler", "filename": str(heard), "level": "ERROR"},
        }
        logger = {"handlers": list(handlers), "level": level, "propagate": False}
        config.write_text(json.dumps(usual | {"handlers": handlers, "loggers": {"vllm": logger}}))
        yield LoggingConfig(pylogging_config_file=str(config)), heard


def _cause(heard: str) -> str | None:
    """The first exception in a log, which the others followed from."""
    found = re.search(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)): (.+)$", heard, re.MULTILINE)
    return found and (found[2] if found[1] in ("ValueError", "RuntimeError") else f"{found[1]}: {found[2]}")


def _told(error: str) -> str:
    """pydantic's first line only counts, and its last names the type."""
    if found := re.search(r"Value error, (.+?)(?: \[type=|$)", error, re.MULTILINE):
        return found[1]
    return next((line.strip() for line in error.splitlines() if line.strip()), "it did not say why")


def _way_out(told: str) -> str:
    if "derived max_model_len" in told:
        return f"lower rollout_matching.vllm.max_model_len, or global_max_length, {OTHERWISE}"
    if "cache" in told.lower():  # what is left of its share after the model
        return (
            "raise rollout_matching.vllm.gpu_memory_utilization, or lower max_model_len or decode_batch_size, "
            f"{OTHERWISE}"
        )
    if "memory" in told.lower():
        return (
            "lower rollout_matching.vllm.gpu_memory_utilization, let the learner make room "
            f"(rollout_matching.offload), {OTHERWISE}"
        )
    if "divisible" in told or "parallel" in told:
        return f"set rollout_matching.vllm.tensor_parallel_size to what divides it, {OTHERWISE}"
    return (
        "what it printed above says why; if it is memory, lower rollout_matching.vllm.gpu_memory_utilization or "
        f"max_model_len; {OTHERWISE}"
    )


@contextmanager
def _surroundings(visible: str | None) -> Iterator[None]:
    """What the engine's processes inherit, for as long as they are started. `visible` are its GPUs, if not all."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    folder = str(leftovers.engine_folder())
    compiled = f"{gettempdir()}/torchinductor_{os.getuid()}"  # which is kept between runs
    theirs = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would hold on to the learner's memory
        OWNER: str(os.getpid()),
        leftovers.ENGINE_FOLDER: folder,
        "VLLM_RPC_BASE_PATH": folder,
        "TMPDIR": folder,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled),
    }
    if visible is not None:
        theirs["CUDA_VISIBLE_DEVICES"] = visible
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(torchrun.VARIABLES)]:
        del os.environ[name]
    os.environ.update(theirs)
    resource_tracker.ensure_running()  # it would unblock signals when it is started
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.environ.update(before)
        for name in theirs.keys() - before.keys():
            del os.environ[name]
