"""Weights on their way to an engine: which kind is sent, and for servers, how a bucket is laid out in a buffer,
and how it is passed on.

Servers get weights bucket by bucket, each as one buffer of bytes, in the format of ms-swift. The workers of a
server get it in a `WeightGroup`: with NCCL between GPUs, with gloo between CPUs. As in ms-swift, the server's
first worker hosts the store where the group meets, its workers are the first ranks, and the learner is the last.

Before each bucket the ranks of a group agree on its length. Without that, gloo aborts the process of a worker that
receives more bytes than it expects, and NCCL waits forever for missing ones. A client of ms-swift does not take
part in that, so in a group with one (`plain`) there is no such check.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from coordexp.config.rollout import Sync
from coordexp.errors import EngineError, UserError
from coordexp.files import is_encodable

BUCKET_BYTES = 64 * 2**20
GPU_BUCKET_BYTES = 512 * 2**20  # NCCL moves a bucket in milliseconds, and each costs a call of every server
ALIGNMENT = 256  # bytes; tensors start at multiples of it, so that their dtypes can be read in place
Metadata = dict[str, Any]  # of a tensor in a bucket, as plain values
Bucket = list[tuple[str, Tensor]]
DIVERGED = (
    "the training has diverged: start a new run with model.path at an earlier checkpoint and a lower "
    "training.learning_rate; weights with NaN or Inf are sent to no engine"
)
# Why an adapter cannot be sent alone.
COORD_ROWS = (
    "since the rows of the coordinate tokens are trained beside it, and vLLM's LoRA has no place for them "
    "(model.adapter.train_coord_rows)"
)
WAYS_OUT = "set rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true"


# What is sent


class AdapterRefused(EngineError):
    """The engine cannot use the adapter, but still takes whole weights."""


class SyncMode:
    """The kind of weights that is sent after each update. It changes at most once, from the adapter to whole
    weights.

    `has_adapter` says that the adapter contains everything that is trained. `otherwise` ends the message to a run
    that may not fall back."""

    def __init__(self, sync: Sync, has_adapter: bool, notify: Callable[[str], None], otherwise: str) -> None:
        self.sync, self.notify, self.otherwise = sync, notify, otherwise
        self.mode: Literal["full", "adapter"] = "adapter" if sync.mode == "adapter" else "full"
        self.fallbacks: list[str] = []
        if self.mode == "adapter" and not has_adapter:
            problem = f"rollout_matching.vllm.sync.mode: an adapter alone cannot be sent, {COORD_ROWS}"
            self.fall_back(problem, "the whole merged weights are sent instead")

    @property
    def is_adapter(self) -> bool:
        return self.mode == "adapter"

    def fall_back(self, reason: str, consequence: str = "whole weights are sent from here on") -> None:
        """Change to whole weights for good, with a warning. Raise EngineError if the settings do not allow it."""
        if not self.sync.fallback_to_full:
            raise EngineError(reason, f"{WAYS_OUT}, {self.otherwise}")
        self.mode = "full"
        warning = f"warning: {reason}; {consequence}"
        self.fallbacks.append(warning)
        self.notify(warning)

    def describe(self) -> dict[str, Any]:
        """Return the facts that the run's manifest records."""
        return {"sync_mode": self.mode, "fallbacks": list(self.fallbacks)}


