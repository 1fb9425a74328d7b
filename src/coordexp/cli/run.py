"""`coordexp run`: check run folders."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from coordexp.cli.console import err, out
from coordexp.errors import DataError
from coordexp.train.checkpoints import checkpoints, examine, is_finished, step_of

app = typer.Typer(help="Check run folders.", no_args_is_help=True)


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
    is_checkpoint = is_finished(folder) or step_of(folder) is not None
    newest_first = checkpoints(folder) or ([folder] if is_checkpoint else [])
    if not newest_first:
        raise DataError(
            f"{folder} holds no checkpoint-<number>",
            "give the folder that training.output_dir names, or a checkpoint",
        )
    intact = []
    for checkpoint in newest_first:
        verdict = examine(checkpoint, partial(err.print, markup=False))
        intact.append(not verdict.fault and verdict.has_manifest)
        style = "green" if intact[-1] else "red" if verdict.fault else "yellow"
        out.print(Text(str(verdict), style=style))
    if not intact[0]:
        raise typer.Exit(1)
