"""The `coordexp` command. Each subcommand is a thin module, and only those that need torch import it."""

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coordexp.cli import (
    check,
    console,
    data,
    demo,
    doctor,
    evaluate,
    launch,
    model,
    plan,
    predict,
    report,
    run,
    serve,
    train,
)
from coordexp.errors import ConfigError, UserError
from coordexp.logs import at_level


class Commands(TyperGroup):
    """All commands, and the one place that prints errors which the user can fix.

    The exit code is 2 for a config that cannot be used, and 1 for other such errors. All other exceptions are bugs
    and keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the user gave."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            with at_level("error"):
                console.print_config_error(error, console.err)
            raise typer.Exit(2) from None
        except BrokenPipeError:  # the reader of the output went away (`coordexp ... | head`): typer ends quietly
            raise
        except (UserError, OSError, ImportError, RuntimeError) as error:
            is_clear = isinstance(error, (UserError, OSError))
            explained = error if is_clear else doctor.explain_torchvision(error)
            if explained is None:
                raise
            with at_level("error"):
                console.err.print(str(explained), markup=False, style="red")
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    name="coordexp",
    help="Teach a vision-language model to detect objects by training on its own corrected answers.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("check")(check.check)
app.command("doctor")(doctor.doctor)
app.command("evaluate")(evaluate.evaluate)
app.command("inspect")(report.inspect)
app.command("launch")(launch.launch)
app.command("plan")(plan.plan)
app.command("serve")(serve.serve)
app.command("train")(train.train)
app.command("predict")(predict.predict)
app.command("replay")(run.replay)
app.command("report")(report.report)
app.add_typer(check.config_app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(demo.app, name="demo")
app.add_typer(model.app, name="model")
app.add_typer(run.app, name="run")


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from coordexp.cli.version import describe_version

        typer.echo(describe_version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print version and commit.")
    ] = False,
) -> None:
    """Options before the subcommand."""


def main(arguments: list[str] | None = None, name: str = "coordexp") -> None:
    """Run a command as the shell does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the locale does not have becomes an escape
            stream.reconfigure(errors="backslashreplace")
    app(arguments, prog_name=name)
