"""`coordexp model`: make a checkpoint ready for coordinates."""

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import need, out, progress, stop

app = typer.Typer(help="Prepare model checkpoints.", no_args_is_help=True)


@app.command("add-coords")
def add_coords(
    model_folder: Annotated[
        Path, typer.Option("--model", "-m", exists=True, file_okay=False, help="A Hugging Face Qwen3-VL folder.")
    ],
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A new folder.")],
    noise: Annotated[
        float, typer.Option(min=0.0, help="Noise on new rows, in standard deviations of old ones.")
    ] = 0.02,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
) -> None:
    """Copy a checkpoint and give it the 1,000 coordinate tokens. One that has them is copied as it is."""
    need("torch", "safetensors", extra="train")
    with progress(f"expanding {model_folder}"):
        from coordexp.vocab.expand import ExpansionError, add_coord_tokens

        try:
            added = add_coord_tokens(model_folder, out_folder, noise=noise, seed=seed)
        except (ExpansionError, OSError) as error:
            stop(str(error))
    out.print(f"wrote {out_folder}: {added} coordinate tokens added")
