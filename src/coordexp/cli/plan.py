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
from coordexp.config.rollout import default_tensor_parallel_size
from coordexp.config.rules import MODE, TENSOR_PARALLEL
from coordexp.config.settings import Adapter
from coordexp.errors import UserError
from coordexp.files import find_model
from coordexp.launch.memory import (
    GIB,
    Gpus,
    GpuUse,
    Learner,
    Model,
    Rollouts,
    RowSize,
    SampleSize,
    choose_rollouts,
    plan_memory,
    total_bytes,
)

COLOURS = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}


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
    pixels: Annotated[int, typer.Option(min=1, help="Pixels of a typical image.")] = SampleSize.pixels,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a typical answer.")
    ] = SampleSize.answer_tokens,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of learners and engines on each GPU, and say whether the run fits.

    Servers get the first GPUs and learners the others. These are formulas:
    they were compared with PyTorch's own accounting on a CPU, and not measured
    on GPUs (docs/scale.md).

    Exits 0 if the run fits, 1 if it does not, and 2 if the config is wrong.
    """
    if model is not None and size is not None:
        raise UserError("--model and --size both name a model", "leave one of the two out")
    settings, split = load_for_gpus(config, gpus, server_gpus, rollouts, overrides or ())
    if lora is not None:
        settings = change_setting(settings, "model.adapter", Adapter(rank=lora, alpha=2 * lora))
    if size is not None:
        name, planned = f"Qwen3-VL-{size.upper()}", Model.published(size)
    else:
        folder = find_model(model or settings.model.path)
        if not (folder / "config.json").is_file():
            fix = "give a checkpoint folder (--model), or the size of a published model (--size 4b)"
            raise UserError(f"{folder} has no config.json", fix)
        name, planned = str(folder), Model.from_folder(folder)
    sample = SampleSize(pixels, answer_tokens)
    uses, findings = plan_memory(settings, planned, sample, split, memory * GIB)
    verdict = max((use.verdict for use in uses), key=list(COLOURS).index)
    if any(finding.severity == "error" for finding in findings):  # also an engine that has too small a share
        verdict = "does not fit"
    row = RowSize.from_settings(settings, sample, planned.shape)
    activations = {
        f"{'with' if value else 'without'} gradient checkpointing": Learner(
            change_setting(settings, "training.gradient_checkpointing", value), planned, row, len(split[1])
        ).activation_bytes()
        for value in (True, False)
    }
    if as_json:
        details = {
            "verdict": verdict,
            "model": name,
            "rollouts": choose_rollouts(settings),
            "gpus": [_describe(use) for use in uses],
            "activations": {kind: round(bytes) for kind, bytes in activations.items()},
        }
        print_json(str(config), findings, details)
    else:
        adapter, freeze = settings.model.adapter, settings.model.freeze
        trained = "all weights" if adapter is None else f"LoRA of rank {adapter.rank}"
        trained += f" without {' and '.join(freeze)}" if freeze else ""
        sizes = f"{row.tokens:,} tokens, {row.image_tokens:,} of them of images and {row.supervised:,} supervised"
        out.print(Text(f"{name}, {trained}: rows of {sizes}"))
        for use in uses:
            out.print(_table(use))
        for kind, bytes in activations.items():
            out.print(Text(f"activations {kind}: {bytes / GIB:.1f} GiB", style="dim"))
        print_findings(findings)
        out.print(Text(verdict, style=COLOURS[verdict]))
    if verdict == "does not fit":
        raise typer.Exit(1)


def load_for_gpus(
    config: Path,
    gpus: int,
    server_gpus: int | None = None,
    rollouts: Rollouts | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Settings, Gpus]:
    """Return the settings of a config for this many GPUs, and which of these have servers and which learners. The
    servers come first, as in `coordexp launch`. Raise UserError if no GPU is left for a learner.

    Some settings follow from the number of learners, so the config is loaded again once that is known."""
    settings = _with_rollouts(load_settings(config, World(), overrides).settings, rollouts)
    if choose_rollouts(settings) == "server":
        vllm = settings.rollout_matching.vllm
        count = server_gpus or max(1, len(vllm.server.servers)) * vllm.devices_per_server
        if count >= gpus:
            raise UserError(
                f"{count} of {gpus} GPUs are for rollout servers, so no GPU is left for a learner",
                "give more GPUs (--gpus), or say how many the servers get (--server-gpus)",
            )
    elif server_gpus is not None:
        raise UserError(f"--server-gpus {server_gpus}: there are no servers", "add --rollouts server")
    else:
        count = 0
    settings = _with_rollouts(load_settings(config, World(gpus - count), overrides).settings, rollouts)
    if settings.rollout_matching.vllm.tensor_parallel_size is None:
        size = default_tensor_parallel_size(gpus - count) if choose_rollouts(settings) == "colocate" else 1
        settings = change_setting(settings, TENSOR_PARALLEL, size)
    return settings, (tuple(range(count)), tuple(range(count, gpus)))


def _with_rollouts(settings: Settings, rollouts: Rollouts | None) -> Settings:
    """Return settings that make rollouts in this way. The number of GPUs per engine is chosen anew."""
    if rollouts in (None, choose_rollouts(settings)):
        return settings
    if not settings.uses_rollouts:
        raise UserError(f"{settings.custom.trainer_variant} makes no rollouts", "leave --rollouts out")
    settings = change_setting(settings, "rollout_matching.rollout_backend", "hf" if rollouts == "hf" else "vllm")
    settings = change_setting(settings, TENSOR_PARALLEL, None)
    return settings if rollouts == "hf" else change_setting(settings, MODE, rollouts)


def change_setting(section: Any, path: str, value: Any) -> Any:
    """Return settings with another value at a path such as `training.packing`. Rules are not checked."""
    name, _, rest = path.partition(".")
    return section.model_copy(
        update={name: change_setting(getattr(section, name), rest, value) if rest else value}
    )


def _table(use: GpuUse) -> Table:
    table = Table(title=use.place, title_justify="left", title_style="bold")
    table.add_column("part", no_wrap=True)
    table.add_column("GiB", justify="right")
    for process, parts in use.processes.items():
        table.add_row(Text(process, style="bold"), f"{total_bytes(parts) / GIB:.2f}")
        for name, bytes in parts.items():
            table.add_row(f"  {name}", f"{bytes / GIB:.2f}")
    if use.reserve:
        table.add_row(Text("reserve for fragmentation", style="bold"), f"{use.reserve / GIB:.2f}")
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
        "verdict": use.verdict,
        "memory": round(use.memory),
        "total": round(use.total),
        "reserve": round(use.reserve),
        "parts": processes,
    }
