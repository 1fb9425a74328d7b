"""Start and stop vLLM engines, and say what to do if one does not start.

An engine runs in processes of its own, beside its owner: a learner, a rollout server, or a command. Signals that
ask the owner to finish do not reach the engine, and it ends when the owner ends, however that happens.
"""

import json
import os
import re
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from multiprocessing import parent_process, resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NoReturn
from unittest.mock import patch

import psutil
import torch

from coordexp import child_processes
from coordexp.config.rollout import VLLM, RolloutMatching
from coordexp.engine import OR_USE_HF
from coordexp.errors import EngineError, UserError, explain
from coordexp.logs import capture_children
from coordexp.rollout.backend import TOLERANCE
from coordexp.rollout.guard import ENGINE_GUARD
from coordexp.vocab import COORD_TOKENS, VocabularyTable

# The two ways in which a colocated engine gets weights, and the class that its workers import for it.
SHARED_MEMORY, CUDA_IPC = "coordexp_shared_memory", "coordexp_cuda_ipc"
ENGINE_SIDE = "coordexp.engine.receive.EngineSide"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of max_lora_rank that vLLM accepts
IN_MEMORY = "/given-in-memory"  # stands for the folder of an adapter, which vLLM never reads
OWNER = "COORDEXP_ENGINE_OWNER"  # in the environment of the engine's processes: the pid of their owner


@dataclass(frozen=True)
class EngineFixes:
    """Advice for the user if an engine does not start, for each kind of problem, or if it ends."""

    length: str
    cache: str
    memory: str
    parallel: str
    unknown: str
    ended: str

    def choose(self, problem: str) -> str:
        """Return the fix for a failed start, chosen by the words of vLLM's message."""
        if "derived max_model_len" in problem:
            return self.length
        if "cache" in problem.lower():  # too little of the engine's share is left after the model
            return self.cache
        if "memory" in problem.lower():
            return self.memory
        if "divisible" in problem or "parallel" in problem:
            return self.parallel
        return self.unknown


