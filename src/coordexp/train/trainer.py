"""The Hugging Face Trainer on packed rows. It knows nothing of detection: rows come with their supervision.

What differs from the plain Trainer: rows come from a `RowStream` that is part of every checkpoint, the loss is the
declared objective, normalised over all rows of the optimizer step on all ranks (D19), and evaluation lets the
model answer. A step that comes to a value which is not finite is not applied, and nothing such is saved.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import Trainer

from coordexp.config import RolloutContract
from coordexp.files import write_whole
from coordexp.objective import Objective, Tally, reduced_counts
from coordexp.objective.reduction import gradient_scale
from coordexp.pack import Example, PackingError, split_in_order
from coordexp.pack.collate import Collator, Row, Supervision, Watched, kind_counts
from coordexp.ranks import max_over_ranks, together
from coordexp.rollout.backend import RolloutBackend
from coordexp.train.callbacks import say
from coordexp.train.checkpoints import clear, rotate, saving, sync_checkpoint, write_manifest
from coordexp.train.divergence import (
    WAY_OUT,
    DivergenceError,
    Health,
    StepNumbers,
    check_weights,
    describe_broken,
)
from coordexp.train.stopping import StopOnSignal, Stopped
from coordexp.train.stream import RowStream

ABOUT = "coordexp.json"  # in every checkpoint: what to ask the model
T = TypeVar("T")
Evaluation = Callable[[int], dict[str, float]]
# Gets an example that was dumped, its logits and supervision, and the optimizer step as the log counts it.
Trace = Callable[[Watched, Tensor, Supervision, int], None]


class RowTrainer(Trainer):
    def __init__(
        self,
        *,
        objective: Objective,
        stream: RowStream,
        collate: Collator,
        evaluation: Evaluation | None,
        backend: RolloutBackend,
        stop: StopOnSignal,
        about: dict[str, Any],
        rollout_matching_cfg: RolloutContract,
        image_threads: int = 0,
        trace: Trace = lambda *_: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.objective = objective
        self.stream = stream
        self.collate = collate
        self.evaluation = evaluation
        self.backend = backend
        self.stop = stop
        self.about = about
        self.rollout_matching_cfg = rollout_matching_cfg
        self.trace = trace
        self.ledger = stream.ledger
        self.tally = Tally(objective)
        self.health = Health()
        self.saved: int | None = None  # the step of the newest checkpoint
        self._checkpoint_limit, self.args.save_total_limit = (
            self.args.save_total_limit,
            None,
        )  # `_rotate` alone removes
        self.rotation_is_due = False
        self.tokens = self.steps = 0
        self.loss_is_scaled_for_ga = True  # by the counts of the whole optimizer step
        self._parameters = sum(weight.numel() for weight in self.model.parameters())
        self._images = ThreadPoolExecutor(image_threads) if image_threads else None

    def get_train_dataloader(self) -> Any:
        return self.stream

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The examples of one optimizer step, and the counts of all of them on all ranks. Pictures are read when
        their row is made. With rollouts, this is where the model answers: all of a step with the same weights."""
        self.ledger.step_begins()
        rows = self._together(lambda: self._taken(epoch_iterator, num_batches))
        self.steps += 1
        self.tokens += sum(len(example) for row in rows for example in row)
        return rows, reduced_counts([kind_counts(row) for row in rows], device)

    def _taken(self, epoch_iterator: Iterator[Any], count: int) -> list[Any]:
        with self.backend.session():
            return [next(epoch_iterator) for _ in range(count)]

    def compute_loss(
        self, model: Any, inputs: Row, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        assert num_items_in_batch is not None
        logits = model(**inputs.inputs).logits[0]
        measures = self.objective.measure(logits, inputs.supervision)
        self.tally.add(measures, num_items_in_batch)
        self._trace_watched(inputs, logits.detach())
        return self.objective.loss(measures, num_items_in_batch) * gradient_scale()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm. Raise DivergenceError, before the optimizer step, if the step is broken.
        (DeepSpeed has stepped by now; it is the check of the weights that keeps the update from being saved.)"""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        terms, broken_logits, norm = self.tally.end_step(grad_norm)
        scaled = self.accelerator.scaler is not None
        numbers = StepNumbers(self.state.global_step + 1, terms, norm, broken_logits, scaled)
        self.health = self._health_after(numbers)
        if broken_logits and self.is_world_process_zero():
            say(
                f"warning: step {numbers.step}: {describe_broken(broken_logits)}; NaN counts as 0, the others as "
                "the bound, and none of them gets a gradient"
            )
        if self.health == Health():  # the weights of the newest checkpoint have worked
            self._rotate()
        return grad_norm

    def _health_after(self, numbers: StepNumbers) -> Health:
        try:
            return self.health.after(numbers)
        except DivergenceError as error:
            if (
                self.saved == self.state.global_step - self.health.broken_steps
            ):  # of the first step that was broken
                raise DivergenceError(
                    f"{error}\n  checkpoint-{self.saved} holds the weights that this began with; if they are the "
                    "cause, remove it to resume from an older one"
                ) from None
            raise

    def _trace_watched(self, row: Row, logits: Tensor) -> None:
        for one in row.watched:
            self.trace(one, logits[one.kept], row.supervision.at(one.kept), self.state.global_step + 1)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        evaluation = self.evaluation
        assert evaluation is not None, "evaluation was asked for without data"
        with self.stop.during("evaluation"):
            found = evaluation(self.state.global_step)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what the objective and the packer have to say to the Trainer's own line."""
        if "loss" in logs:
            logs |= self.tally.report(self.steps) | {"tokens": float(self.tokens)}
            logs |= self.ledger.report(self.steps)
            self.tokens = self.steps = 0
        if self.state.epoch is not None:
            self.state.epoch = self.stream.epoch
        super().log(logs, start_time)

    def _row(self, examples: tuple[Example, ...]) -> Row:
        with self.ledger.timed("pictures"):
            return self._collated(examples)

    def _collated(self, examples: tuple[Example, ...]) -> Row:
        if self._images is None:
            return self.collate(examples)
        sources = [(example.image, example.size) for example in examples]
        loaded = dict(
            zip(sources, self._images.map(lambda source: self.collate.pixels(*source), sources), strict=True)
        )
        return replace(self.collate, pixels=lambda *source: loaded[source])(examples)

    def _prepare_inputs(self, inputs: tuple[Example, ...]) -> Row:
        return self._together(lambda: self._row(inputs)).to(self.args.device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run a forward and a backward pass for each row of the micro-step. Their losses are shares of the loss of
        the optimizer step, so their gradients add up to that of the micro-step, in however many rows it is."""
        loss = torch.zeros((), device=self.args.device)
        with self.ledger.timed("compute", without=("pictures", "waited")):
            for row in self._rows_of(inputs):
                loss += super().training_step(model, row, num_items_in_batch)
        return loss

    def _rows_of(self, micro_step: tuple[Example, ...]) -> list[tuple[Example, ...]]:
        """Return the rows of a micro-step. With packing it is one, which was drawn under the cap. Without packing,
        a micro-batch with more tokens than a row may have is cut into several. DDP and FSDP need the same number
        of passes on every rank, so every rank makes as many rows as the rank that needs the most."""
        contract = self.rollout_matching_cfg
        if contract.packing or len(micro_step) == 1:  # all ranks have as many samples
            return [micro_step]
        lengths, cap = [len(example) for example in micro_step], contract.packing_length
        passes = max_over_ranks(len(split_in_order(lengths, cap)), waited=self._waited)
        if passes > 1 and self.is_deepspeed_enabled:
            raise PackingError(
                f"a micro-batch has more tokens than one row may have (global_max_length {cap}), and DeepSpeed "
                "would step its optimizer after each of several rows\n"
                "  lower training.per_device_train_batch_size, raise global_max_length, or set training.packing: "
                "true"
            )
        return [micro_step[part] for part in split_in_order(lengths, cap, at_least=passes)]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save, as is due. If the run is asked to stop meanwhile, it stops after this step: the
        evaluation is abandoned, and the step is saved."""
        self.ledger.step_ends()
        stops = self.stop.stopped_by is not None
        lasts = self.control.should_evaluate or self.control.should_save
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except Stopped:
            self.control.should_evaluate = False
        if lasts and not stops and self.stop.agreed():
            self.control.should_training_stop = True
            self.control.should_save = self.saved != self.state.global_step
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _together(self, work: Callable[[], T]) -> T:
        return together(work, waited=self._waited)

    def _waited(self, seconds: float) -> None:
        self.ledger.spent("waited", seconds)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save weights that are finite. The manifest comes last: a checkpoint that has it is complete. Older ones
        go only when another step has shown that the new weights work."""
        if self.health.broken_steps:
            self._leave_out_checkpoint()
            return
        check_weights(self.model, self.state.global_step)
        with self.stop.during("save"):
            self._save_whole(model, trial)

    def _save_whole(self, model: Any, trial: Any) -> None:
        checkpoint = self._checkpoint(self.state.global_step)
        first = self.is_world_process_zero()

        def write() -> None:
            super(RowTrainer, self)._save_checkpoint(model, trial)
            if first:
                write_whole(checkpoint / ABOUT, json.dumps(self.about) + "\n")

        with saving(checkpoint):
            together(lambda: clear(checkpoint) if first else None)  # was passed over: damaged or unfinished
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # they have collectives of their own in it
                write()
            else:
                together(write)
            together(lambda: self.stream.save(checkpoint))
            together(lambda: sync_checkpoint(checkpoint) if self.args.local_process_index == 0 else None)
            together(lambda: write_manifest(checkpoint, say) if first else None)
        self.saved, self.rotation_is_due = self.state.global_step, True
        if self.state.global_step >= self.state.max_steps:
            self._rotate()

    def _rotate(self) -> None:
        """Remove the oldest checkpoints beyond `save_total_limit`, if one was saved since."""
        due, self.rotation_is_due = self.rotation_is_due, False
        if due and self.saved is not None and self.args.should_save:
            rotate(self._checkpoint(self.saved), self._checkpoint_limit, self.state.best_model_checkpoint)

    def _checkpoint(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{step}"

    def _leave_out_checkpoint(self) -> None:
        step = self.state.global_step
        if step >= self.state.max_steps:
            raise DivergenceError(
                f"step {step}: the logits of the last step were broken, so it is not saved\n  {WAY_OUT}"
            )
        if self.is_world_process_zero():
            say(f"step {step}: no checkpoint is saved, because the logits of this step were broken")

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Weights that are tied to others are saved once, and so are not missing."""
        tied = self.accelerator.unwrap_model(self.model).all_tied_weights_keys
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def floating_point_ops(self, inputs: tuple[Example, ...]) -> int:
        """Six operations a parameter and token, by the usual estimate."""
        return 6 * sum(map(len, inputs)) * self._parameters

    def _track_num_input_tokens(self, inputs: tuple[Example, ...]) -> None:
        self.state.num_input_tokens_seen += sum(map(len, inputs)) * self.args.world_size
