"""The group over which weights go from the learner to the workers of one server, and the form they go in.

The server's first worker keeps the store that the group meets at; its workers are the first ranks and the learner
is the last one, as ms-swift has it. Weights go bucket by bucket, each as one buffer of bytes: by NCCL between
GPUs, by gloo between CPUs.

Before each bucket the ranks agree on its length. Without that, gloo aborts the process of a worker that is sent
more bytes than it expects, and NCCL waits for those that do not come. A client of ms-swift does not take part in
that, so with one (`plain`) there is no such check.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

ALIGNMENT = 256  # bytes, so that every dtype can be read in place
Metadata = dict[str, Any]


class WeightGroup(Protocol):
    def broadcast(self, buffer: Tensor) -> None:
        """Fills the buffers of all ranks with the learner's, and is done when it returns. Raise ValueError on
        every rank, before anything is sent, if their buffers differ in length."""

    def close(self) -> None: ...


def join(
    host: str, port: int, rank: int, size: int, device: torch.device, timeout: float, plain: bool = False
) -> WeightGroup:
    """Blocks until all ranks are there. Rank 0 listens on `host`, the others look for it there. `plain` is with
    one of ms-swift, which on GPUs has vLLM's own group, and by that unpickles what the first rank says."""
    if device.type != "cuda":
        return _Gloo(host, port, rank, size, timeout, agree=not plain)
    made = _plain_nccl if plain else _nccl
    return _Nccl(made, (host, port, rank, size, device), timeout, agree=not plain)


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
            lengths = _lengths(buffer)
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            self._group.allreduce([lengths], options).wait()
            check_agreement(lengths, buffer)
        self._group.broadcast(buffer, self._learner).wait()

    def close(self) -> None:
        self._group = self._store = None


Joined = tuple[str, int, int, int, torch.device]


class _Nccl:
    """On a stream of its own, so that a peer that is stuck holds up nothing else, and with a deadline, which NCCL
    does not have. How long it takes to come together has none. Not run: no GPU was at hand."""

    def __init__(self, made: Callable[[Joined, float], Any], at: Joined, timeout: float, agree: bool) -> None:
        self._nccl = made(at, timeout)
        if not self._nccl.available or self._nccl.disabled:  # it would broadcast nothing, and say nothing
            raise RuntimeError(f"NCCL does not work on {at[-1]}")
        self._learner, self._device, self._timeout, self._agree = at[3] - 1, at[-1], timeout, agree
        self._stream = torch.cuda.Stream(self._device)

    def broadcast(self, buffer: Tensor) -> None:
        if self._agree:
            lengths, highest = _lengths(buffer), torch.full((2,), -1, device=self._device)
            self._finish(lambda: self._nccl.all_reduce(lengths, highest, dist.ReduceOp.MAX, self._stream))
            check_agreement(highest, buffer)
        self._finish(lambda: self._nccl.broadcast(buffer, src=self._learner, stream=self._stream))

    def _finish(self, work: Callable[[], object]) -> None:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            work()
            done, until = torch.cuda.Event(), time.monotonic() + self._timeout
            done.record(self._stream)
        while not done.query():
            if time.monotonic() >= until:
                self._nccl.destroy()  # by which what waits on the device ends
                raise RuntimeError(f"nothing came in {self._timeout:g} s")
            time.sleep(0.0005)

    def close(self) -> None:
        self._nccl.destroy()


def _lengths(buffer: Tensor) -> Tensor:
    """Return the length of a buffer and its negative. Their maxima over all ranks tell the longest buffer and the
    shortest."""
    return torch.tensor([buffer.numel(), -buffer.numel()], dtype=torch.int64, device=buffer.device)


def check_agreement(lengths: Tensor, buffer: Tensor) -> None:
    """Raise ValueError if the ranks' buffers differ. `lengths` are the maxima of what `_lengths` gives on each."""
    longest, shortest = int(lengths[0]), -int(lengths[1])
    if not longest == shortest == buffer.numel():
        other = longest if buffer.numel() == shortest else shortest
        raise ValueError(
            f"this end expects a bucket of {buffer.numel()} bytes, and the other end one of {other} bytes: "
            "nothing of it was sent"
        )


def _nccl(at: Joined, timeout: float) -> Any:
    """The first rank says by the store how to come together: as bytes, not by pickle."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    host, port, rank, size, device = at
    store = _store(host, port, rank, size, timeout)
    if rank == 0:
        store.set("nccl", bytes(NCCLLibrary().ncclGetUniqueId().internal))
    return PyNcclCommunicator.from_unique_id_bytes(bytes(store.get("nccl")), rank, size, device)


def _plain_nccl(at: Joined, timeout: float) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    host, port, rank, size, device = at
    return PyNcclCommunicator(StatelessProcessGroup.create(host, port, rank, size), device=device)


def _listen(host: str, port: int) -> socket.socket:
    """The store by itself would listen on every address."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise RuntimeError(f"{host}:{port} cannot be listened on ({error.strerror})") from error
    return listening


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not bound, but looked up


def _own_address(host: str, port: int) -> str:
    """The address that this machine has on its way to the host."""
    family, _, _, _, target = socket.getaddrinfo(_reachable(host), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(target)
        return str(way.getsockname()[0])


def flattened(bucket: Iterable[tuple[str, Tensor]], buffer: Tensor) -> tuple[list[Metadata], Tensor]:
    """What a server is told of a bucket, and the part of `buffer` (bytes) that it was copied to; of a larger
    buffer if it does not fit. The bucket is not empty."""
    weights = list(bucket)
    starts = [0, *accumulate(-(-weight.nbytes // ALIGNMENT) * ALIGNMENT for _, weight in weights)]
    if starts[-1] > buffer.numel():
        buffer = torch.empty(starts[-1], dtype=torch.uint8, device=buffer.device)
    told = []
    for (name, weight), start in zip(weights, starts, strict=False):
        end = start + weight.nbytes
        buffer[start:end].view(weight.dtype).view(weight.shape).copy_(weight)
        told.append(
            {
                "name": name,
                "shape": list(weight.shape),
                "dtype": str(weight.dtype),
                "start_idx": start,
                "end_idx": end,
                "numel": weight.numel(),
            }
        )
    return told, buffer[: told[-1]["end_idx"]]


def flat_bytes(bucket: Iterable[tuple[str, Tensor]]) -> int:
    """How long the buffer of a bucket is; 0 if that is empty."""
    end = 0
    for _, weight in bucket:
        end = -(-end // ALIGNMENT) * ALIGNMENT + weight.nbytes
    return end


@dataclass(frozen=True)
class Place:
    """Where a weight lies in a buffer, read from what was told of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int

    @classmethod
    def of(cls, told: Metadata) -> "Place":
        dtype = getattr(torch, str(told["dtype"]).removeprefix("torch."), None)
        shape, start, end = tuple(map(int, told["shape"])), int(told["start_idx"]), int(told["end_idx"])
        if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
            raise ValueError(f"{told['name']}: no tensor of dtype {told['dtype']} and shape {list(shape)}")
        if start < 0 or end - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"{told['name']}: {list(shape)} of {dtype} is not bytes {start} to {end}")
        return cls(str(told["name"]), shape, dtype, start, end)


def unflattened(places: Iterable[Place], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    for place in places:
        part = buffer[place.start : place.end]
        if place.start % place.dtype.itemsize:  # a sender that does not align
            part = part.clone()
        yield place.name, part.view(place.dtype).view(place.shape)
