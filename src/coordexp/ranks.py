"""Collectives on plain data, the rule that an error on one rank stops all ranks, and how weights are sharded.

These collectives have a process group of their own, which is gloo's: on the group of the gradients they would have
to wait until the GPU has computed everything that was queued before them.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from coordexp.errors import EngineError, UserError
from coordexp.tasks import ignore

T = TypeVar("T")
_SHARED = "All other ranks have this error, and end too."
_LOST = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted")


class RankError(UserError, RuntimeError):
    """An error of another rank, raised on this one too."""


class RankLostError(UserError, RuntimeError):
    """Another rank no longer responds."""


def find_rank() -> tuple[int, int]:
    """Return the number of this rank, and of all ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def together(work: Callable[[], T], waited: Callable[[float], None] = ignore) -> T:
    """Return the result of `work`. If it fails on any rank, raise on all: its own error where it failed, and a
    `RankError` with the same text elsewhere.

    This costs one small collective. `waited` is called with the seconds that this rank waited for the others.

    Calls may be nested. If one rank fails inside nested calls, the others learn of it at their next `together`,
    and the error then leaves all outer calls without further collectives. So call `together` directly before any
    other collective inside `work`."""
    if not dist.is_initialized():
        return work()
    result, failed = None, None
    try:
        result = work()
    except (RankError, RankLostError):
        raise
    except Exception as error:  # raised again below, on every rank
        if _SHARED in getattr(error, "__notes__", ()):  # by a nested call
            raise
        failed = error
    since = time.perf_counter()
    anywhere = sum_over_ranks([float(failed is not None)])[0]
    waited(time.perf_counter() - since)
    if anywhere:
        messages = gather_texts("" if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None:
            failed.add_note(_SHARED)
            raise failed
        rank, message = next((rank, message) for rank, message in enumerate(messages) if message)
        raise RankError(f"rank {rank} failed, so all ranks stop", message)  # the message has its own fix
    return result  # type: ignore[return-value]


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sums of the values of all ranks."""
    return _reduce_over_ranks(values, dist.ReduceOp.SUM)


def max_over_ranks(value: int, waited: Callable[[float], None] = ignore) -> int:
    """Return the largest value of all ranks. `waited` is called with the seconds that this rank waited."""
    if not dist.is_initialized():
        return value
    since = time.perf_counter()
    largest = int(_reduce_over_ranks([value], dist.ReduceOp.MAX)[0])
    waited(time.perf_counter() - since)
    return largest


def _reduce_over_ranks(values: Sequence[float], operation: Any) -> list[float]:
    if not dist.is_initialized():
        return list(values)
    reduced = torch.tensor(values, dtype=torch.float64)
    with _raising_lost_rank():
        dist.all_reduce(reduced, operation, group=control_group())
    return reduced.tolist()


def gather_texts(text: str) -> list[str]:
    """Return the texts of all ranks, on all ranks. They travel as bytes in tensors, so nothing is unpickled."""
    if not dist.is_initialized():
        return [text]
    data = bytearray(text.encode(errors="backslashreplace"))
    sizes = torch.zeros(dist.get_world_size(), 1, dtype=torch.int64)
    with _raising_lost_rank():
        dist.all_gather(list(sizes), torch.tensor([len(data)]), group=control_group())
        longest = max(1, int(sizes.max()))
        padded = torch.frombuffer(data.ljust(longest, b"\0"), dtype=torch.uint8)
        parts = torch.empty(len(sizes), longest, dtype=torch.uint8)
        dist.all_gather(list(parts), padded, group=control_group())
    return [part[:size].tobytes().decode() for part, size in zip(parts.numpy(), sizes[:, 0].tolist(), strict=True)]


def control_group() -> dist.ProcessGroup:
    """Return the group of these collectives. All ranks make the first call together, which creates it."""
    return _make_control_group(dist.group.WORLD)


@functools.cache
def _make_control_group(world: Any) -> dist.ProcessGroup:
    """Return a new gloo group whose collectives may take as long as those of `world` (`training.ddp_timeout`)."""
    device = torch.device("cuda" if dist.get_backend(world) == "nccl" else "cpu")
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=world._get_backend(device).options._timeout)
    return group


@contextmanager
def _raising_lost_rank() -> Iterator[None]:
    """Raise a `RankLostError` in place of the error of a collective that failed because a rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if lost := to_rank_lost_error(error):
            raise lost from error
        raise


def to_rank_lost_error(error: RuntimeError) -> RankLostError | None:
    """Return the error to raise instead, if a collective failed because another rank is gone; otherwise None.

    Collectives inside other libraries fail in the same way, such as DDP's reduction of gradients."""
    first = str(error).splitlines()[0] if str(error) else ""
    lost = isinstance(error, dist.DistError) or any(words in str(error) for words in _LOST)
    if not dist.is_initialized() or not lost:
        return None
    return RankLostError(
        f"rank {dist.get_rank()} lost another rank and cannot go on ({first})",
        "the output of the rank that ended first, and torchrun's summary, say why; --resume continues",
    )


def is_sharded(model: Any) -> bool:
    """Return True if the weights are sharded over ranks with FSDP2.

    Raise if they are sharded in another way. Such a model cannot generate, since every rank would have to run the
    same number of forward passes, and it cannot be sent to an engine, since no weight is whole under its own
    name."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # takes seconds to import
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise EngineError(
            "a model that is sharded with FSDP version 1 cannot make rollouts",
            "use FSDP2 (training.fsdp_config: {version: 2}) or DDP",
        )
    return dist.is_initialized() and any(isinstance(weight, DTensor) for weight in model.parameters())
