"""A colocated engine answers with the learner's current weights: all of them, and nothing that is older.

All tests share two engines, one with a tied head and one without. The learner that they serve is replaced.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from coordexp.config.rollout import Offload
from coordexp.config.settings import Adapter
from coordexp.demo.model import Size, make_model
from coordexp.errors import EngineError
from coordexp.rollout import load, update
from coordexp.rollout.update import EngineUpdates
from coordexp.train.learner import with_adapter
from coordexp.train.offload import SMALL, offload_learner
from tests.integration.answers import whole_model
from tests.integration.colocation import Colocation, draw_images, ids

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]

TOKENS = 10
LORA = Adapter(rank=4, alpha=8)
KINDS = {"full": None, "LoRA": LORA, "DoRA": LORA.model_copy(update={"dora": True})}
# The untied one is larger, so that its memory can be measured: 100 MB with the state of its optimizer.
SIZES = {"tied": (Size(patch=8), 6.0), "untied": (Size(hidden=512, layers=3, heads=16, patch=8), 3.0)}
only_tied = pytest.mark.parametrize("colocation", ["tied"], indirect=True)
only_untied = pytest.mark.parametrize("colocation", ["untied"], indirect=True)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module", params=["tied", "untied"])
def colocation(request, images, tmp_path_factory) -> Iterator[Colocation]:
    """The engine has been started and has passed the canary."""
    size, spread = SIZES[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_model(folder, "small", tied=request.param == "tied", spread=spread, size=size)
    made = Colocation(folder, images)
    with made.backend.session():
        made.sync(0)
    yield made
    made.backend.close()


def learn(colocation: Colocation, kind: str = "full") -> torch.optim.Optimizer:
    """Give the engine a new learner. Return its optimizer."""
    torch.manual_seed(0)
    colocation.model = with_adapter(whole_model(colocation.folder), KINDS[kind], colocation.table.first_coord)
    trained = [(name, weight) for name, weight in colocation.model.named_parameters() if weight.requires_grad]
    slow = [weight for name, weight in trained if not is_head(name)]
    fast = [weight for name, weight in trained if is_head(name)]
    groups = [{"params": slow, "lr": 3e-4 if kind == "full" else 3e-3}, {"params": fast, "lr": 3e-3}]
    return torch.optim.AdamW(groups)


def is_head(name: str) -> bool:
    return "embed_tokens" in name or "lm_head" in name


def copy_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def changes(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert list(before) == list(after)
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.scenario("R07.C5", "R07.S7", on="engine")
@pytest.mark.parametrize("kind", KINDS)
def test_after_each_of_five_steps_the_engine_answers_images_that_it_has_seen_as_the_learner_does(colocation, kind):
    optimizer = learn(colocation, kind)
    requests = colocation.requests(TOKENS)
    sent = copy_tensors(dict(colocation.weights()))
    last = ids(colocation.learner.generate(requests))
    for number in range(5):
        colocation.train(optimizer, number)
        learner = copy_tensors(colocation.model.state_dict())
        answers = colocation.sync_and_compare(requests)
        assert changes(learner, colocation.model.state_dict()) == set()
        # Otherwise, weights or features of the last step could go unnoticed.
        different = sum(new != old for new, old in zip(answers, last, strict=True))
        assert different > 8 and len(set(answers)) > 4
        now = copy_tensors(dict(colocation.weights()))
        updated = changes(sent, now)
        assert any(name.startswith("model.visual.blocks") for name in updated)
        assert ("model.language_model.embed_tokens" if colocation.tied else "lm_head") + ".weight" in updated
        last, sent = answers, now


@pytest.mark.scenario("R10.C6", "R10.S2", on="engine")
@only_tied
def test_the_engine_computes_as_many_sequences_at_once_as_decode_batch_size_allows_and_no_more(
    colocation, monkeypatch
):
    engine, size = colocation.backend.engine, colocation.backend.setup.settings.decode_batch_size
    assert engine.llm_engine.vllm_config.scheduler_config.max_num_seqs == size == 16
    learn(colocation)
    requests = colocation.requests(TOKENS)
    with colocation.backend.session():
        colocation.sync()
        expected = ids(colocation.backend.generate(requests[:4]))
        batches: list[int] = []
        execute = colocation.runner.execute_model

        def execute_and_count(scheduled: Any, *given: Any, **named: Any) -> Any:
            batches.append(len(scheduled.num_scheduled_tokens))
            return execute(scheduled, *given, **named)

        monkeypatch.setattr(colocation.runner, "execute_model", execute_and_count)
        answers = ids(colocation.backend.generate(requests * 3))  # 48 at once
    assert max(batches) == size
    assert [len(answer) for answer in answers] == [TOKENS] * 48 and answers[:4] == expected


def fault_nothing_is_sent(colocation: Colocation, patch: pytest.MonkeyPatch) -> None:
    def only_the_version(self, weights, version):
        self.engine.llm_engine.set_weight_version(str(version))

    patch.setattr(EngineUpdates, "load", only_the_version)


def fault_no_weights_arrive(colocation: Colocation, patch: pytest.MonkeyPatch) -> None:
    """Everything else of the sync is done."""
    patch.setattr(update, "load_all", lambda runner, weights: None)


def fault_cache_stays(name: str) -> Callable[[Colocation, pytest.MonkeyPatch], None]:
    def fault(colocation: Colocation, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(colocation.backend.engine.llm_engine, f"reset_{name}_cache", lambda: True)

    return fault


def fault_heads_stay(colocation: Colocation, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(load, "pack_again", lambda model: None)


FAULTS = {
    "nothing is sent": fault_nothing_is_sent,
    "no weights arrive": fault_no_weights_arrive,
    "the head is not rebuilt": fault_heads_stay,
    "prompts are remembered": fault_cache_stays("prefix"),
    "features are remembered": fault_cache_stays("encoder"),
}
CACHES = ("prompts are remembered", "features are remembered")


@only_tied
@pytest.mark.parametrize("fault", FAULTS)
def test_answers_differ_when_anything_is_left_out_of_a_sync_and_the_canary_sees_wrong_weights(colocation, fault):
    """So comparing the answers finds the fault."""
    due = colocation.backend.setup.settings.vllm.sync.canary_every * (1 + colocation.version)
    optimizer, requests = learn(colocation), colocation.requests(TOKENS)
    with colocation.backend.session():
        colocation.sync()
        colocation.backend.generate(requests)
        for number in range(3):
            colocation.train(optimizer, number)
        with pytest.MonkeyPatch.context() as patch:
            FAULTS[fault](colocation, patch)
            colocation.sync()
            wrong = colocation.backend.generate(requests)
        right = colocation.learner.generate(requests)
        assert sum(answer.ids != own.ids for answer, own in zip(wrong, right, strict=True)) > 2
        colocation.sync()
        assert ids(colocation.backend.generate(requests)) == ids(right)
    if fault not in CACHES:
        colocation.train(optimizer, 3)
        message = r"the engine does not have the learner's weights.*\n.*rollout_backend: hf"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(EngineError, match=message):
            FAULTS[fault](colocation, patch)
            with colocation.backend.session():
                colocation.sync(due)
        with colocation.backend.session():
            colocation.sync(2 * due)


BOTH = Offload(enabled=True, offload_model=True, offload_optimizer=True)


class StorageWatch:
    """Notes how many bytes the learner's tensors have while the engine answers."""

    def __init__(self, generate: Callable[..., Any], tensors: Iterable[torch.Tensor]) -> None:
        self.generate, self.tensors = generate, [tensor for tensor in tensors if tensor.nbytes >= SMALL]
        self.seen: list[int] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.seen.append(sum(tensor.untyped_storage().nbytes() for tensor in self.tensors))
        return self.generate(*given, **named)


