"""The samples of each optimizer step with their rollouts, which are asked for in one call.

With `stage2.max_staleness: 0`, a step is trained on rollouts of its own weights: the engine gets the weights,
answers, and waits while the learner trains. With a `max_staleness` of k, the rollouts of the next k steps are
asked for when a step has its own, and are made while the learner trains. The weights are sent once in k steps,
when all rollouts that were asked for have arrived. So the rollouts of a step are at most k updates old.

A checkpoint has the rollouts that were asked for ahead of time, so a resumed run trains on the same ones.
"""

import itertools
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.errors import UserError, explain
from coordexp.files import write_whole
from coordexp.ranks import sum_over_ranks
from coordexp.rollout.backend import Rollout, RolloutBackend, RolloutStarter, StartedRollouts, Weights
from coordexp.train.encode import Encoder, MicroBatch, StepIndex, StepPlan
from coordexp.train.metrics import StepMetrics
from coordexp.train.stream import RowStream

FORMAT = 1  # of the rollouts in a checkpoint


@dataclass
class PlannedStep:
    """An optimizer step and the rollouts of its requests that have arrived, with a handle for those that are still
    being made. `is_saved` is True for a step from a checkpoint."""

    plan: StepPlan
    batches: Sequence[MicroBatch]
    rollouts: list[Rollout | None]
    started: StartedRollouts | None = None
    is_saved: bool = False


