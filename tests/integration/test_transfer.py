"""The parts of the weight transfer that need no engine: buckets, and loading them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from coordexp.rollout.load import Reload, clear_kv_caches
from coordexp.rollout.weights import ALIGNMENT, find_non_finite
from coordexp.servers.transfer import buckets, check_agreement, check_metadata, flat_size, flatten, unflatten
from coordexp.servers.worker import Receiver

pytestmark = pytest.mark.timeout(240)


def name_weights(*sizes):
    return [(f"w{k}", torch.full((size,), float(k))) for k, size in enumerate(sizes)]


def test_buckets_keep_the_order_and_their_size_unless_one_weight_has_more():
    weights = name_weights(10, 60, 300, 5, 5, 90)
    result = list(buckets(iter(weights), 2 * ALIGNMENT))
    assert [name for bucket in result for name, _ in bucket] == [name for name, _ in weights]
    assert [[name for name, _ in bucket] for bucket in result] == [["w0", "w1"], ["w2"], ["w3", "w4"], ["w5"]]
    for bucket in result:
        assert len(bucket) == 1 or flat_size(bucket) <= 2 * ALIGNMENT
    assert list(buckets(iter([]), 400)) == []


def test_a_bucket_is_read_as_it_was_written_and_has_the_size_that_was_announced():
    weights = [*name_weights(10, 60, 1), ("scalar", torch.tensor(3)), ("half", torch.ones(3, 5).bfloat16())]
    metadatas, part = flatten(weights, torch.empty(0, dtype=torch.uint8))
    assert part.numel() == flat_size(weights) == check_metadata(metadatas)
    assert all(metadata["start_idx"] % ALIGNMENT == 0 for metadata in metadatas)
    read = dict(unflatten(metadatas, part))
    assert read.keys() == dict(weights).keys()
    assert all(torch.equal(read[name], weight) and read[name].dtype == weight.dtype for name, weight in weights)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dtype": "torch.nothing"}, "there is no tensor of dtype torch.nothing"),
        ({"shape": [2**62, 4], "end_idx": 2**66}, "there is no tensor"),
        ({"end_idx": 44}, "is not bytes 0 to 44"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(change, problem):
    (metadata,), _ = flatten(name_weights(10), torch.empty(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match=problem):
        check_metadata([metadata | change])


class FakeModel(nn.Module):
    """Loads as vLLM's models do: one weight is fused from two, and one has rows that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.fused, self.padded = nn.Module(), nn.Module()
        self.fused.weight = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.fused.weight.weight_loader = lambda param, weight, row: param.data[row].copy_(weight)
        self.padded.weight = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.padded.weight.weight_loader = lambda param, weight: param.data[:5].copy_(weight)

    def load_weights(self, weights):
        loaded = set()
        for name, weight in weights:
            if name == "padded":
                self.padded.weight.weight_loader(self.padded.weight, weight)
            else:
                self.fused.weight.weight_loader(self.fused.weight, weight, int(name))
            loaded.add("padded.weight" if name == "padded" else "fused.weight")
        return loaded


def receiver(model):
    record_metadata_for_reloading(model)
    runner = SimpleNamespace(get_model=lambda: model, model_config=SimpleNamespace(dtype=torch.float32))
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    return Receiver(runner, SimpleNamespace(parallel_config=parallel), torch.device("cpu"))


def give(engine, buffer, **weights):
    """Load a bucket as a server's worker does, from a buffer that it uses again."""
    metadatas, part = flatten(weights.items(), buffer)
    engine._receive = lambda size: part
    engine.load(metadatas, 0)


def test_weights_that_wait_for_others_survive_the_next_bucket():
    """vLLM's reload loads a fused weight when its last part has arrived, and a padded one at the end."""
    model, first, second = FakeModel(), torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    engine = receiver(model)
    with torch.device("cpu"):
        Reload.begin(engine)
        give(engine, first, padded=torch.full((5, 4), 7.0), **{"0": torch.full((4,), 1.0)})
        first.fill_(199)  # the next bucket
        give(engine, second, **{"1": torch.full((4,), 2.0)})
        Reload.finish(engine)
    assert model.fused.weight.tolist() == [[1.0] * 4, [2.0] * 4]
    assert model.padded.weight[:5].eq(7.0).all()


def test_a_weight_that_was_not_sent_is_named():
    engine = receiver(FakeModel())
    with torch.device("cpu"):
        Reload.begin(engine)
        give(engine, torch.zeros(4096, dtype=torch.uint8), padded=torch.full((5, 4), 7.0))
        with pytest.raises(ValueError, match=r"1 weights of the engine were not sent, among them fused\.weight"):
            Reload.finish(engine)


WITH_INF = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]
BROKEN = [(dtype, value) for dtype in WITH_INF for value in ("nan", "inf", "-inf")]


@pytest.mark.parametrize(("dtype", "value"), [*BROKEN, (torch.float8_e4m3fn, "nan")])
def test_the_first_weight_that_is_not_finite_is_named(dtype, value):
    good, broken = torch.ones(3, 5, dtype=dtype), torch.ones(3, 5)
    broken[1, 2] = float(value)
    weights = [
        ("a", good),
        ("b", broken.to(dtype)),
        ("c", broken.to(dtype)),
        ("d", torch.ones(2, dtype=torch.int64)),
    ]
    assert find_non_finite(weights) == "b"
    assert find_non_finite(weights[:1]) is None


def test_weights_without_a_nan_or_inf_are_finite_whatever_their_dtype_and_size():
    large = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    integers = [torch.ones(2, dtype=dtype) for dtype in (torch.int8, torch.uint8, torch.int64, torch.bool)]
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    weights = [large, torch.empty(0), torch.tensor(1.0), packed, *integers]
    assert find_non_finite((str(k), weight) for k, weight in enumerate(weights)) is None
    assert find_non_finite([]) is None


@pytest.mark.parametrize("size", [1, 4095, 4096, 40_000, 2**21 + 3])
def test_a_cleared_kv_cache_is_zero_to_its_ends_and_nothing_beside_it_is_touched(size):
    memory = bytearray(b"\x07" * (size + 8192))
    cache = torch.frombuffer(memory, dtype=torch.uint8, offset=100, count=size)
    clear_kv_caches([[cache[: size // 2]], cache[size // 2 :]])
    assert memory == b"\x07" * 100 + bytes(size) + b"\x07" * (8192 - 100)
    clear_kv_caches([])


@pytest.mark.parametrize("reduced", [(8, -6), (10, -8), (9, -9), (0, 0), (-1, -1)])
def test_lengths_that_differ_or_were_never_reduced_are_an_error(reduced):
    """(0, 0) and (-1, -1) are the contents of the memory if NCCL has done nothing."""
    buffer = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="this end expects a bucket of 8 bytes"):
        check_agreement(torch.tensor(reduced), buffer)
    check_agreement(torch.tensor((8, -8)), buffer)
