"""`coordexp data view`: records as a page to look at."""

from pathlib import Path
from typing import Annotated

import typer

from coordexp.cli.console import need, need_page, out, progress


def view(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file of records.", show_default=False)
    ],
    target: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.", show_default=False)],
    limit: Annotated[int, typer.Option(min=1, help="Records to show, from the start of the file.")] = 200,
    problems: Annotated[bool, typer.Option("--problems", help="Show only records with a problem.")] = False,
) -> None:
    """Write one HTML page with images, shapes and problems. It needs no server and loads nothing."""
    need("PIL", extra="train")
    from coordexp.pages.document import save_page
    from coordexp.pages.records import read_cards, render_records

    need_page(target)
    with progress(f"reading {file}") as notify:
        cards = list(read_cards(file, limit, problems_only=problems, notify=lambda line: notify(f"line {line:,}")))
        kind = "records with problems" if problems else "records"
        scope = f"{'the first' if len(cards) == limit else 'all'} {len(cards):,} {kind}"
        save_page(target, render_records(cards, str(file), scope))
    out.print(f"wrote {target}: {scope}", markup=False)
