"""An owner, an engine and a worker as vLLM starts them, but without vLLM. Each prints its name and pid.

`python -m tests.unit.servers.tied_processes FOLDER WORK`, where WORK names what the worker does. With
"watch alone", only the worker watches the owner."""

import ctypes
import os
import sys
import time
from multiprocessing import get_context, resource_tracker, shared_memory
from pathlib import Path

import torch

from coordexp.child_processes import ENGINE_FOLDER
from coordexp.servers.processes import OWNER, end_with

SPAWN = get_context("spawn")


def run_owner(folder: str, work: str) -> None:
    print("owner", os.getpid(), flush=True)
    os.environ |= {OWNER: str(os.getpid()), ENGINE_FOLDER: folder}
    SPAWN.Process(target=run_engine, args=(work,)).start()
    time.sleep(600)


def run_engine(work: str) -> None:
    print("engine", os.getpid(), flush=True)
    if work != "watch alone":
        end_with(int(os.environ[OWNER]))
    SPAWN.Process(target=run_worker, args=(work,)).start()
    time.sleep(600)


def run_worker(work: str) -> None:
    folder = Path(os.environ[ENGINE_FOLDER])
    if work == "start late":
        print("worker", os.getpid(), flush=True)
        while not (folder / "go").exists():
            time.sleep(0.01)
    end_with(int(os.environ[OWNER]))
    segment = shared_memory.SharedMemory(create=True, size=64)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    (folder / "socket").touch()
    print("segment", segment.name, flush=True)
    print("worker", os.getpid(), flush=True)
    if work == "block threads":
        ctypes.PyDLL(None).sleep(600)
    if work == "use folder":
        while folder.exists():
            time.sleep(0.0001)
        torch.distributed.FileStore(f"{folder}/store", 1)  # waits for the folder, and blocks all threads meanwhile
    time.sleep(600)


if __name__ == "__main__":
    run_owner(*sys.argv[1:])
