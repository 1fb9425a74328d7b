"""The Hugging Face Trainer on packed rows. It knows nothing about detection: examples come with their
supervision.

In every optimizer step, the Trainer calls these methods of `RowTrainer`:

1. `get_batch_samples` collects the examples of all micro-steps (`collect_examples`: samples, weight sync,
   rollouts, corrections, packing), splits them into rows, counts their tokens over all ranks, and asks for the
   rollouts of the next steps, if these are made ahead.
2. `training_step`, once per micro-step, goes through its rows. `_prepare_inputs` gets the tensors of a row, which
   were made while the row before it was trained, `compute_loss` runs the forward pass, and the Trainer runs the
   backward pass.
3. `_get_grad_norm`, after the last micro-step, checks loss, logits and gradient norm. Then the optimizer steps.
4. `_maybe_log_save_evaluate` calls `log`, `evaluate` and `_save_checkpoint` if they are due.

Other differences from the plain Trainer: the sample order and the carry buffer are part of every checkpoint, the
loss is the declared objective, normalised over all rows of the optimizer step on all ranks, and evaluation lets
the model answer. A loss or gradient norm that is not finite stops the run before the update (the gradient scaler
of fp16 may skip some updates first). Weights that are not finite are never saved.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import Trainer

from coordexp.answers.formats import NOTE_FILE
from coordexp.config import RolloutContract
from coordexp.families import load_model
from coordexp.files import write_whole
from coordexp.objective.carry import Example, split_in_order
from coordexp.objective.collate import Collator, Row, kind_counts
from coordexp.objective.pipeline import LossTally, Objective, SetTally, gradient_scale, reduce_counts
from coordexp.objective.split import Split
from coordexp.ranks import max_over_ranks, together
from coordexp.rollout.backend import RolloutBackend
from coordexp.tasks import Task
from coordexp.train.callbacks import say
from coordexp.train.checkpoint_hook import CheckpointHook
from coordexp.train.checkpoints import clear, rotate, saving, sync_checkpoint, write_dtype, write_manifest
from coordexp.train.encode import Encoder
from coordexp.train.learner import Learner
from coordexp.train.metrics import StepMetrics
from coordexp.train.rollouts import RolloutSource
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
from coordexp.train.stream import RowStream

T = TypeVar("T")
Rows = Sequence[tuple[Example, ...]]  # the examples of each row of a micro-step
Evaluation = Callable[[int], dict[str, float]]
# Gets a row, the split logits of its supervised positions, and the optimizer step, numbered from 1, as in the log.
Trace = Callable[[Row, Split, int], None]


class RowTrainer(Trainer):
    def __init__(
        self,
        *,
        learner: Learner,
        objective: Objective,
        stream: RowStream,
        encoder: Encoder,
        rollouts: RolloutSource,
        collate: Collator,
        evaluations: Sequence[Evaluation],
        backend: RolloutBackend,
        stop: StopOnSignal,
        metrics: StepMetrics,
        note: dict[str, Any],
        rollout_matching_cfg: RolloutContract,
        image_threads: int = 0,
        trace: Trace | None = None,
        checkpoint_hook: CheckpointHook | None = None,
        set_names: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(model=learner.model, **kwargs)
        self.learner = learner
        self.objective = objective
        self.stream = stream
        self.encoder = encoder
        self.rollouts = rollouts
        self.evaluations = tuple(evaluations)
        self.backend = backend
        self.stop = stop
        self.metrics = metrics
        self.note = note
        self.rollout_matching_cfg = rollout_matching_cfg
        self.trace = trace
        self.checkpoint_hook = checkpoint_hook or CheckpointHook(None)
        self.tally = LossTally(objective)
        self.set_tally = SetTally(objective, set_names) if set_names else None
        self.health = Health()
        self.saved: int | None = None  # the step of the newest checkpoint
        # `_rotate` alone removes checkpoints.
        self._checkpoint_limit, self.args.save_total_limit = self.args.save_total_limit, None
        self.rotation_is_due = False
        self.tokens = self.steps = 0
        # So the Trainer does not divide the loss again: `compute_loss` divides by the counts of the whole step.
        self.loss_is_scaled_for_ga = True
        self._parameters = sum(weight.numel() for weight in self.model.parameters())
        self.row_loader = RowLoader(collate, image_threads, self.args.device)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Return the rows of one optimizer step, by micro-step, and their token counts over all ranks. The Trainer
        calls this before the first micro-step; `epoch_iterator` is not used."""
        self.metrics.begin_step()
        micro_steps = self._together(self.collect_examples)
        assert len(micro_steps) == num_batches
        rows = [self._split_rows(examples) for examples in micro_steps]
        self.row_loader.begin(itertools.chain(*rows))
        if self.rollouts.max_staleness:
            self._together(self.rollouts.ask_ahead)
        self.steps += 1
        self.tokens += sum(map(_count_tokens, rows))
        return rows, reduce_counts([kind_counts(examples) for examples in micro_steps], device)

    def collect_examples(self) -> list[tuple[Example, ...]]:
        """Return the examples of one optimizer step, by micro-step.

        In Stage 2, the engine gets the current weights, the model answers all samples of the step at once, and the
        answers are corrected. With `stage2.max_staleness`, the answers were made while earlier steps were trained.
        In Stage 1, and on channel A, examples are made from the ground truth. With packing, a row may also have
        examples that waited since an earlier step."""
        with self.backend.session():
            step = self.rollouts.next_step()
            return [self.stream.pack(self.encoder.encode(batch, rollouts)) for batch, rollouts in step]

    def training_step(self, model: Any, inputs: Rows, num_items_in_batch: Any = None) -> Tensor:
        """Run a forward and a backward pass for each row of the micro-step. The loss of a row is its share of
        the loss of the optimizer step, so gradients add up to the right sum however many rows there are."""
        loss = torch.zeros((), device=self.args.device)
        with self.metrics.measure("compute", without=("pictures", "waited")):
            for row in inputs:
                loss += super().training_step(model, row, num_items_in_batch)
        return loss

    def _prepare_inputs(self, inputs: tuple[Example, ...]) -> Row:
        with self.metrics.measure("pictures", without=("waited",)):
            row = self._together(partial(self.row_loader.take, inputs))
        return row.to(self.args.device)

    def compute_loss(
        self, model: Any, inputs: Row, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        """Return the share that a row has in the loss of the optimizer step. `num_items_in_batch` is not a number
        here, but a vector: the tokens of the whole step on all ranks, counted by `TokenKind`."""
        assert num_items_in_batch is not None
        request = self.objective.request_split(inputs.supervision)
        with self.learner.head.splitting(request):
            split = Split(model(**inputs.inputs).logits[0], request.temperatures)
        measures = self.objective.measure(split, inputs.supervision)
        self.tally.add(measures, num_items_in_batch)
        if self.set_tally is not None:
            self.set_tally.add(inputs, split, measures)
        if self.trace is not None:
            self.trace(inputs, split, self.state.global_step + 1)
        return self.objective.loss(measures, num_items_in_batch) * gradient_scale()

    def get_train_dataloader(self) -> Iterable[None]:
        """Return an iterable without an end. `get_batch_samples` does not read it."""
        return itertools.repeat(None)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Let accelerate wrap model and optimizer, and tell the learner."""
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.learner.model, self.learner.optimizer = self.model, self.optimizer
        return prepared

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm. Raise DivergenceError, before the optimizer steps, if one is not finite."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        terms, broken_logits, norm = self.tally.end_step(grad_norm)
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
        self.rollouts.wait()  # evaluation sends other weights, so no request may be open
        with self.stop.during("evaluation"):
            results = [evaluation(self.state.global_step) for evaluation in self.evaluations]
        metrics = {f"{metric_key_prefix}_{name}": value for part in results for name, value in part.items()}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the Trainer's own values, with those of the objective, the rollouts and the packing."""
        if "loss" in logs:
            logs |= self.tally.report(self.steps) | {"tokens": float(self.tokens)}
            logs |= self.metrics.report(self.steps)
            logs |= self.set_tally.report() if self.set_tally is not None else {}
            self.tokens = self.steps = 0
        if self.state.epoch is not None:
            self.state.epoch = self.stream.epoch
        super().log(logs, start_time)

    def _split_rows(self, micro_step: tuple[Example, ...]) -> list[tuple[Example, ...]]:
        """Return the rows of a micro-step. With packing there is one, which was drawn under the limit. Without
        packing, a micro-batch with more tokens than a row may have is cut into several rows. DDP and FSDP need
        the same number of passes on every rank, so every rank makes as many rows as the rank that needs the
        most."""
        contract = self.rollout_matching_cfg
        # This needs no collective: without packing, all ranks have equally many examples.
        if contract.packing or len(micro_step) == 1:
            return [micro_step]
        lengths, cap = [len(example) for example in micro_step], contract.packing_length
        passes = max_over_ranks(len(split_in_order(lengths, cap)), waited=self._add_waited)
        return [micro_step[part] for part in split_in_order(lengths, cap, at_least=passes)]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save, if that is due. If the run is asked to stop meanwhile, it stops after this
        step: the evaluation is abandoned, and the step is saved."""
        self.metrics.end_step()
        was_stopped = self.stop.stopped_by is not None
        takes_long = self.control.should_evaluate or self.control.should_save
        with suppress(Stopped):
            super()._maybe_log_save_evaluate(*args, **kwargs)
        if takes_long and not was_stopped and self.stop.agree_to_stop():
            self.control.should_evaluate = False
            self.control.should_training_stop = True
            self.control.should_save = self.saved != self.state.global_step
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _together(self, work: Callable[[], T]) -> T:
        return together(work, waited=self._add_waited)

    def _add_waited(self, seconds: float) -> None:
        self.metrics.add_seconds("waited", seconds)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the weights if they are finite. The manifest is written last: a checkpoint that has one is
        complete. Older checkpoints are removed only after another step has shown that the new weights work."""
        if self.health.broken_steps:
            self._skip_checkpoint()
            return
        check_weights(self.model, self.state.global_step)
        with self.stop.during("save"):
            self._write_checkpoint(model, trial)

    def _write_checkpoint(self, model: Any, trial: Any) -> None:
        checkpoint = self._checkpoint(self.state.global_step)
        first = self.is_world_process_zero()
        with saving(checkpoint):
            _together_if(first, clear, checkpoint)  # a damaged or unfinished one that the run did not resume from
            if self.is_fsdp_enabled:  # saving has collectives of its own
                self._write_model(checkpoint, model, trial)
            else:
                together(partial(self._write_model, checkpoint, model, trial))
            together(partial(self._save_stream, checkpoint))
            _together_if(self.args.local_process_index == 0, sync_checkpoint, checkpoint)
            _together_if(first, write_manifest, checkpoint, say)
        if first:
            self.checkpoint_hook.start(checkpoint)
        self.saved, self.rotation_is_due = self.state.global_step, True
        if self.state.global_step >= self.state.max_steps:
            self._rotate()

    def _save_stream(self, checkpoint: Path) -> None:
        self.rollouts.save(checkpoint)
        self.stream.save(checkpoint)

    def _write_model(self, checkpoint: Path, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.is_world_process_zero():
            write_whole(checkpoint / NOTE_FILE, json.dumps(self.note) + "\n")
            write_dtype(checkpoint, self.learner.dtype)

    def _rotate(self) -> None:
        """Remove the oldest checkpoints beyond `save_total_limit`, if one was saved since the last call."""
        due, self.rotation_is_due = self.rotation_is_due, False
        if due and self.saved is not None and self.args.should_save:
            rotate(self._checkpoint(self.saved), self._checkpoint_limit, self.state.best_model_checkpoint)

    def _checkpoint(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{step}"

    def _skip_checkpoint(self) -> None:
        step = self.state.global_step
        if step >= self.state.max_steps:
            raise DivergenceError(
                f"step {step}: the logits of the last step were broken, so it is not saved", WAY_OUT
            )
        if self.is_world_process_zero():
            say(f"step {step}: no checkpoint is saved, because the logits of this step were broken")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint to continue from. transformers would load whole weights under the names
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
        return 6 * _count_tokens(inputs) * self._parameters

    def _track_num_input_tokens(self, inputs: Rows) -> None:
        self.state.num_input_tokens_seen += _count_tokens(inputs) * self.args.world_size


class RowLoader:
    """Makes the tensors of rows in another thread, one row ahead: the images of the next row are read while a row
    is trained. So at most two rows are in memory. With `image_threads`, the images of a row are read in
    parallel."""

    def __init__(self, collate: Collator, image_threads: int, device: torch.device) -> None:
        self.collate, self.device = collate, device
        self._readers = ThreadPoolExecutor(image_threads) if image_threads else None
        self._rows: deque[tuple[Example, ...]] = deque()
        self._next: tuple[tuple[Example, ...], Task[Row]] | None = None

    def begin(self, rows: Iterable[tuple[Example, ...]]) -> None:
        """Begin with the first of these rows."""
        self._rows = deque(rows)
        self._load_next()

    def take(self, examples: tuple[Example, ...]) -> Row:
        """Return the tensors of a row, which must be the next one, and begin with the one after it."""
        assert self._next is not None and self._next[0] is examples
        row = self._next[1].result()
        self._load_next()
        return row

    def _load_next(self) -> None:
        examples = self._rows.popleft() if self._rows else None
        self._next = (examples, Task(self._load, examples)) if examples is not None else None

    def _load(self, examples: tuple[Example, ...]) -> Row:
        row = self._collate(examples)
        if self.device.type != "cuda":
            return row
        torch.cuda.set_device(self.device)  # this thread would use the first GPU
        return row.pin()

    def _collate(self, examples: tuple[Example, ...]) -> Row:
        if self._readers is None:
            return self.collate(examples)
        sources = [(example.image, example.size) for example in examples if example.image is not None]
        if not sources:
            return self.collate(examples)
        pixels = self._readers.map(self.collate.pixels, *zip(*sources, strict=True))
        loaded = dict(zip(sources, pixels, strict=True))
        return replace(self.collate, pixels=lambda image, size: loaded[image, size])(examples)


def _count_tokens(rows: Rows) -> int:
    return sum(len(example) for row in rows for example in row)


def _together_if(condition: bool, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work` on the ranks where the condition is true. If it fails on any of them, raise on all ranks."""
    together(partial(work, *arguments) if condition else _do_nothing)


def _do_nothing() -> None:
    pass
