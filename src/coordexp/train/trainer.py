"""The Hugging Face Trainer on packed rows. It knows nothing of detection: rows come with their supervision.

What differs from the plain Trainer: rows come from a `RowStream` that is part of every checkpoint, the loss is the
declared objective, normalised over all rows of the optimizer step on all ranks (D19), and evaluation lets the
model answer.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Trainer

from coordexp.objective import Objective, Tally, reduced_counts
from coordexp.objective.reduction import gradient_scale
from coordexp.pack import Example
from coordexp.pack.collate import Collator, Row, kind_counts
from coordexp.train.stream import RowStream

ABOUT = "coordexp.json"  # in every checkpoint: what to ask the model
Evaluation = Callable[[Any, int], dict[str, float]]


class RowTrainer(Trainer):
    def __init__(
        self,
        *,
        objective: Objective,
        stream: RowStream,
        collate: Collator,
        evaluation: Evaluation | None,
        about: dict[str, Any],
        image_threads: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.objective = objective
        self.stream = stream
        self.collate = collate
        self.evaluation = evaluation
        self.about = about
        self.tally = Tally(objective)
        self.tokens = self.steps = 0
        self.loss_is_scaled_for_ga = True  # by the counts of the whole optimizer step
        self._parameters = sum(weight.numel() for weight in self.model.parameters())
        self._images = ThreadPoolExecutor(image_threads) if image_threads else None

    def get_train_dataloader(self) -> Any:
        return self.stream

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The examples of one optimizer step, and the counts of all of them on all ranks. Pictures are read when
        their row is made."""
        rows = [next(epoch_iterator) for _ in range(num_batches)]
        self.steps += 1
        self.tokens += sum(len(example) for row in rows for example in row)
        return rows, reduced_counts([kind_counts(row) for row in rows], device)

    def compute_loss(
        self, model: Any, inputs: Row, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        assert num_items_in_batch is not None
        logits = model(**inputs.inputs).logits[0]
        measures = self.objective.measure(logits, inputs.supervision)
        self.tally.add(measures, num_items_in_batch)
        return self.objective.loss(measures, num_items_in_batch) * gradient_scale()

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        assert self.evaluation is not None, "evaluation was asked for without data"
        found = self.evaluation(self.model, self.state.global_step)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what the objective and the packer have to say to the Trainer's own line."""
        if "loss" in logs:
            logs |= self.tally.report(self.steps) | {"tokens": float(self.tokens)}
            self.tokens = self.steps = 0
            if (row := self.stream.last_report) is not None:
                logs |= {f"packing/{name}": float(value) for name, value in vars(row).items()}
        if self.state.epoch is not None:
            self.state.epoch = self.stream.epoch
        super().log(logs, start_time)

    def _row(self, examples: tuple[Example, ...]) -> Row:
        if self._images is None:
            return self.collate(examples)
        sources = [(example.image, example.size) for example in examples]
        loaded = dict(
            zip(sources, self._images.map(lambda source: self.collate.pixels(*source), sources), strict=True)
        )
        return replace(self.collate, pixels=lambda *source: loaded[source])(examples)

    def _prepare_inputs(self, inputs: tuple[Example, ...]) -> Row:
        return self._row(inputs).to(self.args.device)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The stream comes last: a checkpoint that has it is whole."""
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():
            (folder / ABOUT).write_text(json.dumps(self.about) + "\n")
        self.stream.save(folder)

    def floating_point_ops(self, inputs: tuple[Example, ...]) -> int:
        """Six operations a parameter and token, by the usual estimate."""
        return 6 * sum(map(len, inputs)) * self._parameters

    def _track_num_input_tokens(self, inputs: tuple[Example, ...]) -> None:
        self.state.num_input_tokens_seen += sum(map(len, inputs)) * self.args.world_size
