"""The part of a training step that makes examples, as the trainer runs it, for records that a test chooses."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import SimpleNamespace

from coordexp.config import RolloutMatching
from coordexp.objective.carry import Example
from coordexp.rollout.backend import RolloutBackend
from coordexp.train.encode import Encoder, StepIndex, StepPlan, TrainingSet, Watch
from coordexp.train.metrics import StepMetrics
from coordexp.train.rollouts import RolloutSource
from coordexp.train.step import OptimizerSteps


def no_weights() -> Iterator[tuple[str, object]]:
    return iter(())


@dataclass(frozen=True)
class RolloutStep:
    """Calls `OptimizerSteps.collect_examples` without a model; the stream gives the records of the call, and packs
    nothing."""

    training_set: TrainingSet
    backend: RolloutBackend
    settings: RolloutMatching
    rank: int = 0
    metrics: StepMetrics = field(default_factory=StepMetrics)
    watch: Watch | None = None
    weights: Callable[[], Iterator[tuple[str, object]]] = no_weights
    b_ratio: Fraction = Fraction(1)

    @property
    def encoder(self) -> Encoder:
        training_set = replace(self.training_set, settings=self.settings)
        return Encoder(training_set, 17, self.rank, self.metrics, self.b_ratio, self.watch)

    def on(self, stream: object) -> OptimizerSteps:
        """Return the steps of a stream. They cannot be trained."""
        return OptimizerSteps(
            rollouts=RolloutSource(stream, self.encoder, self.backend, self.weights, self.metrics),
            objective=SimpleNamespace(terms=()),
            head=None,
            loader=None,
            rollout_matching_cfg=self.settings,
        )

    def __call__(self, indices: Sequence[int], at: StepIndex) -> list[Example]:
        records = (*((),) * at.micro, tuple(indices))
        stream = SimpleNamespace(
            next_step=at.step,
            accumulation=len(records),
            plan_step=lambda: StepPlan(at.step, records),
            plan_micro_step=iter(records).__next__,
            pack=list,
            has_plans=False,
        )
        return self.on(stream).collect_examples()[-1]
