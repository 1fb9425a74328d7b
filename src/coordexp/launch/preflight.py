"""Check the machine before anything is started: files, model, data, ports, GPUs, memory.

Memory is estimated with the formulas of `launch.memory`, as in `coordexp plan`. What does not depend on the size
of rows and images is a lower bound: if it does not fit, that is an error. If only the whole estimate does not fit,
that is a warning.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from coordexp.config import Settings
from coordexp.config.rules import SERVERS, trains_chat, uses_vllm
from coordexp.data.addresses import is_file, join_address, parse_address
from coordexp.errors import Finding, UserError
from coordexp.families import read_model_type
from coordexp.files import MODEL_PATHS, find_data_files
from coordexp.launch.memory import (
    CACHE,
    CONTEXT,
    CONTEXT_BYTES,
    ENGINE_FIX,
    LEARNER_FIX,
    RESERVE,
    UTILIZATION,
    WEIGHTS,
    Learner,
    Model,
    RowSize,
    SampleSize,
    engine_parts,
    format_bytes,
    total_bytes,
)
from coordexp.launch.plan import LaunchOptions, Plan, gpu_ids, is_loopback
from coordexp.rollout import check_vllm
from coordexp.shapes import KNOWN_MODEL

FIRST = 8  # records that are read
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
    """Bytes of memory of a GPU, or of the machine."""

    total: int
    free: int


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes that a part needs at least on each of its devices, and what for. `likely` adds what depends on the
    size of rows and images, without CUDA's own memory."""

    part: str
    bytes: float
    purpose: str
    likely: float

    def __str__(self) -> str:
        return f"{self.part} needs at least {format_bytes(self.bytes)} ({self.purpose})"


def engine_problems(settings: Settings, options: LaunchOptions) -> list[Finding]:
    """Return a finding if servers are to be started and vLLM is missing or of another version."""
    findings: list[Finding] = []
    if options.start_servers and uses_vllm(settings, "server"):
        with _collecting(findings, "vllm"):
            check_vllm(settings.backend_setting)
    return findings


def settings_problems(settings: Settings, options: LaunchOptions) -> list[Finding]:
    """Return the problems of the files: the model and its vocabulary, the first records and their images."""
    from coordexp.answers.formats import load_format

    findings: list[Finding] = []
    folder, is_native = Path(settings.model.path), settings.custom.answer_format == "native"
    if not folder.exists():
        findings.append(Finding("error", "model.path", f"{folder} does not exist", MODEL_PATHS))
    elif not (folder / "config.json").is_file():
        findings.append(Finding("error", "model.path", f"{folder} has no config.json", "give a model folder"))
    else:
        fix = "run `coordexp model add-coords` on the checkpoint, and set model.path to the folder that it writes"
        with _collecting(findings, "model.path", "" if is_native else fix):
            load_format(folder, settings.custom.answer_format)
    files: dict[str, list[Path]] = {}
    for setting, names in settings.custom.data_sets.items():
        with _collecting(findings, setting):
            files[setting] = find_data_files(names)
    data_folders = [file.parent for named in files.values() for file in named]
    folders = {folder.resolve() for folder in (*map(Path, options.images), *data_folders)}
    for setting, named in files.items():
        for file in named:
            takes_polygons = not is_native or setting not in settings.custom.train_sets
            findings += _data_problems(setting, file, folders, trains_chat(settings), takes_polygons)
    return findings


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
) -> tuple[list[MemoryNeed], list[Finding]]:
    """Return the least memory that each part needs, and the problems. `devices` is None on the CPU."""
    try:
        needs = estimate_needs(plan, settings, Path(settings.model.path))
    except UserError as error:
        return [], [Finding("error", "model.path", error.problem, error.fix)]
    if devices is not None:
        return needs, list(gpu_memory_problems(plan, settings, needs, devices))
    import psutil

    memory = psutil.virtual_memory()
    machine = DeviceMemory(memory.total, memory.available)
    return needs, list(machine_memory_problems(plan, settings, needs, machine))


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


@contextmanager
def _collecting(findings: list[Finding], subject: str, fix: str = "") -> Iterator[None]:
    """Add an error to the list, so that the user sees all problems at once. `fix` is added to the error's own."""
    try:
        yield
    except UserError as error:
        findings.append(Finding("error", subject, error.problem, "; ".join(filter(None, (error.fix, fix)))))
    except OSError as error:
        findings.append(Finding("error", subject, str(error), fix))


