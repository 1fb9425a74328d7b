"""`coordexp train`, and `python -m src.sft`, which is the same."""

from typing import Annotated

import typer

from coordexp.cli.check import ConfigOption
from coordexp.cli.console import err, print_violations
from coordexp.config import ConfigError, World, load_settings


def train(
    config: ConfigOption,
    world_size: Annotated[int, typer.Option(min=1, envvar="WORLD_SIZE", hidden=True)] = 1,
) -> None:
    """Train as a config says. Under torchrun, one process a learner rank.

    This version checks the config and stops: it has no trainer yet.
    """
    try:
        loaded = load_settings(config, World(world_size))
    except ConfigError as error:
        print_violations(error, str(config), err)
        raise typer.Exit(2) from None
    variant = loaded.settings.custom.trainer_variant
    err.print(
        f"{config} is sound, and this version of coordexp has no {variant} trainer yet: nothing was trained."
    )
    raise typer.Exit(3)
