"""`coordexp serve`: one of the rollout servers that a config lists."""

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from coordexp.cli.check import ConfigOption, SetOption, missing_files, use_local_model
from coordexp.cli.console import LogOption, need, progress
from coordexp.config import Settings, load_settings
from coordexp.config.rollout import TOKEN, is_loopback_host
from coordexp.config.rules import uses_vllm
from coordexp.errors import UserError, explain_value_errors
from coordexp.files import find_data_files
from coordexp.launch.plan import is_loopback
from coordexp.logs import adopt_transformers, say, start_log
from coordexp.rollout import check_vllm

LOOPBACK = "127.0.0.1"


def serve(
    config: ConfigOption,
    overrides: SetOption = None,
    index: Annotated[int, typer.Option(min=0, help="Which of rollout_matching.vllm.server.servers to be.")] = 0,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on. Without it, this machine's own (127.0.0.1) only.", metavar="ADDRESS"
        ),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder below which images may be read, besides those of the data files. Can be repeated."
        ),
    ] = None,
    log_format: LogOption = None,
) -> None:
    """Serve rollouts with vLLM to the learner that trains with the same config.

    The port is the one in base_url. With COORDEXP_SERVER_TOKEN set, every route but /health/ and
    /ready/ requires that token; learners read it from the same variable. Without it, a server
    listens on this machine's own addresses only. SIGTERM or Ctrl-C ends the server and its engine.
    """
    start_log(log_format)
    loaded = load_settings(config, overrides=overrides or ())
    settings = loaded.settings
    address, port = _choose_address(settings, str(config), index, host)
    need("torch", "transformers", extra="vllm")
    settings = use_local_model(loaded).settings
    for missing in missing_files(settings):
        raise UserError(f"{missing.subject}: {missing.problem}", missing.fix)
    data = [file.parent for names in settings.custom.data_sets.values() for file in find_data_files(names)]
    folders = tuple(dict.fromkeys(folder.resolve() for folder in (*data, *(images or ()))))
    check_vllm()
    with explain_value_errors():
        _serve(settings, index, address, port, folders)


def _serve(settings: Settings, index: int, address: str, port: int, images: tuple[Path, ...]) -> None:
    with progress(f"starting rollout server {index} on {address}:{port} (vLLM takes about a minute)"):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from coordexp.servers.connections import listen

        rollout = settings.rollout_matching
        listening = listen(address, port)  # before the imports below, which take long

        from coordexp.servers.app import serve
        from coordexp.servers.swift import check_guard_environment

        check_guard_environment(rollout.repeat_terminate)
        adopt_transformers()

    host = f"[{address}]" if ":" in address else address

    def announce(world_size: int) -> None:
        say(f"rollout server {index} ready at http://{host}:{port} (world size {world_size})")

    serve(settings.model, rollout, listening, images, announce)


def _choose_address(settings: Settings, config: str, index: int, host: str | None) -> tuple[str, int]:
    """Return the address and the port to listen on. Stop if others could reach the server without a token."""
    servers = settings.rollout_matching.vllm.server.servers
    if not uses_vllm(settings, "server"):
        raise UserError(
            f"rollout_matching.vllm.mode: {config} has no rollout servers",
            f"set {settings.backend_setting}: vllm and vllm.mode: server, and list vllm.server.servers",
        )
    if index >= len(servers):
        raise UserError(f"--index {index}: {config} lists {len(servers)} servers", "the first one is 0")
    url = urlsplit(servers[index].base_url)
    assert url.hostname is not None
    port = url.port or (443 if url.scheme == "https" else 80)
    if host is None and not is_loopback(servers[index].base_url):
        raise UserError(
            f"servers[{index}].base_url is on {url.hostname}, but without --host a server listens on {LOOPBACK} "
            "only",
            f"add --host {url.hostname} (or 0.0.0.0 for every address), and set {TOKEN}: anyone who can reach the "
            "port could otherwise use the server and replace its weights",
        )
    address = host or ("::1" if url.hostname == "::1" else LOOPBACK)
    if not is_loopback_host(address) and not os.environ.get(TOKEN):
        raise UserError(
            f"--host {address}: {TOKEN} is not set, so anyone who can reach this address could use the server and "
            "replace its weights",
            f"set {TOKEN} to the same secret here and for the learner, or leave --host out to listen on "
            f"{LOOPBACK} only",
        )
    return address, port