def find_non_finite(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first weight that has a NaN or an Inf, or None.

    The minimum and maximum of a tensor take one pass over it and no temporary copy; a NaN becomes both of them.
    The host waits for the device once, for all given weights."""
    names: list[str] = []
    extremes: list[Tensor] = []
    for name, weight in weights:
        if weight.numel() and can_be_non_finite(weight.dtype):
            names.append(name)
            comparable = weight.detach().float() if weight.dtype.itemsize == 1 else weight.detach()
            extremes.append(torch.stack(torch.aminmax(comparable)).double())
    if not names:
        return None
    if len({pair.device for pair in extremes}) > 1:
        extremes = [pair.cpu() for pair in extremes]
    finite = torch.stack(extremes).isfinite().all(dim=1).tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)


def can_be_non_finite(dtype: torch.dtype) -> bool:
    """Return True for floating-point dtypes except the packed 4-bit one, which has neither NaN nor Inf."""
    return dtype.is_floating_point and dtype is not getattr(torch, "float4_e2m1fn_x2", None)


def check_finite(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UserError if a weight has a NaN or an Inf."""
    if (name := find_non_finite(weights)) is not None:
        raise UserError(f"{name} has NaN or Inf values, and was not loaded", DIVERGED)


def non_finite_error(name: str) -> EngineError:
    """Return the error of a learner whose weights are not finite."""
    return EngineError(f"the learner's weights were not sent: {name} has NaN or Inf values", DIVERGED)


# The layout of a bucket


def align_size(nbytes: int) -> int:
    """Return the number of bytes that a tensor takes in a buffer, including the padding behind it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def buckets(weights: Iterator[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """Split the weights into buckets, in their order. Only a bucket with a single tensor may exceed `size`
    bytes."""
    bucket: Bucket = []
    free = size
    for name, weight in weights:
        if bucket and align_size(weight.nbytes) > free:
            yield bucket
            bucket, free = [], size
        bucket.append((name, weight))
        free -= align_size(weight.nbytes)
    if bucket:
        yield bucket


def flat_size(bucket: Bucket) -> int:
    """Return the bytes of a bucket in a buffer; 0 if it is empty."""
    before = sum(align_size(weight.nbytes) for _, weight in bucket[:-1])
    return before + bucket[-1][1].nbytes if bucket else 0


def flatten(weights: Iterable[tuple[str, Tensor]], buffer: Tensor) -> tuple[list[Metadata], Tensor]:
    """Copy a bucket, which is not empty, to `buffer`, or to a new buffer if it does not fit. Return the metadata
    of its tensors and the part of the buffer that holds them."""
    bucket = list(weights)
    size, start = flat_size(bucket), 0
    if size > buffer.numel():
        buffer = torch.empty(size, dtype=torch.uint8, device=buffer.device)
    metadatas = []
    for name, weight in bucket:
        end = start + weight.nbytes
        buffer[start:end].view(weight.dtype).view(weight.shape).copy_(weight)
        metadata = {"name": name, "shape": list(weight.shape), "dtype": str(weight.dtype)}
        metadatas.append(metadata | {"start_idx": start, "end_idx": end, "numel": weight.numel()})
        start += align_size(weight.nbytes)
    return metadatas, buffer[:size]


METADATA_FIELDS = {"name": str, "shape": list, "dtype": str, "start_idx": int, "end_idx": int}
MOST_DIMENSIONS = 64  # of a tensor in torch
MOST_NAMED = 500  # characters in the name of a weight
MOST_QUOTED = 200  # characters of a name in an error message
LARGEST = 2**48  # bytes of a bucket, elements of a tensor; no machine has the memory for so many
INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def check_metadata(metadatas: Sequence[Metadata]) -> int:
    """Return the bytes of the bucket. Raise ValueError if the description of a tensor lacks a field, has a value
    that no tensor has, or if its dtype, shape and bytes contradict each other."""
    for number, metadata in enumerate(metadatas):
        for field, kind in METADATA_FIELDS.items():
            if type(metadata.get(field)) is not kind:
                raise ValueError(f"tensor {number} of the bucket: {field} must be of type {kind.__name__}")
        name, dtype, shape = metadata["name"][:MOST_QUOTED], _dtype(metadata), metadata["shape"]
        start, end = metadata["start_idx"], metadata["end_idx"]
        if not 0 < len(metadata["name"]) <= MOST_NAMED:
            raise ValueError(f"tensor {number} of the bucket: its name must have 1 to {MOST_NAMED} characters")
        if not is_encodable(metadata["name"]):
            raise ValueError(f"tensor {number} of the bucket: its name has half a character (a lone surrogate)")
        if len(shape) > MOST_DIMENSIONS or not all(type(side) is int for side in shape):
            raise ValueError(f"{name}: shape must be a list of at most {MOST_DIMENSIONS} integers")
        is_weight = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype in INTEGERS)
        if not is_weight or min(shape, default=0) < 0 or max([end, *shape]) > LARGEST:
            quoted = metadata["dtype"][:MOST_QUOTED]
            raise ValueError(f"{name}: there is no tensor of dtype {quoted} and shape {shape}")
        if start < 0 or end - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: a tensor of shape {shape} and {dtype} is not bytes {start} to {end}")
    return max(metadata["end_idx"] for metadata in metadatas)


def unflatten(metadatas: Iterable[Metadata], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each weight, and a view of its bytes in the buffer."""
    for metadata in metadatas:
        dtype, start = _dtype(metadata), metadata["start_idx"]
        part = buffer[start : metadata["end_idx"]]
        if start % dtype.itemsize:  # the sender did not align it
            part = part.clone()
        yield metadata["name"], part.view(dtype).view(metadata["shape"])


def _dtype(metadata: Metadata) -> Any:
    return getattr(torch, str(metadata["dtype"]).removeprefix("torch."), None)


# Groups


class WeightGroup(Protocol):
    def broadcast(self, buffer: Tensor) -> None:
        """Fill the buffers of all ranks with the learner's, and return when that is done. Raise ValueError on
        every rank, before anything is sent, if the buffers differ in length."""

    def close(self) -> None: ...


def join(
    host: str, port: int, rank: int, size: int, device: torch.device, timeout: float, plain: bool = False
) -> WeightGroup:
    """Return the group, once all ranks have joined. Rank 0 listens on `host`, and the others connect to it there.
    `plain` means that the other end is a client or server of ms-swift. On GPUs that uses vLLM's own group, which
    unpickles what the first rank sends."""
    if device.type != "cuda":
        return _Gloo(host, port, rank, size, timeout, agree=not plain)
    return _Nccl(host, port, rank, size, device, timeout, agree=not plain)


def _store(host: str, port: int, rank: int, size: int, timeout: float) -> Any:
    listening = _listen(host, port) if rank == 0 else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        _reachable(host),
        port,
        size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listening.detach() if listening else None,
        use_libuv=True,
    )


