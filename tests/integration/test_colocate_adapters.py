"""A colocated engine that gets only the learner's adapter answers as the learner does. An engine that refuses the
adapter gets whole weights for good.

The tests share an engine and depend on their order: the test of the fallback leaves it with whole weights. A run
that trains an adapter is in test_colocate_training.py.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from coordexp.config.rollout import Offload
from coordexp.config.settings import Adapter
from coordexp.demo.model import Size, make_model
from coordexp.errors import EngineError, UserError
from coordexp.rollout import colocate, update
from coordexp.train.learner import learner_adapter, with_adapter
from coordexp.train.offload import SMALL, offload_learner
from tests.integration.answers import whole_model
from tests.integration.colocation import SETTINGS, Colocation, draw_images, ids, with_adapter_sync

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]

TOKENS = 10
LORA = Adapter(rank=4, alpha=8, train_coord_rows=False)
TOO_LARGE = LORA.model_copy(update={"rank": 16})  # the engine is started for rank 4, which vLLM rounds up to 8
BOTH = Offload(enabled=True, offload_model=True, offload_optimizer=True)


class Memory:
    """The memory of a learner: the bytes of the tensors that offloading moves, at several moments."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        slots = [value for slot in optimizer.state.values() for value in slot.values()]
        self.tensors: list[Tensor] = [tensor for tensor in [*model.parameters(), *slots] if tensor.nbytes >= SMALL]
        self.seen: list[tuple[str, int]] = []

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def look(self, when: str) -> None:
        self.seen.append((when, self.bytes))


class Updates:
    """Counts the updates of an engine: the bytes of each adapter, and the updates of whole weights."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.adapters: list[int] = []
        self.whole = 0
        self._build, self._load = update.build_adapter, update.load_all
        patch.setattr(update, "build_adapter", self._spied_build)
        patch.setattr(update, "load_all", self._spied_load)

    def _spied_build(self, manager: Any, tensors: dict[str, Tensor], *given: Any) -> Any:
        self.adapters.append(sum(tensor.nbytes for tensor in tensors.values()))
        return self._build(manager, tensors, *given)

    def _spied_load(self, runner: Any, weights: Any) -> None:
        self.whole += 1
        self._load(runner, weights)


def learn(colocation: Colocation, adapter: Adapter = LORA) -> torch.optim.Optimizer:
    """Give the engine a new learner, on the weights that the engine was started with. Return its optimizer."""
    torch.manual_seed(0)
    colocation.model = with_adapter(whole_model(colocation.folder), adapter, colocation.table.first_coord)
    trained = [weight for weight in colocation.model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Colocation, Memory]]:
    """An engine that was started while the learner was out of memory, and has passed the canary."""
    folder = tmp_path_factory.mktemp("adapting")
    make_model(folder / "model", "small", tied=True, spread=6.0, size=Size(patch=8))
    images = draw_images(folder / "images")
    colocation = Colocation(folder / "model", images, with_adapter_sync(SETTINGS, LORA.rank))
    optimizer = learn(colocation)
    colocation.train(optimizer, 0)
    memory = Memory(colocation.model, optimizer)
    colocation.room = lambda: offload_learner(BOTH, colocation.model, optimizer)

    def start_engine(*given: Any, **named: Any) -> Any:
        memory.look("before the start")
        engine = plain(*given, **named)
        memory.look("after the start")
        return engine

    plain = colocate.start_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colocate, "start_engine", start_engine)
        with colocation.backend.session():
            colocation.sync(1)
        colocation.room = nullcontext
        yield colocation, memory
    colocation.backend.close()


@pytest.fixture
def colocation(adapting: tuple[Colocation, Memory]) -> Colocation:
    return adapting[0]


@pytest.mark.scenario("R17.C4", on="engine")
def test_the_learner_is_out_of_memory_while_the_engine_starts(adapting):
    _, memory = adapting
    assert memory.seen[:2] == [("before the start", 0), ("after the start", 0)]
    assert memory.bytes > 2**20


@pytest.mark.scenario("R07.C21", on="engine")
def test_after_each_of_four_updates_the_engine_answers_as_the_learner_and_got_only_the_adapter(
    colocation, monkeypatch
):
    sent = Updates(monkeypatch)
    optimizer, requests = learn(colocation), colocation.requests(TOKENS)
    last = ids(colocation.learner.generate(requests))
    for number in range(4):
        colocation.train(optimizer, number)
        answers = colocation.sync_and_compare(requests)
        different = sum(new != old for new, old in zip(answers, last, strict=True))
        assert different > 8, "the answers of the last step could pass for those of this step"
        last = answers
    size = sum(weight.nbytes for _, weight in learner_adapter(colocation.model)[1])
    whole = sum(weight.nbytes for _, weight in colocation.weights())
    assert sent.adapters == [size] * 4 and sent.whole == 0 and 4 * size < whole
    assert colocation.backend.describe() == {"sync_mode": "adapter", "fallbacks": []}


def test_an_adapter_with_an_infinite_value_is_not_used(colocation):
    optimizer = learn(colocation)
    colocation.train(optimizer, 0)
    config, weights = learner_adapter(colocation.model)
    name, weight = list(weights)[-1]
    broken = iter([(name, torch.full_like(weight, float("inf")))])
    problem = f"{name} has NaN or Inf values, and was not loaded\n.*lower training"
    with pytest.raises(UserError, match=problem):
        colocation.backend._updates.load_adapter(lambda: (config, broken), 1)
    with colocation.backend.session():
        colocation.sync()
        answers = ids(colocation.backend.generate(colocation.requests(TOKENS)))
    assert answers == ids(colocation.learner.generate(colocation.requests(TOKENS)))


@pytest.mark.scenario("R07.C23", "R07.S4", "R07.S8", on="engine")
def test_an_engine_that_refuses_an_adapter_stops_the_run_or_is_given_whole_weights_for_good(
    colocation, monkeypatch
):
    """The engine has vLLM's LoRA wrappers and the adapter of an earlier learner, which must not stay."""
    sent = Updates(monkeypatch)
    requests = colocation.requests(TOKENS)
    optimizer = learn(colocation)
    colocation.train(optimizer, 0)
    with colocation.backend.session():
        colocation.sync()
        adapted = ids(colocation.backend.generate(requests))
    assert len(sent.adapters) == 1 and sent.whole == 0
    strict = colocation.backend.sync_mode.sync.model_copy(update={"fallback_to_full": False})
    with monkeypatch.context() as patch, pytest.raises(EngineError, match="fallback_to_full: true"):
        patch.setattr(colocation.backend.sync_mode, "sync", strict)
        learn(colocation, TOO_LARGE)
        with colocation.backend.session():
            colocation.sync()
    assert sent.whole == 0 and colocation.recorded == []
    for number, adapter in enumerate((TOO_LARGE, LORA, LORA), start=1):
        optimizer = learn(colocation, adapter)
        for step in range(number):
            colocation.train(optimizer, 3 + step)
        with colocation.backend.session():
            colocation.sync()
            answers = ids(colocation.backend.generate(requests))
        assert answers == ids(colocation.learner.generate(requests)) != adapted
    assert len(sent.adapters) == 3 and sent.whole == 3, "an adapter was sent after the one that was refused twice"
    (warning,) = [message for message in colocation.messages if message.startswith("warning")]
    assert warning.startswith("warning: the engine cannot use the adapter:")
    assert warning.endswith("; whole weights are sent from here on")
    facts = {"sync_mode": "full", "fallbacks": [warning]}
    assert colocation.backend.describe() == facts and colocation.recorded == [facts]
