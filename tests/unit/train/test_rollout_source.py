"""Rollouts that are asked for before their step: which weights make them, and what a checkpoint has of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pytest

from coordexp.data import TrueObject
from coordexp.errors import EngineError
from coordexp.objective.carry import CarryBuffer
from coordexp.rollout.backend import Rollout, check_version
from coordexp.train.encode import Encoder
from coordexp.train.metrics import StepMetrics
from coordexp.train.rollouts import RolloutSource
from coordexp.train.stream import RowStream, SampleOrder
from tests.rollouts import PROMPT
from tests.scripted import Said, ScriptedBackend, write_training_set
from tests.steps import no_weights
from tests.unit.answers.conftest import box
from tests.vocabularies import table

QWEN = table("qwen")
CUP = TrueObject("cup", box(100, 100, 200, 200))
TRUTH = {f"{k}.png": (CUP,) for k in range(5)}
SCRIPT = {name: Said("{}" if k % 2 else "") for k, name in enumerate(TRUTH)}


@dataclass
class Started:
    rollouts: list
    is_over: bool = False  # it was waited for
    seconds: float = 0.5

    def wait(self) -> None:
        self.is_over = True


@dataclass
class FakeStarter(ScriptedBackend):
    """Makes rollouts of the last sync at once, and notes what is asked in which order. Those of the requests in
    `lost` cannot be made before they are finished."""

    events: list = field(default_factory=list)
    lost: set = field(default_factory=set)
    open: list = field(default_factory=list)

    def sync(self, weights, version):
        assert all(started.is_over for started in self.open), "weights change under requests"
        if not self.synced or self.synced[-1][1] != version:
            self.events.append(("sync", version))
        super().sync(weights, version)

    def generate(self, requests):
        self.events.append(("generate", len(requests)))
        return super().generate(requests)

    def start(self, steps):
        self.events.append(("start", *map(len, steps)))
        started = []
        for requests in steps:
            rollouts = super().generate(requests)
            started.append(Started([None if k in self.lost else answer for k, answer in enumerate(rollouts)]))
        self.open += started
        return started

    def finish(self, started, version):
        self.events.append(("finish", version))
        started.wait()
        newer = Rollout.of(QWEN, PROMPT, (), (), "stop", version)
        return [rollout or newer for rollout in started.rollouts]


class Learner:
    """A learner of one rank, without a model. It takes two samples in each of two micro-steps."""

    def __init__(
        self,
        folder: Path,
        max_staleness: int,
        *,
        max_steps=9,
        b_ratio=Fraction(1),
        room=None,
        training_set=None,
        backend=None,
    ) -> None:
        training_set = training_set or write_training_set(folder, TRUTH, QWEN)
        self.backend, self.metrics = backend or FakeStarter(SCRIPT, QWEN), StepMetrics()
        order = SampleOrder(len(training_set), 0, 1, seed=3, shuffled=True)
        buffer = CarryBuffer(room, 50) if room else None
        self.stream = RowStream(order, 2, buffer, max_length=999, accumulation=2)
        self.encoder = Encoder(training_set, 17, 0, self.metrics, b_ratio, max_staleness=max_staleness)
        self.source = RolloutSource(
            self.stream, self.encoder, self.backend, no_weights, self.metrics, max_staleness, max_steps
        )

    def train(self, steps: int) -> list:
        """Return what is trained on in each step: images, ids and versions, by micro-step."""
        trained = []
        for _ in range(steps):
            self.source.make_rollouts()
            rows, versions = [], []
            for _ in range(self.stream.accumulation):
                batch, rollouts = self.source.next_micro_batch()
                versions.append([rollout.version for rollout in rollouts])
                rows.append(self.stream.pack(self.encoder.encode(batch, rollouts)))
            self.source.ask_ahead()
            examples = [
                [(example.image, example.channel, tuple(example.segment.ids)) for example in row] for row in rows
            ]
            trained.append((examples, versions))
        return trained


def versions(trained: list) -> list[int]:
    """Return the version of each step's rollouts, which is the same for all of them."""
    of_steps = [{version for part in parts for version in part} for _, parts in trained]
    assert all(len(distinct) == 1 for distinct in of_steps)
    return [distinct.pop() for distinct in of_steps]