class _Gloo:
    def __init__(self, host: str, port: int, rank: int, size: int, timeout: float, agree: bool) -> None:
        self._store = _store(host, port, rank, size, timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host, port))]
        options._timeout = timedelta(seconds=timeout)
        self._group: Any = dist.ProcessGroupGloo(self._store, rank, size, options)
        self._learner, self._agree = size - 1, agree

    def broadcast(self, buffer: Tensor) -> None:
        if self._agree:
            lengths = _length_pair(buffer)
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            self._group.allreduce([lengths], options).wait()
            check_agreement(lengths, buffer)
        self._group.broadcast(buffer, self._learner).wait()

    def close(self) -> None:
        self._group = self._store = None


class _Nccl:
    """NCCL on a stream of its own, so that a peer that is stuck blocks nothing else, and with a deadline, which
    NCCL does not have. Joining the group has no deadline. Never run so far: no GPU was available."""

    def __init__(
        self, host: str, port: int, rank: int, size: int, device: torch.device, timeout: float, agree: bool
    ) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.utils import StatelessProcessGroup

        if agree:  # the first rank shares its id through the store as bytes, not as a pickle
            store = _store(host, port, rank, size, timeout)
            if rank == 0:
                store.set("nccl", bytes(NCCLLibrary().ncclGetUniqueId().internal))
            self._nccl = PyNcclCommunicator.from_unique_id_bytes(bytes(store.get("nccl")), rank, size, device)
        else:
            self._nccl = PyNcclCommunicator(StatelessProcessGroup.create(host, port, rank, size), device=device)
        if not self._nccl.available or self._nccl.disabled:  # it would silently broadcast nothing
            raise RuntimeError(f"NCCL does not work on {device}")
        self._learner, self._device = size - 1, device
        self._timeout, self._agree = timeout, agree
        self._stream = torch.cuda.Stream(self._device)

    def broadcast(self, buffer: Tensor) -> None:
        if self._agree:
            lengths, highest = _length_pair(buffer), torch.full((2,), -1, device=self._device)
            self._run(self._nccl.all_reduce, lengths, highest, dist.ReduceOp.MAX, self._stream)
            check_agreement(highest, buffer)
        self._run(self._nccl.broadcast, buffer, self._learner, self._stream)

    def _run(self, work: Callable[..., object], *arguments: Any) -> None:
        """Start the work on the stream, and return when it is done. Raise RuntimeError at the deadline."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            work(*arguments)
            done, until = torch.cuda.Event(), time.monotonic() + self._timeout
            done.record(self._stream)
        while not done.query():
            if time.monotonic() >= until:
                self._nccl.destroy()  # ends the work that waits on the device
                raise RuntimeError(f"no data for {self._timeout:g} s")
            time.sleep(0.0005)

    def close(self) -> None:
        self._nccl.destroy()


def _length_pair(buffer: Tensor) -> Tensor:
    """Return the length of a buffer and its negative. Their maxima over all ranks are the lengths of the longest
    buffer and, negated, of the shortest."""
    return torch.tensor([buffer.numel(), -buffer.numel()], dtype=torch.int64, device=buffer.device)


def check_agreement(lengths: Tensor, buffer: Tensor) -> None:
    """Raise ValueError if the ranks' buffers differ in length. `lengths` are the maxima of `_length_pair`."""
    longest, shortest = int(lengths[0]), -int(lengths[1])
    if not longest == shortest == buffer.numel():
        other = longest if buffer.numel() == shortest else shortest
        raise ValueError(
            f"this end expects a bucket of {buffer.numel()} bytes, and the other end one of {other} bytes: "
            "nothing was sent"
        )


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket for the store, which by itself would listen on every address."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise RuntimeError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listening


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - a name to connect to


def _own_address(host: str, port: int) -> str:
    """Return the address that this machine uses to reach the host."""
    family, _, _, _, target = socket.getaddrinfo(_reachable(host), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
