"""`coordexp model`: make a checkpoint ready for coordinates."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import need, need_new, out, progress, stop
from coordexp.folders import how_to_find

app = typer.Typer(help="Prepare model checkpoints.", no_args_is_help=True)


@app.command("add-coords")
def add_coords(
    model_folder: Annotated[
        Path, typer.Option("--model", "-m", file_okay=False, help="A Hugging Face Qwen3-VL folder.")
    ],
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A new folder.")],
    noise: Annotated[
        float, typer.Option(min=0.0, help="Noise on new rows, in standard deviations of old ones.")
    ] = 0.02,
    ordinal: Annotated[
        bool,
        typer.Option("--ordinal", help="Start with neighbouring bins alike, instead of all 1,000 nearly equal."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
) -> None:
    """Copy a checkpoint and give it the 1,000 coordinate tokens. One that has them is copied as it is."""
    need("torch", "safetensors", extra="train")
    if not model_folder.is_dir():
        stop(f"{model_folder} does not exist\n  {how_to_find('model.path', str(model_folder))}")
    with progress(f"expanding {model_folder}"):
        from coordexp.vocab.expand import ExpansionError, add_coord_tokens

        try:
            added = add_coord_tokens(model_folder, out_folder, noise=noise, ordinal=ordinal, seed=seed)
        except (ExpansionError, OSError) as error:
            stop(str(error))
    out.print(f"wrote {out_folder}: {added} coordinate tokens added")


@app.command("merge")
def merge(
    adapter: Annotated[
        Path, typer.Option("--adapter", "-a", exists=True, file_okay=False, help="A checkpoint with an adapter.")
    ],
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A new folder.")],
    model_folder: Annotated[
        Path | None, typer.Option("--model", "-m", help="The base model. Unset: the one the adapter names.")
    ] = None,
) -> None:
    """Write a whole model from a base model and a LoRA or DoRA adapter trained on it."""
    need("torch", "peft", extra="train")
    file = adapter / "adapter_config.json"
    if not file.is_file():
        stop(f"{adapter} has no adapter_config.json\n  give a checkpoint of a run with model.adapter")
    need_new(out_folder)
    base = model_folder or Path(json.loads(file.read_text())["base_model_name_or_path"])
    if not (base / "config.json").is_file():
        stop(f"{base} is not a model folder\n  give the base model with --model")
    with progress("merging"):
        from coordexp.train.adapter import merge_adapter

        merge_adapter(base, adapter, out_folder)
    out.print(f"wrote {out_folder}")
