"""The Hugging Face Trainer on packed rows. It knows nothing about detection: examples come with their supervision.

In every optimizer step, the Trainer calls these methods of `RowTrainer`:

1. `get_batch_samples` calls `OptimizerSteps.make_rows`, which makes the rows of all micro-steps.
2. `training_step`, once per micro-step, trains on its rows: `compute_loss` runs the forward pass, and the Trainer
   the backward pass.
3. `_get_grad_norm`, after the last micro-step, checks loss, logits and gradient norm. Then the optimizer steps.
4. `_maybe_log_save_evaluate` calls `log`, `evaluate` and `_save_checkpoint` if they are due.

Four of these methods, and `_load_from_checkpoint`, are no part of the Trainer's interface. Each says why it is
needed.

Other differences from the plain Trainer: the sample order and the carry buffer are part of every checkpoint, the
loss is the declared objective, normalised over all rows of the optimizer step on all ranks, and evaluation lets
the model answer. A loss or gradient norm that is not finite stops the run before the update (the gradient scaler
of fp16 may skip some updates first). Weights that are not finite are never saved.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from coordexp.config import RolloutContract
from coordexp.families import load_model
from coordexp.logs import say
from coordexp.ranks import RankLostError, together
from coordexp.rollout.backend import RolloutBackend
from coordexp.tasks import ignore
from coordexp.train.checkpoints import clear, rotate, saving, sync_checkpoint, write_manifest
from coordexp.train.learner import Learner
from coordexp.train.step import OptimizerSteps, Rows, count_tokens
from coordexp.train.stopping import (
    WAY_OUT,
    DivergenceError,
    Health,
    StepNumbers,
    StopOnSignal,
    Stopped,
    check_weights,
    describe_broken,
)

Evaluation = Callable[[int], dict[str, float]]


class RowTrainer(Trainer):
    def __init__(
        self,
        learner: Learner,
        steps: OptimizerSteps,
        evaluations: Sequence[Evaluation],
        stop: StopOnSignal,
        **options: Any,
    ) -> None:
        """`options` are those of the Trainer: `args`, `processing_class` and `callbacks`."""
        super().__init__(model=learner.model, eval_dataset=[*evaluations] or None, **options)
        self.learner, self.steps, self.evaluations, self.stop = learner, steps, tuple(evaluations), stop
        self.health = Health()
        self.saved: int | None = None  # the step of the newest checkpoint
        # `_rotate` alone removes checkpoints.
        self._checkpoint_limit, self.args.save_total_limit = self.args.save_total_limit, None
        self.rotation_is_due = False
        # So the Trainer does not divide the loss again: `compute_loss` divides by the counts of the whole step.
        self.loss_is_scaled_for_ga = True
        self._parameters = sum(weight.numel() for weight in self.model.parameters())

    @property
    def rollout_matching_cfg(self) -> RolloutContract:
        return self.steps.rollout_matching_cfg

    @property
    def backend(self) -> RolloutBackend:
        return self.steps.rollouts.backend

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Return the rows of one optimizer step, by micro-step, and their token counts over all ranks. The Trainer
        calls this before the first micro-step; `epoch_iterator` is not used."""
        micro_steps, counts = self.steps.make_rows(device)
        assert len(micro_steps) == num_batches
        return micro_steps, counts

    def training_step(self, model: Any, inputs: Rows, num_items_in_batch: Any = None) -> Tensor:
        """Run a forward and a backward pass for each row of the micro-step. The loss of a row is its share of
        the loss of the optimizer step, so gradients add up to the right sum however many rows there are."""
        loss = torch.zeros((), device=self.args.device)
        with self.steps.metrics.measure("compute", without=("pictures", "waited")):
            for examples in inputs:
                loss += super().training_step(model, {"row": self.steps.load(examples)}, num_items_in_batch)
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        """Return the share that a row has in the loss of the optimizer step. `num_items_in_batch` is not a number
        here, but a vector: the tokens of the whole step on all ranks, counted by `TokenKind`."""
        assert num_items_in_batch is not None
        return self.steps.compute_loss(model, inputs["row"], num_items_in_batch, self.state.global_step + 1)

    def get_train_dataloader(self) -> Iterable[None]:
        """Return an iterable without an end. `get_batch_samples` does not read it."""
        return itertools.repeat(None)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm. Raise DivergenceError, before the optimizer steps, if one is not finite. No
        callback that comes before the optimizer gets the norm."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        terms, broken_logits, norm = self.steps.tally.end_step(grad_norm)
        scaled = self.accelerator.scaler is not None
        numbers = StepNumbers(self.state.global_step + 1, terms, norm, broken_logits, scaled)
        self.health = self.health.after(numbers, self._describe_start())
        if broken_logits and self.is_world_process_zero():
            say(
                f"warning: step {numbers.step}: {describe_broken(broken_logits)}; NaN counts as 0, the others are "
                "clamped to the bound, and none of them gets a gradient"
            )
        if self.health == Health():  # the weights of the newest checkpoint have worked
            self._rotate()
        return grad_norm

    def _describe_start(self) -> str:
        """Return advice on the newest checkpoint, if the first broken step began with its weights."""
        if self.saved != self.state.global_step - self.health.broken_steps:
            return ""
        return (
            f"checkpoint-{self.saved} holds the weights that this began with; if they are the cause, remove it to "
            "resume from an older one"
        )

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        assert self.evaluations, "evaluation was asked for without data"
        self.steps.rollouts.wait()  # evaluation sends other weights, so no request may be open
        results = [evaluation(self.state.global_step) for evaluation in self.evaluations]
        metrics = {f"{metric_key_prefix}_{name}": value for part in results for name, value in part.items()}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the Trainer's own values, with those of the objective, the rollouts and the packing."""
        if "loss" in logs:
            logs |= self.steps.report()
        if self.state.epoch is not None:
            self.state.epoch = self.steps.stream.epoch
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save, if that is due. If the run is asked to stop meanwhile, it stops after this
        step: the evaluation is abandoned, and the step is saved. The Trainer asks no callback in between."""
        self.steps.metrics.end_step()
        was_stopped = self.stop.stopped_by is not None
        takes_long = self.control.should_evaluate or self.control.should_save
        with suppress(Stopped):
            super()._maybe_log_save_evaluate(*args, **kwargs)
        if takes_long and not was_stopped and self.stop.agree_to_stop():
            self.control.should_evaluate = False
            self.control.should_training_stop = True
            self.control.should_save = self.saved != self.state.global_step
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the weights if they are finite. The manifest is written last: a checkpoint that has one is
        complete. Older checkpoints are removed only after another step has shown that the new weights work. The
        Trainer would save anything, remove an older checkpoint at once, and know no manifest."""
        step, first = self.state.global_step, self.is_world_process_zero()
        if self.health.broken_steps and step >= self.state.max_steps:
            raise DivergenceError(
                f"step {step}: the logits of the last step were broken, so it is not saved", WAY_OUT
            )
        if self.health.broken_steps:
            if first:
                say(f"step {step}: no checkpoint is saved, because the logits of this step were broken")
            return
        check_weights(self.model, step)
        checkpoint = self._checkpoint(step)
        with saving(checkpoint):
            together(partial(clear, checkpoint) if first else ignore)  # it may be there, damaged or unfinished
            if self.is_fsdp_enabled:  # saving has collectives of its own
                self._write_model(checkpoint, model, trial)
            else:
                together(partial(self._write_model, checkpoint, model, trial))
            together(partial(self.steps.rollouts.save, checkpoint))
            together(partial(sync_checkpoint, checkpoint) if self.args.local_process_index == 0 else ignore)
            together(partial(write_manifest, checkpoint, say) if first else ignore)
        self.saved, self.rotation_is_due = step, True
        if step >= self.state.max_steps:
            self._rotate()

    def _write_model(self, checkpoint: Path, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.is_world_process_zero():
            self.learner.describe(checkpoint)

    def _rotate(self) -> None:
        """Remove the oldest checkpoints beyond `save_total_limit`, if one was saved since the last call."""
        due, self.rotation_is_due = self.rotation_is_due, False
        if due and self.saved is not None and self.args.should_save:
            rotate(self._checkpoint(self.saved), self._checkpoint_limit, self.state.best_model_checkpoint)

    def _checkpoint(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{step}"

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint to continue from. The Trainer would load whole weights under the names
        and in the layout of the file, which are not those in memory for every family. An adapter alone has no
        config.json."""
        folder = Path(resume_from_checkpoint)
        if self.is_fsdp_enabled or not (folder / "config.json").is_file():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            saved = load_model(folder, dtype=self.learner.base.dtype)
            self.learner.base.load_state_dict(saved.state_dict())

    def floating_point_ops(self, inputs: Rows) -> int:
        """Return the usual estimate: six operations per parameter and token."""
        return 6 * count_tokens(inputs) * self._parameters


class FirstSync(TrainerCallback):
    """Hands the learner what accelerate has made of its model, starts the engine and sends it the weights, before
    the first step, so that a problem with it is reported early. A start that fails because a signal has stopped
    the run is not an error."""

    def __init__(self, backend: RolloutBackend, learner: Learner, stop: StopOnSignal) -> None:
        self.backend, self.learner, self.stop = backend, learner, stop

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        self.learner.model, self.learner.optimizer = model, optimizer
        try:
            together(partial(self._sync, state.global_step))
        except RankLostError:  # the ranks cannot agree any more
            raise
        except Exception:  # it is raised on all ranks or on none
            if self.stop.agree_to_stop():
                raise Stopped from None
            raise

    def _sync(self, version: int) -> None:
        with self.backend.session():
            self.backend.sync(self.learner.weights, version)
