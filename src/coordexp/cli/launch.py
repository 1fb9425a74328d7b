"""`coordexp launch`: rollout servers and learners of one config, on this machine, with one command."""

import os
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from coordexp.cli.check import ConfigOption
from coordexp.cli.console import err, need, out, print_violations, progress
from coordexp.config import ConfigError, Loaded, Violation, World, load_settings
from coordexp.launch.plan import (
    Asked,
    Plan,
    asked_violations,
    capacity_violations,
    make_plan,
    number_of_learners,
)

if TYPE_CHECKING:
    from coordexp.launch.memory import Need


def launch(
    config: ConfigOption,
    server_gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs of the servers, e.g. 0,1,2, in order: tensor_parallel_size * data_parallel_size each."
        ),
    ] = None,
    train_gpus: Annotated[str | None, typer.Option(help="GPUs of the learners, e.g. 3: one each.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run all of it without GPUs.")] = False,
    learners: Annotated[int | None, typer.Option(min=1, help="Learner processes with --cpu. Unset: 1.")] = None,
    no_servers: Annotated[
        bool, typer.Option("--no-servers", help="All servers are started elsewhere: wait for them, then train.")
    ] = False,
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Folder below which servers may read pictures, besides those of the data files."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of training.output_dir.")
    ] = False,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until all servers must answer.")] = 1800.0,
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds the learner has to finish its step and save, when told to end."),
    ] = 120.0,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Look at everything, print the plan, start nothing.")
    ] = False,
) -> None:
    """Start the rollout servers of a config and its learners, and end them together.

    First all is checked: config, files, model, data, ports, GPUs, memory.
    Servers whose base_url is on this machine are started here; others are
    waited for. The learners start when all servers answer.

    When the learner ends, so does all of it, with its exit code. A server that
    ends is started again up to 3 times, while the learner goes on with the
    others. Ctrl-C and SIGTERM let the learner finish its step and save; a
    second one ends all at once. No process is left behind, even if this one is
    killed.

    Several machines: start each server where it is to run,

    coordexp serve --config X.yaml --index I --host H

    then the learners on this machine (coordexp launch --no-servers), or, by
    hand, on each of several:

    torchrun --nnodes N --nproc_per_node G --rdzv_backend c10d
    --rdzv_endpoint HOST:PORT -m coordexp train --config X.yaml

    Servers and learners need the same COORDEXP_SERVER_TOKEN, if it is set. A
    launch that starts all servers itself makes one when there is none.

    Exits 2 when the config or the command line is wrong, 1 when the machine
    does not fit them or a server fails, 130 after Ctrl-C.
    """
    folders = tuple(map(str, images or ()))
    asked = Asked(str(config), server_gpus, train_gpus, cpu, learners, not no_servers, resume, folders)
    loaded = _load(asked)
    need("torch", "transformers", "peft", "httpx", "psutil", extra="train")
    with progress("looking at the model, the data and the machine"):
        plan, needed = _checked(loaded, asked)
    if check_only:
        _print_plan(plan, needed)
        return
    raise typer.Exit(_run(plan, loaded, start_timeout, grace))


def _load(asked: Asked) -> Loaded:
    """With what is wrong with the command line told beside what is wrong with the file."""
    try:
        return load_settings(asked.config, World(number_of_learners(asked)))
    except ConfigError as error:
        _stop(asked, [*asked_violations(asked), *error.violations], 2)


def _checked(loaded: Loaded, asked: Asked) -> tuple[Plan, list["Need"]]:
    from coordexp.launch import preflight

    settings, plan = loaded.settings, None
    needed: list[Need] = []
    wrong: list[Violation] = []
    warnings = [*loaded.notes]
    try:
        plan = make_plan(settings, asked)
    except ConfigError as error:
        wrong = list(error.violations)
    code = 2 if wrong else 1
    devices = None if asked.cpu else preflight.find_gpus()
    wrong += [
        *preflight.engine_problems(asked),
        *preflight.settings_problems(settings, asked),
        *preflight.port_problems(settings, asked),
    ]
    if devices is not None:
        wrong += preflight.gpu_problems(asked, devices)
    if plan is not None:
        needed, found = preflight.memory_problems(plan, settings, devices)
        wrong += [each for each in found if isinstance(each, Violation)]
        warnings += [each for each in found if isinstance(each, str)]
    for warning in warnings:
        err.print(f"note: {warning}", markup=False)
    if wrong or plan is None:
        _stop(asked, wrong, code)
    return plan, needed


def _stop(asked: Asked, wrong: list[Violation], code: int) -> NoReturn:
    print_violations(ConfigError(wrong, asked.config), err)
    err.print("nothing was started")
    raise typer.Exit(code)


def _run(plan: Plan, loaded: Loaded, start_timeout: float, grace: float) -> int:
    from coordexp.launch.log import Log
    from coordexp.launch.processes import Launch, Patience
    from coordexp.rollout.wire import TOKEN

    def check_sizes(sizes: tuple[int, ...]) -> None:
        if wrong := list(capacity_violations(loaded.settings, sizes, plan.learners)):
            raise ConfigError(wrong)

    token = os.environ.get(TOKEN)
    if token is None and len(plan.started) == len(plan.servers):
        token = secrets.token_urlsafe(32)
    log = Log(sys.stdout, (*(server.name for server in plan.servers), plan.learner.name))
    patience = Patience(start_s=start_timeout, learner_s=grace)
    return Launch(plan, log, token, patience, check_sizes).run()


def _print_plan(plan: Plan, needed: list["Need"]) -> None:
    from coordexp.launch.memory import amount

    table = Table()
    for column in ("part", "devices", "world", "address", "weights", "memory"):
        table.add_column(column, no_wrap=column != "devices", justify="right" if column == "memory" else "left")
    memory = {each.part: amount(each.bytes) for each in needed}
    for server in plan.servers:
        size = "as it says" if server.world_size is None else str(server.world_size)
        where = _devices(server.part.gpus) if server.part else "elsewhere"
        port = f"port {server.group_port}"
        table.add_row(server.name, where, size, server.base_url, port, memory.get(server.name, ""))
    learner = plan.learner
    table.add_row("learner", _devices(learner.gpus), str(plan.learners), "", "", memory.get("learner", ""))
    out.print(table)
    for each in needed:
        out.print(Text(f"{each} on each device, without activations" if each.part == "learner" else str(each)))
    for part in (*(server.part for server in plan.started if server.part), learner):
        devices = f"CUDA_VISIBLE_DEVICES={part.env.get('CUDA_VISIBLE_DEVICES', '')}"
        out.print(Text(f"{part.name}: {devices} {shlex.join(part.command)}", style="dim"))


def _devices(gpus: tuple[int, ...]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "CPU"
