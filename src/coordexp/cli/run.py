"""`coordexp verify`: compare checkpoints with their manifests. `coordexp replay`: correct dumped answers again,
without a model, and report whether the result is the same."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from coordexp.cli.console import err, need, out
from coordexp.errors import DataError, explain
from coordexp.train.checkpoints import checkpoints, examine, is_finished, step_of


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
        intact.append(not verdict.fault)
        out.print(Text(str(verdict), style="green" if intact[-1] else "red"))
    if not intact[0]:
        raise typer.Exit(1)


def replay(
    dump: Annotated[
        Path, typer.Argument(help="A file of RUN/dumps, or the folder.", exists=True, show_default=False)
    ],
) -> None:
    """Parse, match and build the target of every dumped example again; compare with what the run did.

    Exits 1 if anything differs: the code or the tokenizer is not the run's.
    """
    need("tokenizers", extra="train")
    from coordexp.dumps import FOLDER, NOT_A_DUMP, read_table, step_files
    from coordexp.dumps import replay as replay_line

    files = list(step_files(dump).values()) if dump.is_dir() else [dump]
    if not files:
        inside = dump / FOLDER
        fix = f"give {inside}" if inside.is_dir() else "a run with stage2.dump_every writes them to RUN/dumps"
        raise DataError(f"{dump} holds no step-*.jsonl", fix)
    table = read_table(files[0].parent)
    examples = different = 0
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            with explain(NOT_A_DUMP, f"{file}, line {number}: not a dumped example"):
                differences = replay_line(line, table)
            examples += 1
            different += bool(differences)
            for difference in differences:
                err.print(f"{file}, line {number}: {difference}", markup=False, soft_wrap=True)
    if different:
        err.print(f"{different} of {examples} examples come out differently")
        raise typer.Exit(1)
    out.print(f"{examples} examples of {len(files)} steps come out the same")
