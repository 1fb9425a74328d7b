"""The executor of an engine in the learner's process: it has one worker, which is this process."""

import os
from pathlib import Path
from unittest.mock import patch

import torch
from torch import distributed as dist
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from coordexp.ranks import max_over_ranks, together
from coordexp.tasks import ignore


class RankExecutor(UniProcExecutor):
    """Runs the worker of this rank. vLLM takes the learner's ranks for its own, as with its executor
    `external_launcher`. That one would wait for ever for a rank whose engine does not start; here the others learn
    of it."""

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
