"""`coordexp launch`: start the rollout servers and learners of one config on this machine with one command."""

import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from coordexp.cli.check import ConfigOption, SetOption, data_problems, missing_files, use_local_model
from coordexp.cli.console import LogOption, count_problems, log_findings, need, out, print_json, progress
from coordexp.config import ConfigError, Loaded, World, load_settings
from coordexp.config.rules import uses_vllm
from coordexp.errors import Finding, UserError
from coordexp.launch.plan import LaunchOptions, Plan, make_plan, number_of_learners, option_problems, plan_problems
from coordexp.logs import LogFormat, logger, start_log
from coordexp.rollout import check_vllm

if TYPE_CHECKING:
    from coordexp.launch.preflight import Needs


def launch(
    config: ConfigOption,
    overrides: SetOption = None,
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
        float, typer.Option(min=0, help="Seconds the learner has to finish its step and save after a signal.")
    ] = 900.0,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Check everything, print the plan, start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check-only: print one JSON object.")] = False,
    log_format: LogOption = None,
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
    launch that starts all servers itself makes a token if there is none. To
    read the servers' metrics, set one.

    Exits 2 when the config or the command line is wrong, 1 when the machine
    does not fit them or a server fails, 130 after Ctrl-C.
    """
    folders = tuple(map(str, images or ()))
    options = LaunchOptions(
        str(config),
        server_gpus,
        train_gpus,
        cpu,
        learners,
        not no_servers,
        resume,
        folders,
        tuple(overrides or ()),
    )
    if as_json and not check_only:
        raise UserError("--json belongs to --check-only", "add --check-only, or leave --json out")
    if not check_only:
        start_log(log_format)
    try:
        loaded = load_settings(options.config, World(number_of_learners(options)), options.overrides)
    except ConfigError as error:  # reported beside the problems of the command line
        _refuse(options, [*option_problems(options), *error.findings], 2, as_json)
    need("torch", "transformers", "peft", "httpx", "psutil", extra="train")
    loaded = use_local_model(loaded)
    with progress("checking the model, the data and the machine"):
        plan, needs, findings = _check(loaded, options)
    if plan is None or any(finding.severity == "error" for finding in findings):
        _refuse(options, findings, 2 if plan is None else 1, as_json)
    if as_json:
        memory = {part: round(sum(parts.values())) for part, parts in needs.items()}
        print_json(options.config, findings, {"plan": asdict(plan), "memory": memory})
        return
    log_findings(findings)
    if check_only:
        _print_plan(plan, needs)
        return
    raise typer.Exit(_run(plan, start_timeout, grace, log_format))


def _check(loaded: Loaded, options: LaunchOptions) -> tuple[Plan | None, "Needs", list[Finding]]:
    """Return the plan, unless the config and the command line rule one out, the memory that it needs, and all
    findings about the plan and the machine."""
    from coordexp.launch import preflight

    settings = loaded.settings
    findings = [*loaded.notes]
    problems = plan_problems(settings, options)
    plan = None if problems else make_plan(settings, options)
    devices = None if options.cpu else preflight.find_gpus()
    findings += problems
    if options.start_servers and uses_vllm(settings, "server"):
        try:
            check_vllm(settings.backend_setting)
        except UserError as error:
            findings.append(Finding("error", "vllm", error.problem, error.fix))
    missing = list(missing_files(settings))
    files = [*missing, *data_problems(settings, [Path(folder) for folder in options.images])]
    findings += [replace(finding, severity="error") for finding in files]
    if not any(finding.subject == "model.path" for finding in missing):
        findings += preflight.model_problems(settings)
    findings += preflight.port_problems(settings, options)
    if devices is not None:
        findings += preflight.gpu_problems(options, devices)
    needs: Needs = {}
    if plan is not None:
        needs, problems = preflight.memory_problems(plan, settings, devices)
        findings += problems
    return plan, needs, findings


def _refuse(options: LaunchOptions, findings: Sequence[Finding], code: int, as_json: bool) -> NoReturn:
    if as_json:
        print_json(options.config, findings, {})
    else:
        errors = [finding for finding in findings if finding.severity == "error"]
        log_findings([*(finding for finding in findings if finding.severity != "error"), *errors])
        logger.error(count_problems(ConfigError(errors, options.config)))
        logger.error("nothing was started")
    raise typer.Exit(code)


def _run(plan: Plan, start_timeout: float, grace: float, log_format: LogFormat | None) -> int:
    from coordexp.launch.parts import Log
    from coordexp.launch.processes import Launch, Patience
    from coordexp.servers.protocol import TOKEN

    token = os.environ.get(TOKEN)
    log = Log(sys.stdout, (*(server.name for server in plan.servers), plan.learner.name), log_format)
    if token is None and len(plan.local_servers) == len(plan.servers):
        token = secrets.token_urlsafe(32)
    return Launch(plan, log, token, Patience(start_s=start_timeout, learner_s=grace)).run()


def _print_plan(plan: Plan, needs: "Needs") -> None:
    from coordexp.launch.memory import format_bytes
    from coordexp.launch.preflight import describe_need

    table = Table()
    for column in ("part", "devices", "world", "address", "weights", "memory"):
        table.add_column(column, no_wrap=column != "devices", justify="right" if column == "memory" else "left")
    memory = {name: format_bytes(sum(parts.values())) for name, parts in needs.items()}
    for server in plan.servers:
        size = "unknown" if server.world_size is None else str(server.world_size)
        where = _devices(server.part.gpus) if server.part else "elsewhere"
        port = f"port {server.group_port}"
        table.add_row(server.name, where, size, server.base_url, port, memory.get(server.name, ""))
    learner = plan.learner
    table.add_row("learner", _devices(learner.gpus), str(plan.learners), "", "", memory.get("learner", ""))
    out.print(table)
    for name, parts in needs.items():
        out.print(Text(f"{describe_need(name, parts)}, on each device"))
    for part in (*(server.part for server in plan.local_servers if server.part), learner):
        devices = f"CUDA_VISIBLE_DEVICES={part.env.get('CUDA_VISIBLE_DEVICES', '')}"
        out.print(Text(f"{part.name}: {devices} {shlex.join(part.command)}", style="dim"))


def _devices(gpus: tuple[int, ...]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "CPU"
