"""A colocated engine answers with the weights that the learner has now: all of them, and nothing else.

Two engines for all tests, one with a tied head and one without. The learner that they serve is exchanged.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from coordexp.config.rollout import Offload
from coordexp.config.settings import Adapter
from coordexp.demo.model import Size, make_model
from coordexp.errors import EngineError
from coordexp.rollout.backend import Request
from coordexp.rollout.connection import Connection
from coordexp.train.adapter import with_adapter
from coordexp.train.offload import offloaded
from tests.integration import engine_faults
from tests.integration.answers import whole_model
from tests.integration.colocation import Colocation, draw_pictures, ids
from tests.unit.train.offload_worker import resident

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

TOKENS = 10
LORA = Adapter(rank=4, alpha=8)
KINDS = {"full": None, "LoRA": LORA, "DoRA": LORA.model_copy(update={"dora": True})}
# The untied one is larger, so that its memory can be measured: 100 MB with the state of its optimizer.
SIZES = {"tied": (Size(patch=8), 6.0), "untied": (Size(hidden=512, layers=3, heads=16, patch=8), 3.0)}
only_tied = pytest.mark.parametrize("colocation", ["tied"], indirect=True)
only_untied = pytest.mark.parametrize("colocation", ["untied"], indirect=True)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module", params=["tied", "untied"])
def colocation(request, pictures, tmp_path_factory) -> Iterator[Colocation]:
    """The engine has been started and has answered once, to the canary. It gets its weights in buckets so small
    that the parts of a fused weight come in several."""
    size, spread = SIZES[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_model(folder, "small", tied=request.param == "tied", spread=spread, size=size)
    found = Colocation(folder, pictures)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordexp.rollout.engine.ENGINE_SIDE", engine_faults.ENGINE_SIDE)
        patch.setattr("coordexp.rollout.transfer.BUCKET_BYTES", 2**18)
        with found.backend.session():
            found.sync(0)
        yield found
    found.backend.close()


def learn(colocation: Colocation, kind: str = "full") -> torch.optim.Optimizer:
    """A new learner, and its optimizer."""
    torch.manual_seed(0)
    colocation.model = with_adapter(whole_model(colocation.folder), KINDS[kind], colocation.table.first_coord)
    trained = [(name, weight) for name, weight in colocation.model.named_parameters() if weight.requires_grad]
    slow = [weight for name, weight in trained if not is_head(name)]
    fast = [weight for name, weight in trained if is_head(name)]
    groups = [{"params": slow, "lr": 3e-4 if kind == "full" else 3e-3}, {"params": fast, "lr": 3e-3}]
    return torch.optim.AdamW(groups)


def is_head(name: str) -> bool:
    return "embed_tokens" in name or "lm_head" in name


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert list(before) == list(after)
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.scenario("R07.C5", "R07.S7", on="engine")
@pytest.mark.parametrize("kind", KINDS)
def test_after_each_of_five_steps_the_engine_answers_pictures_it_has_seen_as_the_learner_does(colocation, kind):
    optimizer = learn(colocation, kind)
    requests = colocation.requests(TOKENS)
    sent = copied(dict(colocation.weights()))
    last = ids(colocation.learner.generate(requests))
    for number in range(5):
        colocation.train(optimizer, number)
        learner = copied(colocation.model.state_dict())
        with colocation.backend.session():
            colocation.sync()
            found = colocation.backend.generate(requests)
        assert changed(learner, colocation.model.state_dict()) == set()
        own = colocation.learner.generate(requests)
        assert ids(found) == ids(own)
        for one, other in zip(found, own, strict=True):
            assert one.prompt_ids == other.prompt_ids
            assert one.finish_reason == other.finish_reason
            assert one.version == other.version == colocation.version
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-3)
        # With these, weights or features of the last step would show.
        different = sum(one != other for one, other in zip(ids(own), last, strict=True))
        assert different > 8 and len(set(ids(own))) > 4
        now = copied(dict(colocation.weights()))
        updated = changed(sent, now)
        assert any(name.startswith("model.visual.blocks") for name in updated)
        assert ("model.language_model.embed_tokens" if colocation.tied else "lm_head") + ".weight" in updated
        last, sent = ids(own), now


@only_tied
def test_a_sync_leaves_nothing_in_the_three_caches_of_the_engine(colocation, monkeypatch):
    engine, requests = colocation.backend.engine, colocation.requests(TOKENS)

    def kept() -> tuple[int, int]:
        """Pictures whose patches and whose features the engine has."""
        return len(engine.llm_engine.renderer.mm_processor_cache._cache), *engine.collective_rpc(
            "encoded_pictures"
        )

    optimizer = learn(colocation)
    with colocation.cached_tokens(monkeypatch) as cached, colocation.backend.session():
        for number in range(2):
            colocation.train(optimizer, number)
            colocation.sync()
            assert kept() == (0, 0)
            first = colocation.backend.generate(requests)
            assert kept() == (16, 16)
            assert cached == [0] * 16
            second = colocation.backend.generate(requests)
            assert kept() == (16, 16)
            assert cached[16:] == [128 if len(one.prompt_ids) > 128 else 0 for one in first]  # whole blocks
            assert ids(second) == ids(first)
            cached.clear()


@pytest.mark.scenario("R10.C6", "R10.S2", on="engine")
@only_tied
def test_the_engine_computes_as_many_sequences_at_once_as_decode_batch_size_allows_and_no_more(colocation):
    engine, size = colocation.backend.engine, colocation.backend.about.settings.decode_batch_size
    assert engine.llm_engine.vllm_config.scheduler_config.max_num_seqs == size == 16
    learn(colocation)
    requests = colocation.requests(TOKENS)
    with colocation.backend.session():
        colocation.sync()
        expected = ids(colocation.backend.generate(requests[:4]))
        engine.collective_rpc("watch_batches")
        found = ids(colocation.backend.generate(requests * 3))  # 48 at once
    (batches,) = engine.collective_rpc("watched_batches")
    assert max(batches) == size
    assert [len(one) for one in found] == [TOKENS] * 48 and found[:4] == expected


def fault_nothing_is_sent(colocation: Colocation, patch: pytest.MonkeyPatch) -> None:
    def only_the_version(self, weights, version, place):
        self.engine.llm_engine.set_weight_version(str(version))

    patch.setattr(Connection, "send", only_the_version)


def fault_no_weights_arrive(colocation: Colocation, patch: pytest.MonkeyPatch) -> None:
    """All the rest is done."""
    patch.setattr("coordexp.rollout.transfer.SharedMemorySender.send_weights", lambda self: None)


def fault_cache_stays(name: str) -> Callable[[Colocation, pytest.MonkeyPatch], None]:
    def fault(colocation: Colocation, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(colocation.backend.engine.llm_engine, f"reset_{name}_cache", lambda: True)

    return fault


def fault_heads_stay(colocation: Colocation, patch: pytest.MonkeyPatch) -> None:
    colocation.backend.engine.collective_rpc("fault_heads_stay_as_they_are", args=(True,))


FAULTS = {
    "nothing is sent": fault_nothing_is_sent,
    "no weights arrive": fault_no_weights_arrive,
    "the head is not rebuilt": fault_heads_stay,
    "prompts are remembered": fault_cache_stays("prefix"),
    "features are remembered": fault_cache_stays("encoder"),
}
WEIGHTS = ("nothing is sent", "no weights arrive", "the head is not rebuilt")


@contextmanager
def faulty(colocation: Colocation, fault: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](colocation, patch)
        try:
            yield
        finally:
            colocation.backend.engine.collective_rpc("fault_heads_stay_as_they_are", args=(False,))


@only_tied
@pytest.mark.parametrize("fault", FAULTS)
def test_answers_differ_when_anything_is_left_out_of_a_sync(colocation, fault):
    """So the comparison of answers would find it."""
    optimizer, requests = learn(colocation), colocation.requests(TOKENS)
    with colocation.backend.session():
        colocation.sync()
        colocation.backend.generate(requests)
        for number in range(3):
            colocation.train(optimizer, number)
        with faulty(colocation, fault):
            colocation.sync()
            wrong = colocation.backend.generate(requests)
        right = colocation.learner.generate(requests)
        assert sum(one.ids != other.ids for one, other in zip(wrong, right, strict=True)) > 2
        colocation.sync()
        assert ids(colocation.backend.generate(requests)) == ids(right)


@only_tied
@pytest.mark.parametrize("fault", WEIGHTS)
def test_the_canary_stops_a_run_whose_engine_has_not_the_learners_weights(colocation, fault):
    due = colocation.backend.about.settings.vllm.sync.canary_every * (1 + colocation.version)
    optimizer = learn(colocation)
    with colocation.backend.session():
        colocation.sync()
    colocation.train(optimizer, 0)
    told = r"the engine does not have the learner's weights.*\n.*rollout_backend: hf"
    with faulty(colocation, fault), pytest.raises(EngineError, match=told), colocation.backend.session():
        colocation.sync(due)
    with colocation.backend.session():
        colocation.sync(2 * due)


BOTH = Offload(enabled=True, offload_model=True, offload_optimizer=True)


class Watched:
    """The most memory that this process has while it waits for the engine, in megabytes."""

    def __init__(self, generate: Callable[..., Any]) -> None:
        self.generate, self.most = generate, 0.0

    def __call__(self, *given: Any, **named: Any) -> Any:
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,))
        thread.start()
        try:
            return self.generate(*given, **named)
        finally:
            done.set()
            thread.join()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(0.01):
            self.most = max(self.most, resident())


@pytest.mark.scenario("R17.S1", on="engine")
@only_untied
@pytest.mark.parametrize("fails", [False, True])
def test_the_learner_is_out_of_memory_while_the_engine_answers_and_is_restored(
    colocation, tmp_path, monkeypatch, fails
):
    optimizer, requests = learn(colocation), colocation.requests(TOKENS)
    colocation.train(optimizer, 0)
    optimizer.zero_grad()
    parameters, tensors = list(colocation.model.parameters()), everything(colocation.model, optimizer)
    before = copied(tensors)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
    expected = ids(colocation.learner.generate(requests))
    full = 0.0 if fails else with_all_in_memory(colocation, requests)
    monkeypatch.setattr(colocation, "room", lambda: offloaded(BOTH, colocation.model, optimizer, tmp_path))
    watched = Watched(breaks if fails else colocation.backend.engine.generate)
    monkeypatch.setattr(colocation.backend.engine, "generate", watched)
    with pytest.raises(RuntimeError, match="broke") if fails else nullcontext(), colocation.backend.session():
        colocation.sync()
        assert ids(colocation.backend.generate(requests)) == expected
    if not fails:
        print(f"{full - watched.most:.1f} of {size:.1f} MB freed")
        assert size > 100
        assert full - watched.most > 0.95 * size
    assert all(one is other for one, other in zip(colocation.model.parameters(), parameters, strict=True))
    assert changed(before, everything(colocation.model, optimizer)) == set()
    colocation.train(optimizer, 1)
    assert len(changed(before, everything(colocation.model, optimizer))) == len(before)


def with_all_in_memory(colocation: Colocation, requests: list[Request]) -> float:
    """The most memory of this process while the engine answers."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before shall not count
    with pytest.MonkeyPatch.context() as patch, colocation.backend.session():
        colocation.sync()
        watched = Watched(colocation.backend.engine.generate)
        patch.setattr(colocation.backend.engine, "generate", watched)
        colocation.backend.generate(requests)
    return watched.most


def breaks(*_: Any, **__: Any) -> None:
    raise RuntimeError("the engine broke")


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for number, slot in enumerate(optimizer.state.values()):
        found |= {f"{number}.{name}": value for name, value in slot.items()}
    return found
