"""Check the machine before anything is started: files, model, data, ports, GPUs, memory."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from coordexp.config import Settings, Violation
from coordexp.config.paths import KeyPath, parse_path
from coordexp.config.rules import SERVERS, uses_vllm
from coordexp.engine import check_vllm
from coordexp.errors import UserError
from coordexp.files import advise_missing_path
from coordexp.launch import memory
from coordexp.launch.memory import DeviceMemory, MemoryNeed, MemoryWarning
from coordexp.launch.plan import LaunchOptions, Plan, gpu_ids, is_loopback

FIRST = 8  # records that are read
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Used without nvidia-smi, in a process of its own: torch takes seconds to import, and hundreds of megabytes.
ASK_TORCH = """
import torch
for gpu in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(gpu)
    print(gpu, total, free, sep=",")
"""


def engine_problems(options: LaunchOptions) -> list[Violation]:
    """Return a violation if servers are to be started and vLLM is missing or of another version."""
    violations: list[Violation] = []
    if options.start_servers:
        with _collecting(violations, ()):
            check_vllm()
    return violations


def settings_problems(settings: Settings, options: LaunchOptions) -> list[Violation]:
    """Return the problems of the files: the model and its vocabulary, the first records and their images."""
    from coordexp.vocab import VocabularyTable

    violations: list[Violation] = []
    folder = Path(settings.model.path)
    if not folder.exists():
        violations.append(_missing("model.path", settings.model.path))
    elif not (folder / "config.json").is_file():
        violations.append(
            Violation(parse_path("model.path"), f"{folder} has no config.json", "give a model folder")
        )
    else:
        fix = "run `coordexp model add-coords` on the checkpoint, and set model.path to the folder that it writes"
        with _collecting(violations, parse_path("model.path"), fix):
            VocabularyTable.from_folder(folder)
    folders = [Path(image_folder).resolve() for image_folder in options.images]
    for setting, name in (
        ("custom.train_jsonl", settings.custom.train_jsonl),
        ("custom.val_jsonl", settings.custom.val_jsonl),
    ):
        if name is not None:
            violations += _data_problems(setting, name, folders)
    return violations


def port_problems(settings: Settings, options: LaunchOptions) -> Iterator[Violation]:
    """Yield the ports of servers to be started here at which nothing can listen."""
    if not options.start_servers or not uses_vllm(settings, "server"):
        return
    for index, server in enumerate(settings.rollout_matching.vllm.server.servers):
        if not is_loopback(server.base_url):
            continue
        url = urlsplit(server.base_url)
        ports = {"base_url": url.port or 80, "group_port": server.group_port}
        for key, port in ports.items():
            if reason := _why_unusable("::1" if url.hostname == "::1" else "", port):
                fix = f"end the program that listens there (ss -ltnp 'sport = :{port}'), or use another port"
                yield Violation(parse_path(f"{SERVERS}[{index}].{key}"), f"port {port}: {reason}", fix)


def gpu_problems(options: LaunchOptions, devices: dict[int, DeviceMemory]) -> Iterator[Violation]:
    """Yield the lists of GPUs with one that the machine does not have or that this shell may not use."""
    allowed = [word.strip() for word in os.environ.get(VISIBLE, "").split(",") if word.strip()]
    for name, text in (("--server-gpus", options.server_gpus), ("--train-gpus", options.train_gpus)):
        ids = gpu_ids(text)
        if any(gpu not in devices for gpu in ids):
            there = f"has GPUs {', '.join(map(str, devices))}" if devices else "has no visible GPU"
            fix = "give GPUs by the numbers of nvidia-smi, or --cpu to run without"
            yield Violation((name,), f"{text}: this machine {there}", fix)
        elif all(word.isdecimal() for word in allowed) and VISIBLE in os.environ:
            hidden = [str(gpu) for gpu in ids if str(gpu) not in allowed]
            if hidden:
                fix = f"give GPUs of that list: numbers are those of nvidia-smi, whatever {VISIBLE} says"
                yield Violation((name,), f"{', '.join(hidden)} is not in {VISIBLE}={os.environ[VISIBLE]}", fix)


def memory_problems(
    plan: Plan, settings: Settings, devices: dict[int, DeviceMemory] | None
) -> tuple[list[MemoryNeed], list[Violation | MemoryWarning]]:
    """Return the least memory that each part needs, and the problems. `devices` is None on the CPU."""
    try:
        needs = memory.estimate_needs(plan, settings, Path(settings.model.path))
    except (OSError, ValueError, KeyError, TypeError) as error:  # whatever a damaged header leads to
        problem = f"the header of a safetensors file, or config.json, cannot be read: {error}"
        return [], [Violation(parse_path("model.path"), problem, "copy the checkpoint again")]
    if devices is not None:
        return needs, list(memory.gpu_problems(plan, settings, needs, devices))
    return needs, list(memory.machine_problems(plan, settings, needs, _machine_memory()))


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


@contextmanager
def _collecting(violations: list[Violation], path: KeyPath, fix: str = "") -> Iterator[None]:
    """Add an error to the list, so that the user sees all problems at once. `fix` is added to the error's own."""
    try:
        yield
    except UserError as error:
        violations.append(Violation(path, error.problem, "; ".join(filter(None, (error.fix, fix)))))
    except OSError as error:
        violations.append(Violation(path, str(error), fix))


def _missing(setting: str, name: str) -> Violation:
    return Violation(parse_path(setting), f"{name} does not exist", advise_missing_path(setting, name))


def _data_problems(setting: str, name: str, folders: Sequence[Path]) -> list[Violation]:
    from coordexp.data import read_records

    path = Path(name)
    if not path.exists():
        return [_missing(setting, name)]
    violations: list[Violation] = []
    with _collecting(violations, parse_path(setting), f"run `coordexp data doctor {name}`"):
        records = [record for _, record in islice(read_records(path), FIRST)]
        if not records:
            fix = "write one JSON object per line (see `coordexp data import`)"
            violations.append(Violation(parse_path(setting), f"{name} has no records", fix))
        violations += _image_problems(setting, path, [record.image for record in records], folders)
    return violations


def _image_problems(
    setting: str, path: Path, images: Sequence[str], folders: Sequence[Path]
) -> Iterator[Violation]:
    """Yield a violation for images that do not exist, and one for an image that servers may not read."""
    missing = [image for image in images if not (path.parent / image).is_file()]
    if missing:
        more = f", nor do {len(missing) - 1} more of the first {len(images)}" if len(missing) > 1 else ""
        fix = "image paths are relative to the folder of the file"
        yield Violation(parse_path(setting), f"{path}: {missing[0]} does not exist{more}", fix)
    for image in images:
        target = (path.parent / image).resolve()
        if not any(target.is_relative_to(folder) for folder in (path.parent.resolve(), *folders)):
            problem = f"{path}: {image} is {target}, which servers may not read"
            yield Violation(parse_path(setting), problem, f"add --images {target.parent}")
            return


def _why_unusable(address: str, port: int) -> str | None:
    """Return why nothing can listen at a port, or None. A port that only waits for old connections is free."""
    with socket.socket(socket.AF_INET6 if address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            return os.strerror(error.errno or 0).lower()
    return None


def _machine_memory() -> DeviceMemory:
    import psutil

    memory = psutil.virtual_memory()
    return DeviceMemory(memory.total, memory.available)
