"""`coordexp doctor`: does this environment have what training needs, in the versions that were tested, and with
--gpu or --cpu, does it work?"""

import importlib
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.table import Table

from coordexp.cli.console import out, progress, stop
from coordexp.cli.doctor_machine import examine

# The first is needed by the commands that train or generate, the second by the vLLM backends only.
TRAIN = {"torch": "2.13", "torchvision": "0.28", "transformers": "5.19", "accelerate": "1.15"}
VLLM = {"vllm": "0.32"}


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    tested: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        return not self.advice


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Check rollouts, weight sync and faults on GPUs.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="The same on the CPU, in one to two minutes.")] = False,
    server_gpus: Annotated[
        str | None,
        typer.Option(help="With --gpu: GPU of the server, or two that share one. Unset: the first."),
    ] = None,
    train_gpus: Annotated[
        str | None, typer.Option(help="With --gpu: GPU of the learner. Unset: the next one.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --gpu: no compiling, and no engine beside the learner.")
    ] = False,
) -> None:
    """Import the packages that training uses and compare them with the tested versions. Exits 1 on a problem.

    With --gpu or --cpu, try the real thing instead, on a tiny model: a rollout
    server and a learner answer the same pictures, the learner's weights are
    changed and sent, looping answers are ended, the server is killed while it
    answers, and started again. Every step has a deadline, and no process is left.

    Server mode needs two GPUs; with one, the engine beside the learner
    (colocate) is checked alone. GPUs are given by the numbers of nvidia-smi.
    """
    if gpu and cpu:
        stop("--gpu and --cpu are two checks\n  leave one of them out")
    if not gpu and (server_gpus or train_gpus or quick):
        stop("--server-gpus, --train-gpus and --quick belong to --gpu\n  add --gpu, or leave them out")
    if gpu or cpu:
        examine(gpu, server_gpus, train_gpus, quick)
    _compare_versions()


def _compare_versions() -> None:
    with progress("importing torch, transformers and vLLM (some seconds)"):
        findings = [Finding("python", platform.python_version(), "3.11")]
        findings += [_package(name, tested, "train") for name, tested in TRAIN.items()]
        findings += [_package(name, tested, "vllm") for name, tested in VLLM.items()]
        findings.append(_devices())
    table = Table("", "found", "tested", "")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else f"[red]{finding.advice}[/]"
        table.add_row(finding.what, finding.found, finding.tested, mark)
    out.print(table)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


def _package(name: str, tested: str, extra: str) -> Finding:
    install = f"pip install 'coordexp\\[{extra}]'"
    distribution = _distribution(name)
    if distribution is None:
        return Finding(name, "missing", tested, install)
    found = version(distribution)
    shown = found if distribution == name else f"{found} ({distribution})"
    try:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  (whatever stops the import is what the user must read)
        return Finding(name, shown, tested, f"does not import: {type(error).__name__}: {error}")
    if not found.startswith(tested):
        return Finding(name, shown, tested, f"not the tested release; {install}")
    return Finding(name, shown, tested)


def _distribution(name: str) -> str | None:
    for candidate in (name, f"{name}-cpu"):
        try:
            version(candidate)
        except PackageNotFoundError:
            continue
        return candidate
    return None


def _devices() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return Finding("devices", "unknown", "CPU", "torch is missing")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return Finding("devices", names or f"CPU, {os.cpu_count()} cores", "CPU")