@pytest.mark.parametrize(
    ("max_staleness", "expected"),
    [(0, [0, 1, 2, 3, 4, 5, 6]), (1, [0, 0, 1, 2, 3, 4, 5]), (2, [0, 0, 0, 2, 2, 4, 4])],
)
def test_rollouts_are_of_the_newest_weights_that_the_bound_allows(tmp_path, max_staleness, expected):
    learner = Learner(tmp_path, max_staleness)
    assert versions(learner.train(7)) == expected
    mean = sum(step - version for step, version in enumerate(expected)) / 7
    assert learner.metrics.report(7)["rollout/staleness"] == pytest.approx(mean)


def test_with_a_bound_of_1_the_next_steps_rollouts_are_asked_for_when_those_of_the_step_are_there(tmp_path):
    learner = Learner(tmp_path, 1)
    learner.train(3)
    assert learner.backend.events == [
        *[("sync", 0), ("generate", 4), ("start", 4)],
        *[("finish", 1), ("sync", 1), ("start", 4)],
        *[("finish", 2), ("sync", 2), ("start", 4)],
    ]


def test_evaluation_may_send_newer_weights_between_asking_and_training(tmp_path):
    learner = Learner(tmp_path, 1)
    learner.train(2)
    learner.source.wait()
    learner.backend.sync(no_weights, version=2)
    assert versions(learner.train(2)) == [1, 2]


def test_no_rollouts_are_asked_for_beyond_the_last_step(tmp_path):
    for max_staleness in (1, 2):
        learner = Learner(tmp_path, max_staleness, max_steps=4)
        learner.train(4)
        asked = sum(sum(event[1:]) for event in learner.backend.events if event[0] in ("start", "generate"))
        assert asked == 4 * 4


def check_resume(make: Callable[[], Learner], folder: Path, first: int) -> list:
    """Assert that a learner that is resumed after some steps trains on what an uninterrupted one trains on. Return
    this."""
    whole, begun, resumed = make().train(8), make(), make()
    before = begun.train(first)
    begun.source.save(folder)
    resumed.source.load(folder)
    resumed.backend.sync(no_weights, version=first)  # as at the start of every run
    assert before + resumed.train(8 - first) == whole
    assert begun.train(8 - first) == whole[first:], "saving changes nothing"
    return whole


@pytest.mark.parametrize("room", [None, 40])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_resumed_run_trains_on_the_rollouts_that_were_asked_for_before(tmp_path, max_staleness, first, room):
    check_resume(lambda: Learner(tmp_path, max_staleness, room=room), tmp_path, first)


@pytest.mark.parametrize("b_ratio", [Fraction(0), Fraction(1)])
def test_without_rollouts_each_micro_batch_is_planned_when_the_one_before_it_is_packed(tmp_path, b_ratio):
    learner, events = Learner(tmp_path, 0, b_ratio=b_ratio, room=220), []

    def note(name):
        original = getattr(learner.stream, name)

        def call(*arguments):
            events.append(name)
            return original(*arguments)

        setattr(learner.stream, name, call)

    note("plan_micro_step")
    note("pack")
    learner.train(2)
    plan, pack = "plan_micro_step", "pack"
    assert events == ([plan, plan, pack, pack] if b_ratio else [plan, pack, plan, pack]) * 2
    if not b_ratio:
        learner.source.make_rollouts()
        learner.source.next_micro_batch()
        with pytest.raises(AssertionError, match="packed"):
            learner.source.next_micro_batch()


def test_rollouts_that_nobody_could_make_before_the_run_ended_are_made_after_a_resume(tmp_path):
    begun = Learner(tmp_path, 1)
    begun.backend.lost = {1, 2}
    begun.train(3)
    begun.source.save(tmp_path)
    resumed = Learner(tmp_path, 1)
    resumed.source.load(tmp_path)
    ((_, of_step_3),) = resumed.train(1)
    assert of_step_3 == [[2, 3], [3, 2]], "2 of the 4 rollouts have the weights of now"
    assert resumed.backend.events[:2] == [("sync", 3), ("generate", 2)]


def test_a_rollout_that_is_older_than_the_bound_is_refused():
    old = Rollout.of(QWEN, PROMPT, (), (), "stop", version=3)
    check_version(old, step=4, max_staleness=1)
    with pytest.raises(EngineError, match=r"version 3.* version 4"):
        check_version(old, step=5, max_staleness=1)
    with pytest.raises(EngineError, match=r"version 3.* version 2"):
        check_version(old, step=2)
