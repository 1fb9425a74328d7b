"""How weights travel to a rollout server: the layout of a bucket, and the group that passes it on. Both ends use
this module.

Servers get weights bucket by bucket, each as one buffer of bytes. The workers of a server get it in a
`WeightGroup`: with NCCL between GPUs, with gloo between CPUs. The server's first worker hosts the store where the
group meets, its workers are the first ranks, and the learner is the last.

Before each bucket the ranks of a group agree on its length. Without that, gloo aborts the process of a worker that
receives more bytes than it expects, and NCCL waits forever for missing ones.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from coordexp.rollout.weights import align_size

BUCKET_BYTES = 64 * 2**20
GPU_BUCKET_BYTES = 512 * 2**20  # NCCL moves a bucket in milliseconds, and each costs a call of every server
Metadata = dict[str, Any]  # of a tensor in a bucket, as plain values: the fields of `protocol.Metadata`
Bucket = list[tuple[str, Tensor]]


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
        metadatas.append(metadata | {"start_idx": start, "end_idx": end})
        start += align_size(weight.nbytes)
    return metadatas, buffer[:size]


LARGEST = 2**48  # bytes of a bucket, elements of a tensor; no machine has the memory for so many
INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def check_metadata(metadatas: Sequence[Metadata]) -> int:
    """Return the bytes of the bucket. Raise ValueError if the dtype, the shape and the bytes of a tensor
    contradict each other. `protocol.Metadata` has checked their types."""
    for metadata in metadatas:
        name, dtype, shape = metadata["name"], _dtype(metadata), metadata["shape"]
        start, end = metadata["start_idx"], metadata["end_idx"]
        is_weight = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype in INTEGERS)
        if not is_weight or max([end, *shape]) > LARGEST:
            raise ValueError(f"{name}: there is no tensor of dtype {metadata['dtype']} and shape {shape}")
        if end - start != prod(shape) * dtype.itemsize:
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


class WeightGroup:
    """The group of a learner and the workers of one server, between CPUs. The constructor returns once all ranks
    have joined: rank 0 listens on `host`, and the others connect to it there."""

    _group: Any  # a group of torch's

    def __init__(self, host: str, port: int, rank: int, size: int, device: torch.device, timeout: float) -> None:
        self._learner, self._device, self._timeout = size - 1, device, timeout
        self._store = _open_store(host, port, rank, size, timeout)
        self._connect(host, port, rank, size)

    def broadcast(self, buffer: Tensor) -> None:
        """Fill the buffers of all ranks with the learner's, and return when that is done. Raise ValueError on
        every rank, before anything is sent, if the buffers differ in length."""
        pair = torch.tensor([buffer.numel(), -buffer.numel()], dtype=torch.int64, device=self._device)
        check_agreement(self._maxima(pair), buffer)
        self._broadcast(buffer)

    def close(self) -> None:
        self._group = self._store = None

    def _connect(self, host: str, port: int, rank: int, size: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(_reachable(host), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # finds the address that reaches the host
            probe.connect(address)
            own_address = str(probe.getsockname()[0])
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
        options._timeout = timedelta(seconds=self._timeout)
        self._group = dist.ProcessGroupGloo(self._store, rank, size, options)

    def _maxima(self, values: Tensor) -> Tensor:
        """Return the largest values of all ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._group.allreduce([values], options).wait()
        return values

    def _broadcast(self, buffer: Tensor) -> None:
        self._group.broadcast(buffer, self._learner).wait()


class GpuWeightGroup(WeightGroup):
    """The same between GPUs, with NCCL on a stream of its own, so that a peer that is stuck blocks nothing else,
    and with a deadline, which NCCL does not have. Joining the group has no deadline. Never run so far: no GPU was
    available."""

    def close(self) -> None:
        self._nccl.destroy()

    def _connect(self, host: str, port: int, rank: int, size: int) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        if rank == 0:  # vLLM itself would share the id as a pickle
            self._store.set("nccl", bytes(NCCLLibrary().ncclGetUniqueId().internal))
        id = bytes(self._store.get("nccl"))
        self._nccl = PyNcclCommunicator.from_unique_id_bytes(id, rank, size, self._device)
        if not self._nccl.available or self._nccl.disabled:  # it would silently broadcast nothing
            raise RuntimeError(f"NCCL does not work on {self._device}")
        self._stream = torch.cuda.Stream(self._device)

    def _maxima(self, values: Tensor) -> Tensor:
        maxima = torch.full_like(values, -1)
        self._run(self._nccl.all_reduce, values, maxima, dist.ReduceOp.MAX, self._stream)
        return maxima

    def _broadcast(self, buffer: Tensor) -> None:
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


def join(host: str, port: int, rank: int, size: int, device: torch.device, timeout: float) -> WeightGroup:
    """Join a group as one of its ranks."""
    kind = GpuWeightGroup if device.type == "cuda" else WeightGroup
    return kind(host, port, rank, size, device, timeout)


def check_agreement(maxima: Tensor, buffer: Tensor) -> None:
    """Raise ValueError if the ranks' buffers differ in length. `maxima` are the largest length of all ranks and
    the largest negated length."""
    longest, shortest = int(maxima[0]), -int(maxima[1])
    if not longest == shortest == buffer.numel():
        other = longest if buffer.numel() == shortest else shortest
        raise ValueError(
            f"this end expects a bucket of {buffer.numel()} bytes, and the other end one of {other} bytes: "
            "nothing was sent"
        )


def _open_store(host: str, port: int, rank: int, size: int, timeout: float) -> Any:
    """Return the store where the ranks of a group meet. By itself it would listen on every address, so rank 0
    gives it a socket."""
    listening = None
    if rank == 0:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(1024)
        except OSError as error:
            listening.close()
            raise RuntimeError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return dist.TCPStore(  # type: ignore[attr-defined]
        _reachable(host),
        port,
        size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listening.detach() if listening else None,
        use_libuv=True,
    )


def gpu_name(device: torch.device | int) -> str:
    """Return the id of a GPU, with the name of its machine, by which both ends see whether they share one."""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - a name to connect to
