"""An owner, an engine and a worker as vLLM starts them, but without vLLM. Each prints its name and pid.

`python -m tests.unit.servers.tied_processes FOLDER WORK`, where WORK names what the worker does."""

import ctypes
import os
import sys
import time
from multiprocessing import get_context, shared_memory
from pathlib import Path

from coordexp.servers.processes import end_with_parent

SPAWN = get_context("spawn")


def run_owner(folder: str, work: str) -> None:
    print("owner", os.getpid(), flush=True)
    SPAWN.Process(target=run_engine, args=(folder, work)).start()
    time.sleep(600)


def run_engine(folder: str, work: str) -> None:
    print("engine", os.getpid(), flush=True)
    end_with_parent()
    SPAWN.Process(target=run_worker, args=(folder, work)).start()
    time.sleep(600)


def run_worker(folder: str, work: str) -> None:
    if work == "start late":
        print("worker", os.getpid(), flush=True)
        while not Path(folder, "go").exists():
            time.sleep(0.01)
    end_with_parent()
    segment = shared_memory.SharedMemory(create=True, size=64)
    print("segment", segment.name, flush=True)
    print("worker", os.getpid(), flush=True)
    if work == "block threads":
        ctypes.PyDLL(None).sleep(600)
    time.sleep(600)


if __name__ == "__main__":
    run_owner(*sys.argv[1:])