@pytest.mark.scenario("R17.S1", on="engine")
@only_untied
@pytest.mark.parametrize("fails", [False, True])
def test_the_learner_is_out_of_memory_while_the_engine_answers_and_is_restored(colocation, monkeypatch, fails):
    optimizer, requests = learn(colocation), colocation.requests(TOKENS)
    colocation.train(optimizer, 0)
    optimizer.zero_grad()
    parameters, tensors = list(colocation.model.parameters()), everything(colocation.model, optimizer)
    before = copy_tensors(tensors)
    expected = ids(colocation.learner.generate(requests))
    monkeypatch.setattr(colocation, "room", lambda: offload_learner(BOTH, colocation.model, optimizer))
    watch = StorageWatch(fail if fails else colocation.backend.engine.generate, tensors.values())
    monkeypatch.setattr(colocation.backend.engine, "generate", watch)
    with (
        pytest.raises(EngineError, match="vLLM failed: the engine broke") if fails else nullcontext(),
        colocation.backend.session(),
    ):
        colocation.sync()
        assert ids(colocation.backend.generate(requests)) == expected
    assert watch.seen and not any(watch.seen) and watch.tensors
    assert all(now is old for now, old in zip(colocation.model.parameters(), parameters, strict=True))
    assert changes(before, everything(colocation.model, optimizer)) == set()
    colocation.train(optimizer, 1)
    assert len(changes(before, everything(colocation.model, optimizer))) == len(before)


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("the engine broke")


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for number, slot in enumerate(optimizer.state.values()):
        tensors |= {f"{number}.{name}": value for name, value in slot.items()}
    return tensors


@only_untied
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda name, weight: (name.replace("down_proj", "nonsense"), weight),
            r"at .*nonsense.weight: There is no ",
        ),
        (lambda name, weight: (name, weight[:-1] if "down_proj" in name else weight), r"at .*down_proj.weight: "),
    ],
)
def test_weights_that_the_engine_cannot_load_are_an_error_that_names_them(colocation, spoil, message):
    """The engine is not used any more."""
    learn(colocation)
    spoiled = [spoil(name, weight) for name, weight in colocation.weights()]
    with pytest.raises(EngineError, match=f"^vLLM could not load the weights: {message}"):
        colocation.backend._updates.load(lambda: iter(spoiled), 1)
