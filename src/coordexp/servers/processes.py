"""The processes of a rollout server's engine: their environment, their errors, and their end.

An engine runs in processes of its own. Signals that ask the server to finish do not reach the engine, and it ends
when the server ends, however that happens.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process, resource_tracker
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

from coordexp import child_processes
from coordexp.rollout.start import EngineSetup, engine_arguments, explain_start


@contextmanager
def starting(setup: EngineSetup, side: str) -> Iterator[dict[str, Any]]:
    """Yield vLLM's arguments. An engine that is started with them inside this context ignores SIGINT and SIGTERM,
    and an error of its processes is raised as EngineError, with its cause and a fix. This process keeps the
    environment that its engine needs.

    `side` is the class that its workers import."""
    folder = child_processes.engine_folder()
    _set_environment(folder)
    log = folder / "errors"
    log.touch()
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    with _blocked_signals(), tied_to_owner(), explain_start(setup.fix, log):
        own = {"worker_extension_cls": side, "logging_config": _log_errors_to(log)}
        yield engine_arguments(setup) | own


@contextmanager
def tied_to_owner() -> Iterator[None]:
    """Make the processes of engines that are started in this context end with this process. Python's resource
    tracker then removes their shared memory, and a shell their folder (`child_processes.engine_folder`).

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

    end_with_parent()
    EngineCoreProc.run_engine_core(*positional, **arguments)


def run_coordinator(**arguments: Any) -> None:
    """Run vLLM's coordinator, in its own process, until the owner ends. Signals are blocked while an engine
    starts, but vLLM uses SIGTERM to end the coordinator of an engine that fails to start."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with_parent()
    DPCoordinatorProc.run_coordinator(**arguments)


def end_with_parent() -> None:
    """Have Linux kill this process of an engine when its parent ends, whatever both are doing at that time:
    otherwise it would live on and keep its memory. The parent of a worker is the engine."""
    parent = parent_process()
    child_processes.end_with_parent(parent.pid if parent and parent.pid else os.getppid())


def has_ended(core: Any) -> bool:
    """Return True if a process of the engine has ended. `core` is vLLM's client of the engine."""
    resources = core.resources
    if resources.engine_dead or resources.engine_manager is None:
        return True
    return not all(process.is_alive() for process in _processes(core))


def stop_engine(core: Any) -> None:
    """Kill the engine, which has nothing to save. Its workers end with it."""
    for process in _processes(core):
        process.kill()
    core.shutdown()


def _processes(core: Any) -> list[Any]:
    """Return the processes of the engine: one per replica, and with several replicas also vLLM's coordinator,
    which counts their requests."""
    manager, coordinator = core.resources.engine_manager, core.resources.coordinator
    return [*(manager.processes if manager else ()), *([coordinator.proc] if coordinator else ())]


def _log_errors_to(log: Path) -> Any:
    """Return a logging config for vLLM, by which the engine's processes also write their errors to this file. The
    exception that vLLM raises says only that there was an error."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import DEFAULT_LOGGING_CONFIG as DEFAULT

    if os.environ.get("VLLM_LOGGING_CONFIG_PATH"):  # the user has a logging config, which stays in force
        return None
    level = os.environ["VLLM_LOGGING_LEVEL"]  # DEFAULT has the level of the time when vLLM was imported
    handlers = {
        "vllm": DEFAULT["handlers"]["vllm"] | {"level": level},
        "file": {"class": "logging.FileHandler", "filename": str(log), "level": "ERROR"},
    }
    logger = {"handlers": list(handlers), "level": level, "propagate": False}
    config = log.with_name("logging.json")
    config.write_bytes(json.dumps(DEFAULT | {"handlers": handlers, "loggers": {"vllm": logger}}).encode())
    return LoggingConfig(pylogging_config_file=str(config))


def _set_environment(folder: Path) -> None:
    """Set the environment variables that the engine's processes inherit."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # What is compiled is kept between runs, unlike TMPDIR below.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}")
    os.environ |= {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy threads and locks
        "VLLM_RPC_BASE_PATH": str(folder),
        "TMPDIR": str(folder),
    }
    for name in [name for name in os.environ if name.startswith(child_processes.TORCHRUN_VARIABLES)]:
        del os.environ[name]


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block SIGINT and SIGTERM for the processes that are being started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