class RolloutSource:
    """Plans the steps of one rank, and gets their rollouts. No rollouts are asked for beyond step `max_steps`."""

    def __init__(
        self,
        stream: RowStream,
        encoder: Encoder,
        backend: RolloutBackend,
        weights: Weights,
        metrics: StepMetrics,
        max_staleness: int = 0,
        max_steps: int = 0,
    ) -> None:
        self.stream, self.encoder, self.backend = stream, encoder, backend
        self.weights, self.metrics = weights, metrics
        self.max_staleness, self.max_steps = max_staleness, max_steps
        self._step, self._micro = -1, 0  # the step that has begun, and how many micro-batches were planned in it
        self._ready: deque[tuple[MicroBatch, Sequence[Rollout]]] | None = None  # None if they are planned later
        self._ahead: deque[PlannedStep] = deque()
        if max_staleness and not isinstance(backend, RolloutStarter):
            raise UserError(
                f"stage2.max_staleness: {max_staleness}, but {type(backend).__name__} cannot make rollouts while "
                "the learner trains: it has no `start` and `finish`",
                "set stage2.max_staleness: 0, or use rollout servers (rollout_matching.vllm.mode: server)",
            )

    def make_rollouts(self) -> None:
        """Begin the next optimizer step. If it takes rollouts, plan all of its samples, give the engine the
        current weights, and let it answer all of them, unless that was done ahead of time. All ranks call this
        together, since generation may contain collectives."""
        if self._ahead:
            step = self._ahead.popleft()
        elif self.encoder.takes_rollouts(self.stream.next_step):
            step = self._plan_step()
        else:
            self._step, self._micro, self._ready = self.stream.next_step, 0, None
            return
        self._step = step.plan.step
        rollouts = iter(self._complete(step) if self.encoder.takes_rollouts(self._step) else ())
        self._ready = deque((batch, [*itertools.islice(rollouts, len(batch.requests))]) for batch in step.batches)

    def next_micro_batch(self) -> tuple[MicroBatch, Sequence[Rollout]]:
        """Return the next micro-batch of the step, with the rollouts of its requests. The one before it must be
        packed: without rollouts, a micro-batch is planned only now, by what has been packed so far."""
        if self._ready is not None:
            return self._ready.popleft()
        assert not self.stream.has_plans, "a micro-batch has to be packed before the next one is taken"
        at = StepIndex(self._step, self._micro)
        self._micro += 1
        return self.encoder.prepare_micro_step(at, self.stream.plan_micro_step()), ()

    def ask_ahead(self) -> None:
        """Ask for the rollouts of the next steps, if none are left. To be called when the examples of the current
        step are packed: they decide how many samples the next one takes."""
        if self._ahead:
            return
        last = min(self._step + self.max_staleness, self.max_steps - 1)
        self._ahead.extend(self._plan_step() for _ in range(self._step, last))
        with_rollouts = [step for step in self._ahead if self.encoder.takes_rollouts(step.plan.step)]
        if with_rollouts:
            assert isinstance(self.backend, RolloutStarter)
            self._sync()
            started = self.backend.start([_requests(step.batches) for step in with_rollouts])
            for step, rollouts in zip(with_rollouts, started, strict=True):
                step.started = rollouts

    def wait(self) -> None:
        """Wait until no rollout is being made any more, on this rank."""
        for step in self._ahead:
            if step.started is not None:
                step.started.wait()

    def _complete(self, step: PlannedStep) -> list[Rollout]:
        """Return the rollouts of a step. Those that are not being made are asked for now, on all ranks."""
        if step.started is not None:
            assert isinstance(self.backend, RolloutStarter)
            with self.metrics.measure("rollout"):
                rollouts = self.backend.finish(step.started, version=self._step)
            self.metrics.add_seconds("rollout_ahead", step.started.seconds)
            return rollouts
        if self.encoder.uses_noise:
            return self.encoder.make_noisy_rollouts(step.batches)
        missing = [k for k, rollout in enumerate(step.rollouts) if rollout is None]
        requests = _requests(step.batches)
        if step.is_saved and not sum_over_ranks([len(missing)])[0]:
            return [rollout for rollout in step.rollouts if rollout is not None]
        self._sync()
        with self.metrics.measure("rollout"):
            made = self.backend.generate([requests[k] for k in missing])
        there = dict(zip(missing, made, strict=True))
        return [rollout or there[k] for k, rollout in enumerate(step.rollouts)]

    def _sync(self) -> None:
        with self.metrics.measure("sync"):
            self.backend.sync(self.weights, version=self._step)

    def _plan_step(self) -> PlannedStep:
        return self._prepare(self.stream.plan_step())

    def _prepare(self, plan: StepPlan) -> PlannedStep:
        batches = self.encoder.prepare(plan)
        return PlannedStep(plan, batches, [None] * len(_requests(batches)))

    # State

    def save(self, folder: Path) -> None:
        """Save the stream, and the steps that are planned ahead with their rollouts. Rollouts that no server could
        make are asked for again after a resume."""
        self.wait()
        self.stream.save(folder)
        steps = []
        for step in self._ahead:
            rollouts = step.started.rollouts if step.started is not None else step.rollouts
            texts = [None if rollout is None else _to_json(rollout) for rollout in rollouts]
            steps.append({"step": step.plan.step, "records": step.plan.records, "rollouts": texts})
        if steps:
            write_whole(self._file(folder), json.dumps({"format": FORMAT, "steps": steps}) + "\n")

    def load(self, folder: Path) -> None:
        """Continue with the stream of a checkpoint, and with the steps that it has planned ahead. It has no plans
        if the number of ranks has changed."""
        self.stream.load(folder)
        file = self._file(folder)
        if not file.is_file() or not self.stream.has_plans:
            return
        problem = f"{file} does not hold rollouts of this version"
        with explain((KeyError, TypeError, ValueError), problem, "resume from another checkpoint"):
            state = json.loads(file.read_text(encoding="utf-8"))
            if state["format"] != FORMAT:
                raise ValueError(f"it has format {state['format']}, and this version reads {FORMAT}")
            self._ahead = deque(map(self._read_step, state["steps"]))

    def _read_step(self, saved: dict[str, Any]) -> PlannedStep:
        plan = StepPlan(saved["step"], tuple(map(tuple, saved["records"])))
        step = self._prepare(plan)
        per_sample = self.encoder.training_set.settings.rollouts_per_sample
        prompts = [
            sample.prompt_ids for batch in step.batches for sample in batch.asked for _ in range(per_sample)
        ]
        table = self.encoder.training_set.table
        step.rollouts = [
            None if values is None else Rollout.of(table, prompt_ids, **values)
            for prompt_ids, values in zip(prompts if step.rollouts else [], saved["rollouts"], strict=True)
        ]
        step.is_saved = True
        return step

    def _file(self, folder: Path) -> Path:
        return folder / f"rollouts_{self.stream.order.rank}.json"


def _requests(batches: Sequence[MicroBatch]) -> list[Any]:
    return [request for batch in batches for request in batch.requests]


def _to_json(rollout: Rollout) -> dict[str, Any]:
    """Return what `Rollout.of` needs besides the vocabulary and the prompt."""
    return {
        "ids": rollout.ids,
        "logprobs": rollout.logprobs,
        "finish_reason": rollout.finish_reason,
        "version": rollout.version,
    }
