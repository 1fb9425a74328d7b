"""`coordexp data`: bring data in, find what is wrong with it, and look at it."""

import typer

from coordexp.cli import data_doctor, data_import, data_view

app = typer.Typer(help="Import, check and look at training data.", no_args_is_help=True)
app.add_typer(data_import.app, name="import")
app.command("doctor")(data_doctor.doctor)
app.command("view")(data_view.view)