def _data_problems(
    setting: str, path: Path, folders: Collection[Path], has_chat_loss: bool, takes_polygons: bool
) -> list[Finding]:
    """Return the problems of the first records: their kind, polygons that native answers cannot express, images
    that do not exist, and an image that is in none of the folders that servers may read."""
    from coordexp.data import Record, find_wrong_kind, read_any_records

    findings: list[Finding] = []

    def report(problem: str, fix: str) -> None:
        findings.append(Finding("error", setting, f"{path}{problem}", fix))

    with _collecting(findings, setting, f"run `coordexp data doctor {path}`"):
        lines = list(islice(read_any_records(path), FIRST))
        if not lines:
            report(" has no records", "write one JSON object per line (see `coordexp data import`)")
        if wrong := find_wrong_kind(setting, [record for _, record in lines], has_chat_loss):
            report(f": {wrong[0]}", wrong[1])
        images = [record.image for _, record in lines if record.image is not None]
        files = [Path(parse_address(join_address(path.parent, image)).file) for image in images]
        missing = [image for image, file in zip(images, files, strict=True) if not file.is_file()]
        if missing:
            more = f", nor do {len(missing) - 1} more of the first {len(images)}" if len(missing) > 1 else ""
            report(f": {missing[0]} does not exist{more}", "image paths are relative to the folder of the file")
        targets = [(image, (path.parent / image).resolve()) for image in images if is_file(image)]
        hidden = [pair for pair in targets if not any(map(pair[1].is_relative_to, folders))]
        for image, target in hidden[:1]:
            report(f": {image} is {target}, which servers may not read", f"add --images {target.parent}")
        polygons = [
            line
            for line, record in lines
            if isinstance(record, Record) and any(item.kind == "poly" for item in record.objects)
        ]
        if polygons and not takes_polygons:
            fix = "set custom.answer_format: coord_tokens, or train on records with bbox_2d in place of poly"
            report(f":{polygons[0]} has a polygon, and native answers only boxes", fix)
    return findings


# Memory


def estimate_needs(plan: Plan, settings: Settings, folder: Path) -> list[MemoryNeed]:
    """Return the need of every part that is started here; nothing for a folder without safetensors files, and for
    a model that the formulas are not for. Raise DataError if a file cannot be read."""
    if not any(folder.glob("*.safetensors")) or read_model_type(folder) != KNOWN_MODEL:
        return []
    model, sample = Model.from_folder(folder), SampleSize()
    engine = engine_parts(settings, model)
    least = {name: engine[name] for name in (WEIGHTS, CACHE)}
    words = f"weights {format_bytes(engine[WEIGHTS])}, one longest sequence {format_bytes(engine[CACHE])}"
    likely = total_bytes(engine) - engine[CONTEXT]
    needs = [MemoryNeed(server.name, total_bytes(least), words, likely) for server in plan.local_servers]
    learner = Learner(settings, model, RowSize.from_settings(settings, sample, model.shape), plan.learners)
    words = ", ".join(f"{name} {format_bytes(bytes)}" for name, bytes in learner.least().items())
    likely = total_bytes(learner.parts())
    return [*needs, MemoryNeed(plan.learner.name, total_bytes(learner.least()), words, likely)]


def gpu_memory_problems(
    plan: Plan, settings: Settings, needs: list[MemoryNeed], devices: dict[int, DeviceMemory]
) -> Iterator[Finding]:
    """Yield the problems on GPUs, where every part has devices of its own."""
    share = settings.rollout_matching.vllm.gpu_memory_utilization
    gpus = {part.name: part.gpus for part in (plan.learner, *(s.part for s in plan.local_servers if s.part))}
    for need in needs:
        is_learner = need.part == plan.learner.name
        option, fix = ("--train-gpus", LEARNER_FIX) if is_learner else ("--server-gpus", ENGINE_FIX)
        for gpu in [gpu for gpu in gpus[need.part] if gpu in devices]:
            device = devices[gpu]
            limit = device.free if is_learner else device.total * share
            available = f"GPU {gpu} has {format_bytes(limit)} for it"
            likely = need.likely + CONTEXT_BYTES + (RESERVE * device.total if is_learner else 0)
            if limit > device.free:
                problem = (
                    f"GPU {gpu} has {format_bytes(device.free)} free of {format_bytes(device.total)}, and "
                    f"{need.part} takes a share of {share:g} ({format_bytes(limit)})"
                )
                yield Finding(
                    "error", option, problem, f"end the other programs on that GPU, or lower {UTILIZATION}"
                )
            elif need.bytes > limit:
                yield Finding("error", option, f"{need}, and {available}", fix)
            elif likely > limit:
                problem = f"{need.part} is likely to need {format_bytes(likely)}, and {available}"
                show = "run `coordexp plan` with this config, which shows every part"
                yield Finding("warning", option, problem, show)


def machine_memory_problems(
    plan: Plan, settings: Settings, needs: list[MemoryNeed], machine: DeviceMemory
) -> Iterator[Finding]:
    """Yield the problems on the CPU, where all parts share the memory of the machine."""
    processes = {server.name: server.world_size or 1 for server in plan.local_servers} | {"learner": plan.learners}
    by_part = {need.part: need.bytes * processes[need.part] for need in needs}
    share, workers = settings.rollout_matching.vllm.gpu_memory_utilization, sum(processes.values()) - plan.learners
    least = sum(by_part.values())
    reserved = share * machine.total * workers + by_part.get("learner", 0)
    if least > machine.free:
        parts = ", ".join(f"{name} {format_bytes(bytes)}" for name, bytes in by_part.items())
        yield Finding(
            "error",
            "model.path",
            f"the parts need at least {format_bytes(least)} ({parts}), and the machine has "
            f"{format_bytes(machine.free)} available",
            "start fewer servers or learners, use a smaller model, or end other programs",
        )
    elif by_part and reserved > machine.free:
        yield Finding(
            "warning",
            UTILIZATION,
            f"each of {workers} workers of the servers may take a share of {share:g} of the machine's "
            f"{format_bytes(machine.total)}; with the learners this is {format_bytes(reserved)}, and "
            f"{format_bytes(machine.free)} are available",
            f"lower {UTILIZATION} if a server does not start",
        )
