"""`coordexp plan`: the memory of a run on GPUs that need not be here, part by part."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from coordexp.cli.check import ConfigOption, SetOption
from coordexp.cli.console import JsonOption, out, print_findings, print_json
from coordexp.config import Settings, World, load_settings
from coordexp.errors import UserError
from coordexp.files import find_model
from coordexp.launch.memory import (
    GIB,
    GpuUse,
    Model,
    SampleSize,
    choose_rollouts,
    count_server_gpus,
    plan_memory,
    total_bytes,
)


def plan(
    config: ConfigOption,
    overrides: SetOption = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the machine.")] = 1,
    memory: Annotated[float, typer.Option(min=1, help="Memory of each GPU in GiB, e.g. 24 or 80.")] = 80.0,
    size: Annotated[
        Literal["2b", "4b", "8b"] | None,
        typer.Option(help="Plan for a published Qwen3-VL with coordinate tokens. No checkpoint is needed."),
    ] = None,
    pixels: Annotated[int, typer.Option(min=1, help="Pixels of a typical image.")] = SampleSize.pixels,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a typical answer.")
    ] = SampleSize.answer_tokens,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of learners and engines on each GPU, and say whether the run fits.

    Servers get the first GPUs and learners the others. These are formulas:
    they were compared with PyTorch's own accounting on a CPU, and not measured
    on GPUs (docs/scale.md). To try other settings, give --set.

    Exits 0 if the run fits, 1 if it does not, and 2 if the config is wrong.
    """
    settings = load_for_gpus(config, gpus, tuple(overrides or ()))
    name, model = _find_model(settings, size)
    uses, findings = plan_memory(settings, model, SampleSize(pixels, answer_tokens), gpus, memory * GIB)
    fits = not any(finding.severity == "error" for finding in findings)
    if as_json:
        details = {"model": name, "rollouts": choose_rollouts(settings), "gpus": [_describe(use) for use in uses]}
        print_json(str(config), findings, details)
    else:
        for use in uses:
            out.print(_table(use))
        print_findings(findings)
        verdict = f"{name}: {'fits' if fits else 'does not fit'}"
        out.print(Text(verdict, style="bold green" if fits else "bold red"))
    if not fits:
        raise typer.Exit(1)


def load_for_gpus(config: Path, gpus: int, overrides: tuple[str, ...] = ()) -> Settings:
    """Return the settings of a config for this many GPUs. Raise UserError if no GPU is left for a learner.

    Some settings follow from the number of learners, so the config is loaded again once that is known."""
    servers = count_server_gpus(load_settings(config, World(), overrides).settings)
    if servers >= gpus:
        raise UserError(
            f"{servers} of {gpus} GPUs are for rollout servers, so no GPU is left for a learner",
            "give more GPUs (--gpus), or list fewer servers",
        )
    return load_settings(config, World(gpus - servers), overrides).settings


def _find_model(settings: Settings, size: str | None) -> tuple[str, Model]:
    """Return the name and the shape of the model: of a published size, or of the checkpoint of the config."""
    if size is not None:
        return f"Qwen3-VL-{size.upper()}", Model.published(size)
    folder = find_model(settings.model.path)
    if not (folder / "config.json").is_file():
        fix = "give a checkpoint folder (--set model.path=FOLDER), or the size of a published model (--size 4b)"
        raise UserError(f"{folder} has no config.json", fix)
    return str(folder), Model.from_folder(folder)


def _table(use: GpuUse) -> Table:
    table = Table(title=f"{use.role}, {use.place}", title_justify="left", title_style="bold")
    table.add_column("part", no_wrap=True)
    table.add_column("GiB", justify="right")
    for process, parts in use.processes.items():
        table.add_row(Text(process, style="bold"), f"{total_bytes(parts) / GIB:.2f}")
        for name, bytes in parts.items():
            table.add_row(f"  {name}", f"{bytes / GIB:.2f}")
    table.add_row(Text(f"total of {use.memory / GIB:g} GiB", style="bold"), f"{use.total / GIB:.2f}")
    return table


def _describe(use: GpuUse) -> dict[str, Any]:
    """Return the use of GPUs for `--json`. All sizes are in bytes."""
    processes = {
        process: {name: round(bytes) for name, bytes in parts.items()} for process, parts in use.processes.items()
    }
    return {
        "role": use.role,
        "gpus": list(use.gpus),
        "fits": use.fits,
        "memory": round(use.memory),
        "total": round(use.total),
        "parts": processes,
    }
