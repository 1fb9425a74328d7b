"""While a colocated engine generates, the learner is offloaded but readable, and is restored bit for bit."""

from contextlib import suppress
from copy import deepcopy

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from coordexp.config.rollout import Offload
from coordexp.errors import EngineError
from coordexp.ranks import is_sharded
from coordexp.train import offload
from coordexp.train.learner import learner_weights
from coordexp.train.offload import check_offload, offload_learner, offload_storages

BOTH = Offload(enabled=True, offload_model=True, offload_optimizer=True)


class Toy(nn.Module):
    """A model with tied weights, two dtypes, an integer buffer, and two parameters that are views of one
    storage. One of them is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.randn(2 * 32 * 32)
        self.left = nn.Parameter(flat[: 32 * 32].view(32, 32))
        self.right = nn.Parameter(flat[32 * 32 :].view(32, 32).t())
        self.narrow = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.register_buffer("counts", torch.arange(500))

    def forward(self, ids):
        hidden = self.embed(ids) @ self.left + self.embed(ids) @ self.right
        return self.head(self.narrow(hidden.bfloat16()).float())


@pytest.fixture
def learner():
    torch.manual_seed(0)
    model = Toy()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 40, (64,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()
        optimizer.step()


def state(model, optimizer):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors |= {
        f"{name}.grad": weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    for number, slot in enumerate(optimizer.state.values()):
        tensors |= {f"{number}.{name}": value for name, value in slot.items()}
    return tensors


def bits(tensors):
    return {
        name: (tensor.dtype, tensor.stride(), tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())
        for name, tensor in tensors.items()
    }


@pytest.mark.scenario("R17.C2", on="model")
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_the_same_object_and_the_same_bits_afterwards(learner, fails):
    model, optimizer = learner
    train(model, optimizer, 2)
    with torch.no_grad():
        model.left.view(torch.int32)[0, :3] = torch.tensor([0x7FC12345, 0x7F800001, -0x80000000])  # NaNs, -0.0
    alias = model.left.data.view(-1)
    before, objects = bits(state(model, optimizer)), state(model, optimizer)
    with suppress(KeyboardInterrupt), offload_learner(BOTH, model, optimizer):
        if fails:
            raise KeyboardInterrupt
    after = state(model, optimizer)
    assert bits(after) == before
    assert all(after[name] is tensor for name, tensor in objects.items())
    assert model.head.weight is model.embed.weight
    assert model.left.untyped_storage()._cdata == model.right.untyped_storage()._cdata
    assert alias.data_ptr() == model.left.data_ptr()


@pytest.mark.scenario("R17.C2", on="model")
def test_memory_is_free_and_the_model_readable_while_away(learner):
    model, optimizer = learner
    train(model, optimizer, 2)
    before, tensors = bits(model.state_dict()), state(model, optimizer)
    assert len([name for name in tensors if name.endswith("grad")]) == 5
    with offload_learner(BOTH, model, optimizer):
        large = {name: tensor for name, tensor in tensors.items() if tensor.numel() > 100}
        assert large.keys() >= {
            "embed.weight",
            "left",
            "right",
            "narrow.weight",
            "counts",
            "left.grad",
            "0.exp_avg",
        }
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in large.values())
        assert bits(model.state_dict()) == before
        assert model.head.weight is model.embed.weight
        assert [weight.requires_grad for weight in model.parameters()] == [True] * 5
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("part", ["model", "optimizer", None])
def test_only_what_is_asked_for_goes(learner, part):
    model, optimizer = learner
    train(model, optimizer, 1)
    slot = optimizer.state[model.left]
    asked = {f"offload_{part}": True} if part else {"offload_model": True, "offload_optimizer": True}
    settings = Offload(enabled=part is not None, **asked)
    weight = model.left
    with offload_learner(settings, model, optimizer):
        assert (weight.untyped_storage().nbytes() == 0) == (part == "model")
        assert (model.left is weight) == (part != "model")
        assert (slot["exp_avg"].untyped_storage().nbytes() == 0) == (part == "optimizer")


def test_training_goes_on_as_if_nothing_had_been(learner):
    plain = deepcopy(learner[0])
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, plain_optimizer, 2, seed=0)
    train(plain, plain_optimizer, 2, seed=1)
    model, optimizer = learner[0], Accelerator(cpu=True).prepare(learner[1])  # as the Trainer has it
    for seed in range(2):
        with offload_learner(BOTH, model, optimizer):  # at first without any state of the optimizer
            model.state_dict()
        train(model, optimizer, 2, seed)
    assert bits(state(model, optimizer)) == bits(state(plain, plain_optimizer))


def test_hooks_on_gradients_stay(learner):
    model, optimizer = learner
    accumulator = model.left.expand_as(model.left).grad_fn.next_functions[0][0]  # as DDP reaches it
    seen = []
    accumulator.register_hook(lambda *_: seen.append("left"))
    with offload_learner(BOTH, model, optimizer):
        pass
    train(model, optimizer, 1)
    assert seen == ["left"]


def test_memory_that_runs_out_half_way_brings_everything_back_and_says_so(learner, monkeypatch):
    model, optimizer = learner
    train(model, optimizer, 1)
    before, copied = bits(state(model, optimizer)), []
    copy = offload._copy_to_host

    def run_out(storage):
        copied.append(storage)
        if len(copied) > 3:
            raise RuntimeError("out of memory")
        return copy(storage)

    monkeypatch.setattr(offload, "_copy_to_host", run_out)
    message = r"rollout_matching.offload: .* GB .*out of memory(?s:.*)host memory"
    with pytest.raises(EngineError, match=message), offload_learner(BOTH, model, optimizer):
        raise AssertionError("not reached")
    assert len(copied) == 4 and bits(state(model, optimizer)) == before


def test_weights_in_the_mapped_file_of_a_checkpoint_go_and_come_back(tmp_path):
    save_file({"large": torch.randn(100, 100)}, tmp_path / "model.safetensors")
    weight = load_file(tmp_path / "model.safetensors")["large"]
    before = weight.clone()
    with offload_storages([weight]):
        assert weight.untyped_storage().nbytes() == 0
    assert torch.equal(weight, before)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.scenario("R17.C5", on="model")
@pytest.mark.filterwarnings("ignore")
def test_fsdp_1_is_refused(one_rank):
    model = FullyShardedDataParallel(nn.Linear(32, 32), device_id=torch.device("cpu"))
    with pytest.raises(EngineError, match=r"offload_model: FSDP version 1(?s:.*)use FSDP2"):
        check_offload(BOTH, model)
    with pytest.raises(EngineError, match=r"FSDP version 1 cannot make rollouts(?s:.*)use FSDP2"):
        is_sharded(model)
    check_offload(Offload(enabled=True, offload_optimizer=True), model)
    check_offload(Offload(enabled=False, offload_model=True), model)


@pytest.mark.parametrize("reshard", [True, False])
def test_shards_of_fsdp_2_go_and_come_back_even_after_a_forward_that_kept_what_it_gathered(one_rank, reshard):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model = deepcopy(plain)
    for layer in [*model, model]:
        fully_shard(layer, reshard_after_forward=reshard)
    learners = [(learner, torch.optim.AdamW(learner.parameters(), lr=1e-2)) for learner in (plain, model)]
    inputs = torch.randn(8, 32)
    for _ in range(2):
        for learner, optimizer in learners:
            optimizer.zero_grad()
            learner(inputs).square().mean().backward()
            optimizer.step()
            learner(inputs)
        with offload_learner(BOTH, *learners[1]):
            assert {name: weight.tolist() for name, weight in learner_weights(model)} == {
                name: weight.tolist() for name, weight in plain.state_dict().items()
            }
            shards = [shard for shard in learners[1][1].param_groups[0]["params"] if shard.ndim == 2]
            slots = [learners[1][1].state[shard]["exp_avg"] for shard in shards]
            assert {part.to_local().untyped_storage().nbytes() for part in shards + slots} == {0}
    assert model(inputs).equal(plain(inputs))
