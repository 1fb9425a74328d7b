"""`coordexp train`, and `python -m src.sft`, which is the same."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.cli.check import ConfigOption, absent_files
from coordexp.cli.console import err, need, out, progress, stop
from coordexp.config import Loaded, World, load_settings
from coordexp.config.rules import uses_vllm
from coordexp.errors import EngineError
from coordexp.folders import how_to_find
from coordexp.rollout.installed import check_vllm

if TYPE_CHECKING:
    from coordexp.train.run import Outcome


def train(
    config: ConfigOption,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of training.output_dir.")
    ] = False,
    world_size: Annotated[int, typer.Option(min=1, envvar="WORLD_SIZE", hidden=True)] = 1,
) -> None:
    """Train as a config says. Under torchrun, one process a learner rank.

    Rollouts are made by transformers, by a vLLM engine beside the learner, or by rollout servers,
    which have to be started (coordexp serve). SIGTERM finishes the step, saves a checkpoint and
    exits 0; Ctrl-C does the same and exits 130; an evaluation is abandoned. A second one ends the
    run at once. A run that diverges exits 1 and saves nothing that is not finite.
    """
    loaded = load_settings(config, World(world_size))
    settings = loaded.settings
    need("torch", "transformers", "peft", "httpx", extra="train")
    if settings.uses_rollouts and uses_vllm(settings, "colocate"):
        check_vllm()
    _run(loaded, resume)


def _run(loaded: Loaded, resume: bool) -> None:
    first = os.environ.get("RANK", "0") == "0"
    for note in loaded.notes if first else ():
        err.print(f"note: {note}", markup=False)
    for setting, name in absent_files(loaded.settings):  # before anything heavy is imported
        stop(f"{setting}: {name} does not exist\n  {how_to_find(setting, name)}")
    with progress("loading"):
        from coordexp.data import DataError
        from coordexp.pack import PackingError
        from coordexp.ranks import RankError, RankLostError, lost_rank
        from coordexp.train.divergence import DivergenceError
        from coordexp.train.run import prepare
        from coordexp.train.stopping import exit_code

        try:
            run, checkpoint = prepare(loaded, resume)
        except (OSError, ValueError, EngineError, RankError, RankLostError) as error:
            stop(str(error))
    if resume and first:
        folder = loaded.settings.training.output_dir
        out.print(
            f"going on from {checkpoint}" if checkpoint else f"no checkpoint in {folder}: from the beginning"
        )
    try:
        outcome = run()
    except (
        OSError,
        DataError,
        DivergenceError,
        PackingError,
        EngineError,
        RankError,
        RankLostError,
    ) as error:
        stop(str(error))
    except RuntimeError as error:
        if lost := lost_rank(error):
            stop(str(lost))
        raise
    if first:
        out.print(f"{_ending(outcome)}; see {outcome.folder}")
    if outcome.stopped_by and (code := exit_code(outcome.stopped_by)):
        raise typer.Exit(code)


def _ending(outcome: "Outcome") -> str:
    if not outcome.stopped_by:
        return f"done: step {outcome.steps}"
    if not outcome.steps:
        return "stopped by a signal before the first step, so there is nothing to save"
    if outcome.saved:
        return f"stopped by a signal after step {outcome.steps}, which is saved; --resume goes on"
    return (
        f"stopped by a signal after step {outcome.steps}, which is not saved; --resume goes on from the newest "
        "checkpoint, if there is one"
    )
