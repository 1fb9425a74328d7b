"""`coordexp model`: prepare model checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import need, need_new, out, progress
from coordexp.errors import UserError
from coordexp.files import MODEL_PATHS, find_model, json_object

app = typer.Typer(help="Prepare model checkpoints.", no_args_is_help=True)


@app.command("add-coords")
def add_coords(
    model_folder: Annotated[
        Path,
        typer.Option("--model", "-m", file_okay=False, help="A model folder, or its name on the hub."),
    ],
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A new folder.")],
    ordinal: Annotated[
        bool,
        typer.Option(
            "--ordinal", help="Make neighbouring bins similar at the start, instead of all nearly equal."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the noise on the new rows.")] = 0,
) -> None:
    """Copy a checkpoint and add the 1,000 coordinate tokens, unless it has them already."""
    need("torch", "safetensors", extra="train")
    folder = find_model(model_folder)
    if not folder.is_dir():
        raise UserError(f"{model_folder} does not exist", MODEL_PATHS)
    with progress(f"expanding {model_folder}"):
        from coordexp.answers.expand import add_coord_tokens

        added = add_coord_tokens(folder, out_folder, ordinal=ordinal, seed=seed)
    out.print(f"wrote {out_folder}: {added} coordinate tokens added")


@app.command("merge")
def merge(
    adapter: Annotated[
        Path, typer.Option("--adapter", "-a", exists=True, file_okay=False, help="A checkpoint with an adapter.")
    ],
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A new folder.")],
    model_folder: Annotated[
        Path | None, typer.Option("--model", "-m", help="The base model. Unset: the one that the adapter names.")
    ] = None,
) -> None:
    """Write a whole model from a base model and a LoRA or DoRA adapter trained on it."""
    need("torch", "peft", extra="train")
    file = adapter / "adapter_config.json"
    if not file.is_file():
        raise UserError(f"{adapter} has no adapter_config.json", "give a checkpoint of a run with model.adapter")
    need_new(out_folder)
    base = find_model(model_folder or _read_base_model(file))
    if not (base / "config.json").is_file():
        raise UserError(f"{base} is not a model folder", "give the base model with --model")
    with progress("merging"):
        from coordexp.train.learner import merge_adapter

        merge_adapter(base, adapter, out_folder)
    out.print(f"wrote {out_folder}")


def _read_base_model(file: Path) -> Path:
    """Return the base model that an adapter's config names."""
    name = json_object(file.read_bytes(), str(file)).get("base_model_name_or_path")
    if not isinstance(name, str):
        raise UserError(f"{file} names no base model", "give the base model with --model")
    return Path(name)
