"""Check the machine before anything is started: model, ports, GPUs, memory.

Of the memory that `coordexp plan` estimates, what does not depend on the size of rows and images is a lower bound:
if it does not fit, that is an error.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from coordexp.config import Settings
from coordexp.config.rules import SERVERS, uses_vllm
from coordexp.errors import Finding, UserError
from coordexp.families import read_model_type
from coordexp.launch.memory import (
    CACHE,
    ENGINE_FIX,
    LEARNER_FIX,
    UTILIZATION,
    WEIGHTS,
    Learner,
    Model,
    Parts,
    RowSize,
    engine_parts,
    format_bytes,
    total_bytes,
)
from coordexp.launch.plan import LaunchOptions, Plan, gpu_ids, is_loopback
from coordexp.shapes import KNOWN_MODEL

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Used without nvidia-smi, in a process of its own: torch takes seconds to import, and hundreds of megabytes.
ASK_TORCH = """
import torch
for gpu in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(gpu)
    print(gpu, total, free, sep=",")
"""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of memory of a GPU."""

    total: int
    free: int


Needs = dict[str, Parts]  # the least memory that each part needs on each of its devices, by what it is for


def model_problems(settings: Settings) -> Iterator[Finding]:
    """Yield the problem of the model that is in the folder of the settings, if it cannot give their answers."""
    from coordexp.answers.formats import load_format

    try:
        load_format(Path(settings.model.path), settings.custom.answer_format)
    except UserError as error:
        add = "run `coordexp model add-coords` on the checkpoint, and set model.path to the folder that it writes"
        fixes = (error.fix, "" if settings.custom.answer_format == "native" else add)
        yield Finding("error", "model.path", error.problem, "; ".join(filter(None, fixes)))


def port_problems(settings: Settings, options: LaunchOptions) -> Iterator[Finding]:
    """Yield the ports of servers to be started here at which nothing can listen."""
    if not options.start_servers or not uses_vllm(settings, "server"):
        return
    for index, server in enumerate(settings.rollout_matching.vllm.server.servers):
        if not is_loopback(server.base_url):
            continue
        url = urlsplit(server.base_url)
        ports = {"base_url": url.port or 80, "group_port": server.group_port}
        for key, port in ports.items():
            address = "::1" if url.hostname == "::1" else ""
            with socket.socket(socket.AF_INET6 if address else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections may wait there
                try:
                    probe.bind((address, port))
                    probe.listen()
                except OSError as error:
                    problem = f"port {port}: {os.strerror(error.errno or 0).lower()}"
                    fix = f"end the program that listens there (ss -ltnp 'sport = :{port}'), or use another port"
                    yield Finding("error", f"{SERVERS}[{index}].{key}", problem, fix)


def gpu_problems(options: LaunchOptions, devices: dict[int, DeviceMemory]) -> Iterator[Finding]:
    """Yield the lists of GPUs with one that the machine does not have or that this shell may not use."""
    visible = visible_gpus(devices)
    for name, text in (("--server-gpus", options.server_gpus), ("--train-gpus", options.train_gpus)):
        ids = gpu_ids(text)
        if any(gpu not in devices for gpu in ids):
            there = f"has GPUs {', '.join(map(str, devices))}" if devices else "has no visible GPU"
            fix = "give GPUs by the numbers of nvidia-smi, or --cpu to run without"
            yield Finding("error", name, f"{text}: this machine {there}", fix)
        elif hidden := ", ".join(str(gpu) for gpu in ids if gpu not in visible):
            fix = f"give GPUs of that list: numbers are those of nvidia-smi, whatever {VISIBLE} says"
            yield Finding("error", name, f"{hidden} is not in {VISIBLE}={os.environ[VISIBLE]}", fix)


def memory_problems(
    plan: Plan, settings: Settings, devices: dict[int, DeviceMemory] | None
) -> tuple[Needs, list[Finding]]:
    """Return the least memory that each part needs, and the problems. `devices` is None on the CPU, whose memory
    is not compared."""
    try:
        needs = estimate_needs(plan, settings, Path(settings.model.path))
    except UserError as error:
        return {}, [Finding("error", "model.path", error.problem, error.fix)]
    return needs, list(gpu_memory_problems(plan, settings, needs, devices)) if devices is not None else []


def find_gpus() -> dict[int, DeviceMemory]:
    """Return the memory of the machine's GPUs by number. nvidia-smi is asked, or torch where it is missing."""
    query = "--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits"
    smi = shutil.which("nvidia-smi")
    command, unit = ([smi, *query], 2**20) if smi else ([sys.executable, "-c", ASK_TORCH], 1)
    env = {name: value for name, value in os.environ.items() if name != VISIBLE} | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID"
    }
    with suppress(OSError, subprocess.TimeoutExpired, ValueError, IndexError):  # no driver, or no answer from it
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)  # noqa: S603
        rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
        return {int(row[0]): DeviceMemory(int(row[1]) * unit, int(row[2]) * unit) for row in rows}
    return {}


def visible_gpus(gpus: Iterable[int]) -> list[int]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES does not hide. If it has names instead of numbers, return all."""
    words = [word.strip() for word in os.environ.get(VISIBLE, "").split(",") if word.strip()]
    if VISIBLE not in os.environ or not all(word.isdecimal() for word in words):
        return list(gpus)
    return [gpu for gpu in gpus if str(gpu) in words]


def estimate_needs(plan: Plan, settings: Settings, folder: Path) -> Needs:
    """Return the needs of all parts that are started here; nothing for a folder without safetensors files, and for
    a model that the formulas are not for. Raise DataError if a file cannot be read."""
    if not any(folder.glob("*.safetensors")) or read_model_type(folder) != KNOWN_MODEL:
        return {}
    model = Model.from_folder(folder)
    engine = engine_parts(settings, model)
    least = {WEIGHTS: engine[WEIGHTS], "cache of one longest sequence": engine[CACHE]}
    learner = Learner(settings, model, RowSize(0, 0, 0), plan.learners)
    return {server.name: least for server in plan.local_servers} | {plan.learner.name: learner.least()}


def describe_need(part: str, need: Parts) -> str:
    purpose = ", ".join(f"{name} {format_bytes(bytes)}" for name, bytes in need.items())
    return f"{part} needs at least {format_bytes(total_bytes(need))} ({purpose})"


def gpu_memory_problems(
    plan: Plan, settings: Settings, needs: Needs, devices: dict[int, DeviceMemory]
) -> Iterator[Finding]:
    """Yield the problems on GPUs, where every part has devices of its own."""
    share = settings.rollout_matching.vllm.gpu_memory_utilization
    for part in (plan.learner, *(server.part for server in plan.local_servers if server.part)):
        is_learner = part is plan.learner
        option, fix = ("--train-gpus", LEARNER_FIX) if is_learner else ("--server-gpus", ENGINE_FIX)
        for gpu in [gpu for gpu in part.gpus if gpu in devices]:
            device = devices[gpu]
            limit = device.free if is_learner else device.total * share
            if limit > device.free:
                problem = (
                    f"GPU {gpu} has {format_bytes(device.free)} free of {format_bytes(device.total)}, and "
                    f"{part.name} takes a share of {share:g} ({format_bytes(limit)})"
                )
                end = f"end the other programs on that GPU, or lower {UTILIZATION}"
                yield Finding("error", option, problem, end)
            elif part.name in needs and total_bytes(needs[part.name]) > limit:
                available = f"GPU {gpu} has {format_bytes(limit)} for it"
                yield Finding(
                    "error", option, f"{describe_need(part.name, needs[part.name])}, and {available}", fix
                )
