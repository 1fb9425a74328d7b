"""`coordexp train`, and `python -m src.sft`, which is the same."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp.child_processes import end_with_parent
from coordexp.cli.check import ConfigOption, SetOption, missing_files, use_local_model
from coordexp.cli.console import LogOption, log_findings, need, progress
from coordexp.config import Loaded, World, load_settings
from coordexp.config.rules import uses_vllm
from coordexp.config.training import Training
from coordexp.errors import DataError, UserError, explain, explain_value_errors, need_packages
from coordexp.logs import adopt_transformers, say, start_log
from coordexp.rollout import check_vllm
from coordexp.train.checkpoints import choose_checkpoint, hold_folder

if TYPE_CHECKING:
    from coordexp.train.run import PreparedRun, RunOutcome


def train(
    config: ConfigOption,
    overrides: SetOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint of training.output_dir.")
    ] = False,
    log_format: LogOption = None,
    world_size: Annotated[int, typer.Option(min=1, envvar="WORLD_SIZE", hidden=True)] = 1,
) -> None:
    """Train as a config says. Under torchrun, start one process per rank of the learner.

    Rollouts are made with transformers, with a vLLM engine on the learner's devices, or with rollout
    servers, which must be running already (coordexp serve). SIGTERM finishes the step, saves a
    checkpoint and exits 0; Ctrl-C does the same and exits 130. If an evaluation is running, it is
    abandoned. A second signal ends the run at once. A run that diverges exits 1 and saves no weights
    that are not finite.
    """
    start_log(log_format)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank of torchrun, which cannot end its ranks if it is killed
        end_with_parent(os.getppid())
    loaded = load_settings(config, World(world_size), overrides or ())
    settings = loaded.settings
    need("torch", "transformers", "peft", "httpx", extra="train")
    for tracker in {"tensorboard", "wandb"}.intersection(settings.training.trackers):
        need_packages(f"training.report_to: {tracker}", tracker, extra="train,track")
    if uses_vllm(settings, "colocate"):
        check_vllm(settings.backend_setting)
    is_first = os.environ.get("RANK", "0") == "0"
    log_findings(loaded.notes if is_first else ())
    loaded = use_local_model(loaded)
    settings = loaded.settings
    for missing in missing_files(settings):  # before anything heavy is imported
        raise DataError(f"{missing.subject}: {missing.problem}", missing.fix)
    folder = Path(settings.training.output_dir)
    _make_folder(folder)
    with hold_folder(folder, say) if is_first else nullcontext():
        checkpoint = choose_checkpoint(folder, resume, say) if is_first else None
        _check_device(settings.training)
        with progress("loading"):
            prepared = _prepare(loaded, checkpoint)
        if resume and is_first:
            start = f"resuming from {checkpoint}"
            say(start if checkpoint else f"no checkpoint in {folder}: from the beginning")
        outcome = _run(prepared)
    if is_first:
        say(f"{_describe_end(outcome)}; see {outcome.folder}")
    if outcome.stopped_by:
        from coordexp.train.stopping import exit_code

        raise typer.Exit(exit_code(outcome.stopped_by))


def _make_folder(folder: Path) -> None:
    """Make the run folder before anything slow. Raise UserError if it cannot be written."""
    fix = "set training.output_dir to a folder that you may write to"
    with explain(OSError, f"training.output_dir: {folder} cannot be written", fix, to=UserError):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("permission denied")


def _check_device(training: Training) -> None:
    """Raise UserError if the run needs a GPU and there is none. Of what a run imports, this needs only torch."""
    import torch

    half = next((name for name in ("bf16", "fp16") if getattr(training, name)), None)
    if half and not training.use_cpu and not torch.accelerator.is_available():
        raise UserError(
            f"training.{half}: true needs a GPU, but torch sees none",
            f"to train on a CPU, extend configs/cpu.yaml, which sets training.use_cpu: true and training.{half}: "
            "false; `coordexp doctor` shows what torch sees",
        )


def _prepare(loaded: Loaded, checkpoint: Path | None) -> "PreparedRun":
    from coordexp.train.run import prepare

    adopt_transformers()
    with explain_value_errors():
        return prepare(loaded, checkpoint)


def _run(prepared: "PreparedRun") -> "RunOutcome":
    from coordexp.ranks import to_rank_lost_error

    try:
        return prepared.run()
    except RuntimeError as error:  # a collective inside another library, such as DDP, does not name the lost rank
        if not isinstance(error, UserError) and (lost := to_rank_lost_error(error)):
            raise lost from error
        raise


def _describe_end(outcome: "RunOutcome") -> str:
    if not outcome.stopped_by:
        return f"done: step {outcome.steps}"
    if not outcome.steps:
        return "stopped by a signal before the first step, so there is nothing to save"
    if outcome.saved:
        return f"stopped by a signal after step {outcome.steps}, which is saved; --resume continues"
    return (
        f"stopped by a signal after step {outcome.steps}, which is not saved; --resume continues from the "
        "newest checkpoint, if there is one"
    )
