"""`coordexp run`: look after run folders."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from coordexp.cli.console import err, out, stop
from coordexp.train.checkpoints import checkpoints, examine, is_finished, step_of

app = typer.Typer(help="Look after run folders.", no_args_is_help=True)


@app.command("verify")
def verify(
    folder: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="A run folder, or a checkpoint.", show_default=False),
    ],
) -> None:
    """Compare every file of each checkpoint with its manifest, newest first, as --resume does.

    Exits 0 if the newest checkpoint is intact, and 1 if it is damaged, unfinished or has no manifest.
    """
    found = checkpoints(folder) or ([folder] if is_finished(folder) or step_of(folder) is not None else [])
    if not found:
        stop(
            f"{folder} holds no checkpoint-<number>\n"
            "  give the folder that training.output_dir names, or a checkpoint"
        )
    intact = []
    for checkpoint in found:
        verdict = examine(checkpoint, lambda message: err.print(message, markup=False))
        intact.append(not verdict.fault and verdict.has_manifest)
        style = "green" if intact[-1] else "red" if verdict.fault else "yellow"
        out.print(Text(str(verdict), style=style))
    if not intact[0]:
        raise typer.Exit(1)
