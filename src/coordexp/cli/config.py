"""`coordexp config`: the schema of configs, for editors and for people."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coordexp.config import reference

app = typer.Typer(help="The configuration schema.", no_args_is_help=True)

Out = Annotated[
    Path | None, typer.Option("--out", "-o", dir_okay=False, help="Write here instead of to standard output.")
]


@app.command("schema")
def schema(out: Out = None) -> None:
    """Write a JSON Schema that an editor can check and complete configs with."""
    _write(json.dumps(reference.editor_schema(), indent=2) + "\n", out)


@app.command("reference")
def reference_page(out: Out = None) -> None:
    """Write the reference page of all settings, as Markdown."""
    _write(reference.render_page(), out)


def _write(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        typer.echo(f"wrote {out}", err=True)
