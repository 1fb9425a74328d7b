"""`coordexp launch`: start the rollout servers and learners of one config on this machine with one command."""

import os
import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from coordexp.cli.check import ConfigOption
from coordexp.cli.console import err, need, out, print_violations, progress
from coordexp.config import ConfigError, Loaded, Settings, Violation, World, load_settings
from coordexp.launch.plan import (
    LaunchOptions,
    Plan,
    capacity_violations,
    make_plan,
    number_of_learners,
    option_violations,
    plan_violations,
)

if TYPE_CHECKING:
    from coordexp.launch.memory import MemoryNeed


def launch(
    config: ConfigOption,
    server_gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs of the servers, e.g. 0,1,2, in order: tensor_parallel_size * data_parallel_size per server."
        ),
    ] = None,
    train_gpus: Annotated[str | None, typer.Option(help="GPUs of the learners, e.g. 3: one per learner.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run everything without GPUs.")] = False,
    learners: Annotated[int | None, typer.Option(min=1, help="Learner processes with --cpu. Unset: 1.")] = None,
    no_servers: Annotated[
        bool, typer.Option("--no-servers", help="All servers are started elsewhere: wait for them, then train.")
    ] = False,
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Folder below which servers may read images, besides those of the data files."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint of training.output_dir.")
    ] = False,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until all servers must answer.")] = 1800.0,
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds the learner has to finish its step and save after a signal."),
    ] = 120.0,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Check everything, print the plan, start nothing.")
    ] = False,
) -> None:
    """Start the rollout servers of a config and its learners, and end them together.

    First everything is checked: config, files, model, data, ports, GPUs,
    memory. Servers whose base_url is on this machine are started here; others
    are waited for. The learners start when all servers answer.

    When the learner ends, the launch ends with its exit code. A server that
    ends is restarted up to 3 times, while the learner continues with the
    others. Ctrl-C and SIGTERM let the learner finish its step and save; a
    second one ends everything at once. No process is left behind, even if this
    one is killed.

    Several machines: start each server on its machine,

    coordexp serve --config X.yaml --index I --host H

    then the learners on this machine (coordexp launch --no-servers), or by
    hand on each of several machines:

    torchrun --nnodes N --nproc_per_node G --rdzv_backend c10d
    --rdzv_endpoint HOST:PORT -m coordexp train --config X.yaml

    Servers and learners need the same COORDEXP_SERVER_TOKEN, if it is set. A
    launch that starts all servers itself makes a token if there is none.

    Exits 2 when the config or the command line is wrong, 1 when the machine
    does not fit them or a server fails, 130 after Ctrl-C.
    """
    folders = tuple(map(str, images or ()))
    options = LaunchOptions(str(config), server_gpus, train_gpus, cpu, learners, not no_servers, resume, folders)
    loaded = _load(options)
    need("torch", "transformers", "peft", "httpx", "psutil", extra="train")
    with progress("checking the model, the data and the machine"):
        plan, needs = _plan(loaded, options)
    if check_only:
        _print_plan(plan, needs)
        return
    raise typer.Exit(_run(plan, loaded, start_timeout, grace))


def _load(options: LaunchOptions) -> Loaded:
    """Load the config. If it is wrong, print the problems of the command line beside those of the file."""
    try:
        return load_settings(options.config, World(number_of_learners(options)))
    except ConfigError as error:
        _refuse(options, [*option_violations(options), *error.violations], 2)


def _plan(loaded: Loaded, options: LaunchOptions) -> tuple[Plan, list["MemoryNeed"]]:
    """Return the plan and the memory that it needs. If there are problems, print all of them and exit."""
    from coordexp.launch import preflight

    settings = loaded.settings
    violations = plan_violations(settings, options)
    code = 2 if violations else 1
    plan = None if violations else make_plan(settings, options)
    devices = None if options.cpu else preflight.find_gpus()
    violations += preflight.engine_problems(options)
    violations += preflight.settings_problems(settings, options)
    violations += preflight.port_problems(settings, options)
    if devices is not None:
        violations += preflight.gpu_problems(options, devices)
    needs: list[MemoryNeed] = []
    notes = [*loaded.notes]
    if plan is not None:
        needs, problems = preflight.memory_problems(plan, settings, devices)
        violations += [problem for problem in problems if isinstance(problem, Violation)]
        notes += [str(problem) for problem in problems if not isinstance(problem, Violation)]
    for note in notes:
        err.print(f"note: {note}", markup=False)
    if violations or plan is None:
        _refuse(options, violations, code)
    return plan, needs


def _refuse(options: LaunchOptions, violations: list[Violation], code: int) -> NoReturn:
    print_violations(ConfigError(violations, options.config), err)
    err.print("nothing was started")
    raise typer.Exit(code)


@dataclass(frozen=True)
class _CapacityCheck:
    """Raises a ConfigError if the servers, once their world sizes are known, are too small for the learners."""

    settings: Settings
    learners: int

    def __call__(self, sizes: tuple[int, ...]) -> None:
        if violations := list(capacity_violations(self.settings, sizes, self.learners)):
            raise ConfigError(violations)


def _run(plan: Plan, loaded: Loaded, start_timeout: float, grace: float) -> int:
    from coordexp.launch.parts import Log
    from coordexp.launch.processes import Launch, Patience
    from coordexp.servers.protocol import TOKEN

    token = os.environ.get(TOKEN)
    if token is None and len(plan.local_servers) == len(plan.servers):
        token = secrets.token_urlsafe(32)
    log = Log(sys.stdout, (*(server.name for server in plan.servers), plan.learner.name))
    patience = Patience(start_s=start_timeout, learner_s=grace)
    return Launch(plan, log, token, patience, _CapacityCheck(loaded.settings, plan.learners)).run()


def _print_plan(plan: Plan, needs: list["MemoryNeed"]) -> None:
    from coordexp.launch.memory import format_bytes

    table = Table()
    for column in ("part", "devices", "world", "address", "weights", "memory"):
        table.add_column(column, no_wrap=column != "devices", justify="right" if column == "memory" else "left")
    memory = {item.part: format_bytes(item.bytes) for item in needs}
    for server in plan.servers:
        size = "unknown" if server.world_size is None else str(server.world_size)
        where = _devices(server.part.gpus) if server.part else "elsewhere"
        port = f"port {server.group_port}"
        table.add_row(server.name, where, size, server.base_url, port, memory.get(server.name, ""))
    learner = plan.learner
    table.add_row("learner", _devices(learner.gpus), str(plan.learners), "", "", memory.get("learner", ""))
    out.print(table)
    for item in needs:
        out.print(Text(f"{item} on each device, without activations" if item.part == "learner" else str(item)))
    for part in (*(server.part for server in plan.local_servers if server.part), learner):
        devices = f"CUDA_VISIBLE_DEVICES={part.env.get('CUDA_VISIBLE_DEVICES', '')}"
        out.print(Text(f"{part.name}: {devices} {shlex.join(part.command)}", style="dim"))


def _devices(gpus: tuple[int, ...]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "CPU"
