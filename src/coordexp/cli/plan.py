"""`coordexp plan`: the memory of a run on GPUs that need not be here, part by part."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from coordexp.cli.check import ConfigOption, SetOption
from coordexp.cli.console import JsonOption, out, print_findings, print_json
from coordexp.config import Settings, World, load_settings
from coordexp.config.settings import Adapter
from coordexp.errors import UserError
from coordexp.files import find_model
from coordexp.launch import fit
from coordexp.launch.memory import GIB, Item, LearnerMemory
from coordexp.shapes import PUBLISHED

COLOURS = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}
ACTIVATIONS = "activations"


def plan(
    config: ConfigOption,
    overrides: SetOption = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the machine.")] = 1,
    memory: Annotated[float, typer.Option(min=1, help="Memory of each GPU in GiB, e.g. 24 or 80.")] = 80.0,
    server_gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs of the rollout servers. Unset: as many as the servers of the config need."),
    ] = None,
    rollouts: Annotated[
        Literal["colocate", "server", "hf"] | None,
        typer.Option(
            help="Plan for rollouts with vLLM on the learner's GPUs or in servers, or with transformers."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="A checkpoint folder or a hub name. Unset: model.path.")
    ] = None,
    size: Annotated[
        Literal["2b", "4b", "8b"] | None,
        typer.Option(help="Plan for a published Qwen3-VL with coordinate tokens. No checkpoint is needed."),
    ] = None,
    lora: Annotated[
        int | None, typer.Option(min=1, help="Plan for a LoRA adapter of this rank instead of the config's.")
    ] = None,
    pixels: Annotated[int, typer.Option(min=1, help="Pixels of a typical image.")] = fit.SampleSize.pixels,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a typical answer.")
    ] = fit.SampleSize.answer_tokens,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of learners and engines on each GPU, and say whether the run fits.

    Servers get the first GPUs and learners the others. These are formulas:
    they were compared with small models on a CPU, and not measured on GPUs
    (docs/scale.md).

    Exits 0 if the run fits, 1 if it does not, and 2 if the config is wrong.
    """
    if model is not None and size is not None:
        raise UserError("--model and --size both name a model", "leave one of the two out")
    settings, split = load_for_gpus(config, gpus, server_gpus, rollouts, overrides or ())
    if lora is not None:
        settings = fit.change_setting(settings, "model.adapter", Adapter(rank=lora, alpha=2 * lora))
    folder = Path() if size else find_model(model or settings.model.path)
    if size is None and not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} has no config.json",
            "give a checkpoint folder (--model), or the size of a published model (--size 4b)",
        )
    planned = (
        fit.PlannedModel.from_folder(folder)
        if size is None
        else fit.PlannedModel.from_shape(f"Qwen3-VL-{size.upper()}", PUBLISHED[size].with_coordinate_tokens())
    )
    planner = fit.Planner(planned, fit.SampleSize(pixels, answer_tokens), split, memory * GIB)
    result = planner.plan(settings)
    if as_json:
        print_json(str(config), result.findings, _describe(result, planner, settings))
    else:
        _print(result, planner, settings)
    if result.verdict == "does not fit":
        raise typer.Exit(1)


def load_for_gpus(
    config: Path,
    gpus: int,
    server_gpus: int | None = None,
    rollouts: fit.Rollouts | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Settings, fit.GpuSplit]:
    """Return the settings of a config for this many GPUs, and which of them have servers. Some settings follow
    from the number of learners, so the config is loaded again once that is known."""
    settings = load_settings(config, World(), overrides).settings
    settings = fit.with_rollouts(settings, rollouts) if rollouts else settings
    split = fit.split_gpus(settings, gpus, server_gpus)
    settings = load_settings(config, World(len(split.learners)), overrides).settings
    settings = fit.with_rollouts(settings, rollouts) if rollouts else settings
    return fit.with_engine_size(settings, len(split.learners)), split


def _print(result: fit.MemoryPlan, planner: fit.Planner, settings: Settings) -> None:
    row = fit.row_size(settings, planner.sample, planner.model.shape)
    trained = "all weights" if settings.model.adapter is None else f"LoRA of rank {settings.model.adapter.rank}"
    trained += f" without {' and '.join(settings.model.freeze)}" if settings.model.freeze else ""
    out.print(
        Text(
            f"{planner.model.name}, {trained}: rows of {row.tokens:,} tokens, {row.image_tokens:,} of them of "
            f"images and {row.supervised:,} supervised"
        )
    )
    for use in result.uses:
        out.print(_table(use))
    for checkpointing, bytes in _activations(planner, settings).items():
        out.print(Text(f"activations {checkpointing}: {bytes / GIB:.1f} GiB", style="dim"))
    print_findings(result.findings, out)
    out.print(Text(result.verdict, style=COLOURS[result.verdict]))


def _table(use: fit.GpuUse) -> Table:
    table = Table(title=f"{use.role}, {fit.describe_gpus(use.gpus)}", title_justify="left", title_style="bold")
    table.add_column("part", no_wrap=True)
    table.add_column("GiB", justify="right")
    for name, items in use.sections:
        table.add_row(Text(name, style="bold"), _gib(sum(item.bytes for item in items)))
        for item in items:
            table.add_row(f"  {item.name}", _gib(item.bytes))
    if use.reserve:
        table.add_row(Text("reserve for fragmentation", style="bold"), _gib(use.reserve))
    table.add_row(Text(f"total of {use.memory / GIB:g} GiB", style="bold"), _gib(use.total), end_section=True)
    return table


def _activations(planner: fit.Planner, settings: Settings) -> dict[str, float]:
    """Return the activations of a row with and without gradient checkpointing, at the peak of each."""
    return {
        f"{'with' if value else 'without'} gradient checkpointing": _activation_bytes(
            planner.learner(fit.change_setting(settings, "training.gradient_checkpointing", value))
        )
        for value in (True, False)
    }


def _activation_bytes(learner: LearnerMemory) -> float:
    """Return the bytes of activations, at the moment of training at which they are the most."""
    return max(
        sum(item.bytes for item in moment.items if item.name.startswith((ACTIVATIONS, "backward pass")))
        for moment in learner.moments
    )


def _gib(bytes: float) -> str:
    return f"{bytes / GIB:.2f}"


def _describe(result: fit.MemoryPlan, planner: fit.Planner, settings: Settings) -> dict[str, Any]:
    """Return the plan for `--json`. All sizes are in bytes."""
    return {
        "verdict": result.verdict,
        "model": planner.model.name,
        "rollouts": fit.choose_rollouts(settings),
        "gpus": [
            {
                "role": use.role,
                "gpus": list(use.gpus),
                "verdict": use.verdict,
                "memory": round(use.memory),
                "total": round(use.total),
                "reserve": round(use.reserve),
                "parts": {name: _to_json(items) for name, items in use.sections},
            }
            for use in result.uses
        ],
        "activations": {name: round(bytes) for name, bytes in _activations(planner, settings).items()},
    }


def _to_json(items: Sequence[Item]) -> dict[str, int]:
    return {item.name: round(item.bytes) for item in items}
