"""Looks at the machine before anything is started: files, model, data, ports, GPUs, memory."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from coordexp.config import Settings, Violation
from coordexp.config.paths import keys_of
from coordexp.config.rules import SERVERS, uses_vllm
from coordexp.errors import DataError, EngineError
from coordexp.folders import how_to_find
from coordexp.launch import memory
from coordexp.launch.memory import Device, Need
from coordexp.launch.plan import Asked, Plan, gpu_ids, is_loopback
from coordexp.rollout.installed import check_vllm

FIRST = 8  # records that are read
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Without nvidia-smi. In a process of its own: torch takes seconds and hundreds of megabytes.
ASK_TORCH = """
import torch
for gpu in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(gpu)
    print(gpu, total, free, sep=",")
"""


def engine_problems(asked: Asked) -> Iterator[Violation]:
    if asked.start_servers:
        try:
            check_vllm()
        except EngineError as error:
            problem, _, fix = str(error).partition("\n")
            yield Violation((), problem, fix.strip())


def settings_problems(settings: Settings, asked: Asked) -> Iterator[Violation]:
    """Files, the model's vocabulary, the first records and their pictures."""
    from coordexp.vocab import VocabularyError, VocabularyTable

    folder = Path(settings.model.path)
    if not folder.exists():
        yield _absent("model.path", settings.model.path)
    elif not (folder / "config.json").is_file():
        yield Violation(keys_of("model.path"), f"{folder} has no config.json", "give a model folder")
    else:
        try:
            VocabularyTable.from_folder(folder)
        except VocabularyError as error:
            fix = "run `coordexp model add-coords` on the checkpoint, and set model.path to what it writes"
            yield Violation(keys_of("model.path"), str(error), fix)
    for setting, name in (
        ("custom.train_jsonl", settings.custom.train_jsonl),
        ("custom.val_jsonl", settings.custom.val_jsonl),
    ):
        if name is not None:
            yield from _data_problems(setting, name, [Path(folder).resolve() for folder in asked.images])


def port_problems(settings: Settings, asked: Asked) -> Iterator[Violation]:
    """Of the servers that are to be started here."""
    if not asked.start_servers or not uses_vllm(settings, "server"):
        return
    for index, server in enumerate(settings.rollout_matching.vllm.server.servers):
        if not is_loopback(server.base_url):
            continue
        url = urlsplit(server.base_url)
        ports = {"base_url": url.port or 80, "group_port": server.group_port}
        for key, port in ports.items():
            if refusal := _refusal("::1" if url.hostname == "::1" else "", port):
                fix = f"end what listens there (ss -ltnp 'sport = :{port}'), or use another port"
                yield Violation(keys_of(f"{SERVERS}[{index}].{key}"), f"port {port}: {refusal}", fix)


def gpu_problems(asked: Asked, devices: dict[int, Device]) -> Iterator[Violation]:
    """That the machine has them, and that this shell may use them."""
    allowed = [word.strip() for word in os.environ.get(VISIBLE, "").split(",") if word.strip()]
    for name, text in (("--server-gpus", asked.server_gpus), ("--train-gpus", asked.train_gpus)):
        ids = gpu_ids(text)
        absent = [gpu for gpu in ids if gpu not in devices]
        if absent:
            there = f"has GPUs {', '.join(map(str, devices))}" if devices else "has no GPU that can be seen"
            fix = "give GPUs by the numbers of nvidia-smi, or --cpu to run without"
            yield Violation((name,), f"{text}: this machine {there}", fix)
        elif all(word.isdecimal() for word in allowed) and VISIBLE in os.environ:
            barred = [str(gpu) for gpu in ids if str(gpu) not in allowed]
            if barred:
                fix = f"give GPUs of that list: numbers are those of nvidia-smi, whatever {VISIBLE} says"
                yield Violation((name,), f"{', '.join(barred)} is not in {VISIBLE}={os.environ[VISIBLE]}", fix)


def memory_problems(
    plan: Plan, settings: Settings, devices: dict[int, Device] | None
) -> tuple[list[Need], list[Violation | str]]:
    """What each part needs at least; errors, and warnings as texts. Devices are None on the CPU."""
    try:
        needed = memory.needs(plan, settings, Path(settings.model.path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "copy the checkpoint again"
        return [], [Violation(keys_of("model.path"), f"a safetensors file cannot be read: {error}", fix)]
    if devices is not None:
        return needed, list(memory.gpu_problems(plan, settings, needed, devices))
    return needed, list(memory.machine_problems(plan, settings, needed, _machine()))


def find_gpus() -> dict[int, Device]:
    """By number. By nvidia-smi, else by torch; empty when neither sees one."""
    query = "--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits"
    smi = shutil.which("nvidia-smi")
    command, unit = ([smi, *query], 2**20) if smi else ([sys.executable, "-c", ASK_TORCH], 1)
    env = {name: value for name, value in os.environ.items() if name != VISIBLE} | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID"
    }
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)  # noqa: S603
        rows = [line.split(",") for line in found.stdout.splitlines() if line.strip()]
        return {int(row[0]): Device(int(row[1]) * unit, int(row[2]) * unit) for row in rows}
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return {}


def _absent(setting: str, name: str) -> Violation:
    return Violation(keys_of(setting), f"{name} does not exist", how_to_find(setting, name))


def _data_problems(setting: str, name: str, folders: Sequence[Path]) -> Iterator[Violation]:
    from coordexp.data import read_records

    path = Path(name)
    if not path.exists():
        yield _absent(setting, name)
        return
    try:
        records = [record for _, record in islice(read_records(path), FIRST)]
    except (OSError, DataError) as error:
        problem, _, fix = str(error).partition("\n")
        yield Violation(keys_of(setting), problem, fix.strip() or f"run `coordexp data doctor {name}`")
        return
    if not records:
        fix = "write one JSON object a line (see `coordexp data import`)"
        yield Violation(keys_of(setting), f"{name} has no records", fix)
    absent = [record.image for record in records if not (path.parent / record.image).is_file()]
    if absent:
        problem = f"{name}: {absent[0]} does not exist, nor do {len(absent) - 1} more of the first {len(records)}"
        fix = "image paths are relative to the folder of the file"
        yield Violation(keys_of(setting), problem if len(absent) > 1 else problem.partition(", nor")[0], fix)
    below = (path.parent.resolve(), *folders)
    for record in records:
        picture = (path.parent / record.image).resolve()
        if not any(picture.is_relative_to(folder) for folder in below):
            problem = f"{name}: {record.image} is {picture}, which servers may not read"
            yield Violation(keys_of(setting), problem, f"add --images {picture.parent}")
            return


def _refusal(address: str, port: int) -> str | None:
    """Why nothing can listen there, if so. Ports that only wait for old connections to end are free."""
    with socket.socket(socket.AF_INET6 if address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            return os.strerror(error.errno or 0).lower()
    return None


def _machine() -> Device:
    import psutil

    found = psutil.virtual_memory()
    return Device(found.total, found.available)
