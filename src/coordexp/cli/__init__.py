"""The `coordexp` command. Each subcommand is a thin module, and only those that need torch import it."""

import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.text import Text
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
    shards,
    train,
)
from coordexp.errors import ConfigError, UserError
from coordexp.logs import logger, show_messages


class Commands(TyperGroup):
    """All commands, and the one place that prints errors which the user can fix.

    The exit code is 2 for a config that cannot be used, and 1 for other such errors. All other exceptions are bugs
    and keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the user gave."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            console.log_findings(error.findings)
            logger.error(console.count_problems(error))
            raise typer.Exit(2) from None
        except BrokenPipeError:  # the reader of the output went away (`coordexp ... | head`): typer ends quietly
            raise
        except (UserError, OSError, ImportError, RuntimeError) as error:
            is_clear = isinstance(error, (UserError, OSError))
            explained = error if is_clear else doctor.explain_torchvision(error)
            if explained is None:
                raise
            logger.error(Text(console.escape(str(explained)), style="red"))
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
# The panels of `coordexp --help`: each command with a line that fits, so that all of them fit a screen.
PANELS: dict[str, dict[str, tuple[Callable[..., None] | typer.Typer, str]]] = {
    "Data and models": {
        "data": (data.app, "import, doctor, clean, split, thin, view, suggest, audit, complete, export"),
        "demo": (demo.app, "model, scenes: made on the spot, to try everything with"),
        "model": (model.app, "add-coords, merge: prepare checkpoints"),
    },
    "Train": {
        "check": (check.check, "Check a config, and show the settings that it changes."),
        "plan": (plan.plan, "Estimate the memory of a run, and say whether it fits."),
        "train": (train.train, "Train as a config says."),
        "launch": (launch.launch, "Start rollout servers and learners, and end them together."),
        "serve": (serve.serve, "Serve rollouts with vLLM to the learner of the same config."),
    },
    "Look at a run": {
        "inspect": (report.inspect, "Write a page with single rollouts: roles, matches, losses."),
        "report": (report.report, "Write a page of curves and times; compare runs."),
        "replay": (run.replay, "Correct dumped answers again, and compare with the run."),
        "verify": (run.verify, "Compare checkpoints with their manifests."),
    },
    "Use a model": {
        "predict": (predict.predict, "Detect the objects of images or of a data set."),
        "shards": (shards.app, "status, merge: predictions that many processes make"),
        "evaluate": (evaluate.evaluate, "Compare predictions with the ground truth."),
    },
    "Help": {
        "doctor": (doctor.doctor, "Compare packages with the tested ones; try real engines."),
    },
}
for _panel, _commands in PANELS.items():
    for _name, (_command, _summary) in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, short_help=_summary, rich_help_panel=_panel)
        else:
            app.command(_name, short_help=_summary, rich_help_panel=_panel)(_command)


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
    show_messages()


def main(arguments: list[str] | None = None, name: str = "coordexp") -> None:
    """Run a command as the shell does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the locale does not have becomes an escape
            stream.reconfigure(errors="backslashreplace")
    app(arguments, prog_name=name)
