"""`coordexp doctor --gpu` and `--cpu`: real engines on this machine, and a table of what they did."""

import os
import sys
import time
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordexp.cli.console import err, need, out, progress, stop
from coordexp.doctor.machine import Machine, the_cpu, the_gpus, visible
from coordexp.errors import EngineError
from coordexp.rollout.installed import check_vllm

if TYPE_CHECKING:
    from coordexp.doctor.run import Report

COLOURS = {"ok": "green", "failed": "bold red", "not checked": "yellow"}
WIDEST = 400  # in a log, where lines are not wrapped


def examine(gpu: bool, server_gpus: str | None, train_gpus: str | None, quick: bool) -> None:
    """Exits 0 if all that was checked is well, else 1."""
    need("torch", "transformers", "peft", "httpx", "psutil", extra="vllm" if gpu else "vllm-cpu")
    machine = _machine(gpu, server_gpus, train_gpus, quick)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    since = time.monotonic()
    with progress("importing torch and transformers"):
        from transformers.utils import logging

        from coordexp.doctor.run import Examination

        logging.disable_progress_bar()
    report = Examination(machine, progress).run()
    print_report(report)
    where = f"{time.monotonic() - since:.0f} s on {machine.described}"
    if report.ok:
        out.print(f"all that was checked is well ({where})", markup=False)
    else:
        err.print(f"something is wrong ({where}); what was used and said is in {report.kept}", markup=False)
    if report.hung:  # in a thread that may never come back
        sys.stdout.flush()
        os._exit(1)
    raise typer.Exit(0 if report.ok else 1)


def print_report(report: "Report") -> None:
    """The table, then each problem in full."""
    table = Table("", "measured", "")
    for one in report.outcomes:
        table.add_row(one.what, Text(one.found), Text(one.state, style=COLOURS[one.state]))
    (out if out.is_terminal else Console(width=WIDEST)).print(table)
    for one in report.outcomes:
        if one.problem:
            out.print(Text(f"{one.what}: ", style="bold") + Text(one.problem, style="red"))


def _machine(gpu: bool, server_gpus: str | None, train_gpus: str | None, quick: bool) -> Machine:
    from coordexp.launch.preflight import find_gpus

    try:
        if not gpu:
            check_vllm()
            return the_cpu()
        machine = the_gpus(visible(list(find_gpus())), server_gpus, train_gpus, quick)
        check_vllm()
        return machine
    except EngineError as error:
        stop(str(error))
