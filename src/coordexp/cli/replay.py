"""`coordexp replay`: corrects dumped answers again, without a model, and says whether the same comes out."""

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import err, need, out, stop


def replay(
    dump: Annotated[
        Path, typer.Argument(help="A file of RUN/dumps, or the folder.", exists=True, show_default=False)
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with the tokenizer. Unset: the one beside the dump.")
    ] = None,
) -> None:
    """Parse, match and build the target of every dumped example again; compare with what the run did.

    Exits 1 if anything differs: the code or the tokenizer is not the run's.
    """
    need("tokenizers", extra="train")
    from coordexp.dump_files import FOLDER, FOLLOWED, step_files
    from coordexp.dumps import replay as again
    from coordexp.vocab import VocabularyError, VocabularyTable

    folders = (dump, dump / FOLLOWED)
    files = [file for each in folders for file in step_files(each).values()] if dump.is_dir() else [dump]
    if not files:
        inside = dump / FOLDER
        way_out = f"give {inside}" if inside.is_dir() else "a run with stage2.dump_every writes them to RUN/dumps"
        stop(f"{dump} holds no step-*.jsonl\n  {way_out}")
    beside = files[0].parent
    try:
        table = VocabularyTable.from_folder(tokenizer or (beside.parent if beside.name == FOLLOWED else beside))
    except VocabularyError as error:
        stop(f"{error}\n  give the folder of the run's model: --tokenizer DIR")
    examples = different = 0
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                found = again(line, table)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                stop(f"{file}, line {number}: not a dumped example ({error!r})")
            examples += 1
            different += bool(found)
            for text in found:
                err.print(f"{file}, line {number}: {text}", markup=False, soft_wrap=True)
    if different:
        err.print(f"{different} of {examples} examples come out differently")
        raise typer.Exit(1)
    out.print(f"{examples} examples of {len({file.name for file in files})} steps come out the same")
