"""vLLM's coordinator of data-parallel replicas, made to end with the server that started it.

The coordinator is a process of its own that counts the requests of each replica. It loads no worker extension, and
vLLM does not end it when the server is killed, so vLLM is given another function to start it with.
"""

import os
import signal
from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc

from coordexp.rollout.engine import OWNER, end_with


def run_coordinator(**arguments: Any) -> None:
    """Run vLLM's coordinator, in its process, until the server ends. Signals are blocked while an engine starts;
    vLLM ends the coordinator of one that does not start by SIGTERM."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with(int(os.environ[OWNER]))
    DPCoordinatorProc.run_coordinator(**arguments)


def tie_coordinator_to_server() -> None:
    """Let coordinators that this process starts end with it. In the new process, vLLM's own function is in its
    place, and `run_coordinator` calls it."""
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)