TRAINING_FIXES = EngineFixes(
    length=f"lower rollout_matching.vllm.max_model_len, or global_max_length, {OR_USE_HF}",
    cache="raise rollout_matching.vllm.gpu_memory_utilization, or lower max_model_len or decode_batch_size, "
    f"{OR_USE_HF}",
    memory="lower rollout_matching.vllm.gpu_memory_utilization, move the learner out of memory while the engine "
    "generates (rollout_matching.offload), free the engine's memory while the learner trains "
    f"(rollout_matching.vllm.sleep: true), or limit the size of images (model.max_pixels), {OR_USE_HF}",
    parallel=f"set rollout_matching.vllm.tensor_parallel_size to a divisor of it, {OR_USE_HF}",
    unknown="vLLM's output above says why; if it is memory, lower rollout_matching.vllm.gpu_memory_utilization or "
    f"max_model_len; {OR_USE_HF}",
    ended="vLLM's output above may say why; if there is none, the system may have killed the engine for its "
    f"memory: lower rollout_matching.vllm.gpu_memory_utilization, {OR_USE_HF}; --resume continues from the last "
    "checkpoint, if there is one",
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
    fixes: EngineFixes = TRAINING_FIXES
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
    """Start an engine on the device of this rank and the devices of the following ranks that share it. Return
    vLLM's `LLM`. With `adapters`, the engine has room for one LoRA adapter."""
    on_cuda = setup.device.type == "cuda"
    visible = _visible_gpus(_device_indices(setup)) if on_cuda else None
    extra = lora_arguments(setup.settings.vllm) if adapters else {}
    if setup.settings.vllm.sleep:
        if not on_cuda:
            raise EngineError(
                f"rollout_matching.vllm.sleep: only an engine on a GPU can sleep, this one is on {setup.device}",
                "set it to false",
            )
        extra["enable_sleep_mode"] = True
    with starting(setup, CUDA_IPC if on_cuda else SHARED_MEMORY, ENGINE_SIDE, visible) as arguments:
        from vllm import LLM

        engine = LLM(**(arguments | extra))
    engine.collective_rpc("coordexp_is_ready")
    check_vocabulary(engine.get_tokenizer(), engine.llm_engine.model_config.get_vocab_size(), setup.table)
    return engine


@contextmanager
def starting(setup: EngineSetup, transfer: str, side: str, visible: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield vLLM's arguments. An engine that is started with them inside this context gets the environment that it
    needs, and an error of its processes is raised as EngineError, with its cause and a fix.

    `transfer` names the way in which the engine gets weights, and `side` the class that its workers import. The
    GPUs of the engine are `visible`; None stands for all."""
    settings, vllm = setup.settings, setup.settings.vllm
    images = {"images_kwargs": {"size": dict(setup.image_size)}} if setup.has_image_limits else None
    recording = child_processes.recording_segments()
    with (
        _engine_environment(visible),
        capture_children(),
        recording,
        _error_log() as (logging, log),
        tied_to_owner(),
    ):
        try:
            yield {
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
                "weight_transfer_config": {"backend": transfer},
                "worker_extension_cls": side,
                "logging_config": logging,
                **vllm.engine_args.model_dump(exclude_none=True),
            }
        except UserError:
            raise
        except (RuntimeError, ValueError, OSError) as error:
            problem = _first_error(log.read_text(encoding="utf-8")) or _first_sentence(str(error))
            raise EngineError(f"vLLM did not start: {problem}", setup.fixes.choose(problem)) from error


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


def _device_indices(setup: EngineSetup) -> range:
    """Return the local ranks whose devices the engine uses."""
    first = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if first + setup.size > ranks:
        raise EngineError(
            f"rollout_matching.vllm.tensor_parallel_size: {setup.size} ranks from local rank {first} on share an "
            f"engine, but this machine has {ranks}",
            f"set it to a divisor of the number of ranks on each machine, {OR_USE_HF}",
        )
    return range(first, first + setup.size)


def _visible_gpus(indices: range) -> str:
    """Return CUDA_VISIBLE_DEVICES for the engine. The indices count the GPUs that the learner sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]
    return ",".join(gpus[k] for k in indices)


@contextmanager
def tied_to_owner() -> Iterator[None]:
    """Make the processes of engines that are started in this context end with this process.

    Workers import a class of ours, which sees to it. The engine and, with several replicas, the coordinator that
    counts their requests start with `run_engine` and `run_coordinator` instead of vLLM's own functions. These two
    call vLLM's own, which are in their places in a new process."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc
    from vllm.v1.engine.core import EngineCoreProc

    with (
        patch.object(EngineCoreProc, "run_engine_core", staticmethod(run_engine)),
        patch.object(DPCoordinatorProc, "run_coordinator", staticmethod(run_coordinator)),
    ):
        yield


def run_engine(*positional: Any, **arguments: Any) -> None:
    """Run a vLLM engine, in its own process, until the owner ends."""
    from vllm.v1.engine.core import EngineCoreProc

    end_with(int(os.environ[OWNER]))
    EngineCoreProc.run_engine_core(*positional, **arguments)


def run_coordinator(**arguments: Any) -> None:
    """Run vLLM's coordinator, in its own process, until the owner ends. Signals are blocked while an engine
    starts, but vLLM uses SIGTERM to end the coordinator of an engine that fails to start."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with(int(os.environ[OWNER]))
    DPCoordinatorProc.run_coordinator(**arguments)


@cache  # an engine without workers is its own worker, and calls this twice
def end_with(owner: int) -> None:
    """End this process when its owner ends, however that happens. Otherwise vLLM's processes would live on and
    keep their memory. A worker also ends with its engine."""
    parent, engine = parent_process(), psutil.Process()
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        _end(engine)
    if parent is not None and parent.pid == owner:
        if not parent.is_alive():  # the pid has gone to another process
            _end(engine)
    elif parent is not None:  # this is a worker, and its parent the engine
        child_processes.end_with_parent()
        if not parent.is_alive():
            os._exit(1)  # a living owner removes their files; otherwise the engine has seen to it
        engine = psutil.Process(parent.pid)
    threading.Thread(target=_wait_and_end, args=(owner_fd, engine), daemon=True).start()


def _wait_and_end(owner_fd: int, engine: psutil.Process) -> None:
    select.select([owner_fd], [], [])
    _end(engine)


def _end(engine: psutil.Process) -> NoReturn:
    """End all processes of an engine, of which this is one. Their shared memory is removed at once: they keep it
    while they have it mapped. Their folder is removed when this process has ended."""
    try:
        processes = [engine, *engine.children(recursive=True)]
        for process in processes:
            child_processes.remove_segments(child_processes.find_segments(process.pid))
        remover = child_processes.start_remover()  # noqa: F841 - waits until this process has ended
        for process in reversed(processes):
            with suppress(psutil.NoSuchProcess):
                if process.pid != os.getpid():
                    process.kill()
    finally:
        os._exit(1)


def has_ended(core: Any) -> bool:
    """Return True if a process of the engine has ended. `core` is vLLM's client of the engine."""
    resources = core.resources
    if resources.engine_dead or resources.engine_manager is None:
        return True
    return not all(process.is_alive() for process in _processes(core))


def cause(message: str) -> str:
    """Return the error message of a worker, without the text that vLLM puts around it."""
    message = message.removeprefix("Call to collective_rpc method failed: ")
    return message.removeprefix("Worker failed with error '").removesuffix(
        "', please check the stack trace above for the root cause"
    )


def stop_engine(core: Any) -> None:
    """Kill the engine and its workers, which have nothing to save. A worker that is asked to stop would wait for
    the engine."""
    segments: set[str] = set()
    for process in _processes(core):
        with suppress(psutil.NoSuchProcess):
            segments |= child_processes.find_segments(process.pid)
            for worker in psutil.Process(process.pid).children(recursive=True):
                segments |= child_processes.find_segments(worker.pid)
                worker.kill()
        process.kill()
    core.shutdown()
    child_processes.remove_segments(segments)


def _processes(core: Any) -> list[Any]:
    """Return the processes of the engine: one per replica, and with several replicas also vLLM's coordinator,
    which counts their requests."""
    manager, coordinator = core.resources.engine_manager, core.resources.coordinator
    return [*(manager.processes if manager else ()), *([coordinator.proc] if coordinator else ())]


@contextmanager
def _error_log() -> Iterator[tuple[Any, Path]]:
    """Yield a logging config for vLLM, and a file to which it also writes the errors of the engine's processes.
    The exception that vLLM raises says only that there was an error."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import DEFAULT_LOGGING_CONFIG as DEFAULT

    with TemporaryDirectory(dir=child_processes.engine_folder()) as folder:
        config, log = Path(folder) / "logging.json", Path(folder) / "errors"
        log.touch()
        if os.environ.get("VLLM_LOGGING_CONFIG_PATH"):  # the user has a logging config, which stays in force
            yield None, log
            return
        level = os.environ["VLLM_LOGGING_LEVEL"]  # DEFAULT has the level of the time when vLLM was imported
        handlers = {
            "vllm": DEFAULT["handlers"]["vllm"] | {"level": level},
            "file": {"class": "logging.FileHandler", "filename": str(log), "level": "ERROR"},
        }
        logger = {"handlers": list(handlers), "level": level, "propagate": False}
        config.write_bytes(json.dumps(DEFAULT | {"handlers": handlers, "loggers": {"vllm": logger}}).encode())
        yield LoggingConfig(pylogging_config_file=str(config)), log


def _first_error(log: str) -> str | None:
    """Return the first exception in a log, which caused the others, or None."""
    match = re.search(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)): (.+)$", log, re.MULTILINE)
    return match and (match[2] if match[1] in ("ValueError", "RuntimeError") else f"{match[1]}: {match[2]}")


def _first_sentence(message: str) -> str:
    """Return the line of an error message that says what is wrong. pydantic's first line only counts its
    errors."""
    if match := re.search(r"Value error, (.+?)(?: \[type=|$)", message, re.MULTILINE):
        return match[1]
    return next((line.strip() for line in message.splitlines() if line.strip()), "vLLM gave no reason")


@contextmanager
def _engine_environment(visible: str | None) -> Iterator[None]:
    """Set the environment variables that the engine's processes inherit, and block SIGINT and SIGTERM for them,
    while they are being started. `visible` lists the engine's GPUs, if not all."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    folder = str(child_processes.engine_folder())
    compiled = f"{gettempdir()}/torchinductor_{os.getuid()}"  # kept between runs, unlike TMPDIR below
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would keep the learner's memory in use
        OWNER: str(os.getpid()),
        child_processes.ENGINE_FOLDER: folder,
        "VLLM_RPC_BASE_PATH": folder,
        "TMPDIR": folder,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled),
    }
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(child_processes.TORCHRUN_VARIABLES)]:
        del os.environ[name]
    os.environ.update(variables)
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with ExitStack() as at_end:
        at_end.callback(os.environ.update, before)
        for name in variables.keys() - before.keys():
            at_end.callback(os.environ.pop, name)
        at_end.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
        yield
