"""The parts of the weight transfer that need no engine: buckets, memory files, handles as plain values."""

import pytest
import torch
from vllm.device_allocator import alloc_conf
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerWeightTransferEngine

from coordexp.engine.cuda_ipc import CudaSender, plain_handle
from coordexp.engine.receive import clear_kv_caches, cuda_handle
from coordexp.engine.weights import (
    ALIGNMENT,
    MemoryFile,
    buckets,
    check_agreement,
    check_metadata,
    find_non_finite,
    flat_size,
    flatten,
    unflatten,
)

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
        ({"shape": [-1]}, "there is no tensor"),
        ({"end_idx": 44}, "is not bytes 0 to 44"),
        ({"start_idx": -4, "end_idx": 36}, "is not bytes -4 to 36"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(change, problem):
    (metadata,), _ = flatten(name_weights(10), torch.empty(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match=problem):
        check_metadata([metadata | change])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(3, 5), (7,), ()])
def test_a_written_tensor_is_read_through_the_descriptor(dtype, shape):
    file, expected = MemoryFile.new(16), torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    metadatas = file.write([("first", torch.ones(3)), ("second", expected)])
    other = MemoryFile.from_process(*file.address)
    assert torch.equal(dict(unflatten(metadatas, other.bytes))["second"], expected)


def test_a_handle_survives_as_plain_values():
    """The handle is like torch's handle of a tensor on a GPU, but no GPU is needed to take it apart."""
    handle = (
        *(torch.Tensor, torch.Size([4, 2]), (2, 1), 3, torch.storage.TypedStorage, torch.bfloat16),
        *(0, b"\x01handle", 4096, 512, False, b"counter", 7, b"event", True),
    )
    plain = plain_handle(handle)
    assert {type(value) for value in plain} <= {list, int, str, bytes, bool}
    assert cuda_handle(plain) == handle


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


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ("max_split_size_mb:512", ["sent"]),
        (
            "max_split_size_mb:512,expandable_segments:True",
            [
                "max_split_size_mb:512,expandable_segments:False",
                "sent",
                "max_split_size_mb:512,expandable_segments:True",
            ],
        ),
    ],
)
def test_weights_are_sent_without_expandable_segments_and_other_allocator_settings_stay(
    monkeypatch, settings, written
):
    events: list[str] = []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.setattr(alloc_conf, "set_alloc_conf", events.append)
    monkeypatch.setattr(IPCTrainerWeightTransferEngine, "send_weights", lambda self: events.append("sent"))
    CudaSender.__new__(CudaSender).send_weights()
    assert events == written
