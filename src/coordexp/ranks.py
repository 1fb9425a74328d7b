"""Collectives on plain data, and the rule that an error on one rank is the same error on all of them."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from coordexp.errors import UserError

T = TypeVar("T")
_TOLD = "All other ranks were told, and end too."


class RankError(UserError, RuntimeError):
    """What went wrong on another rank, raised on this one too."""


class RankLostError(UserError, RuntimeError):
    """Another rank does not answer any more."""


def together(work: Callable[[], T], waited: Callable[[float], None] = lambda seconds: None) -> T:
    """What `work` gives. If it fails on any rank, it fails on all: there with its own error, here with a
    `RankError` that tells it. One small collective; `waited` gets the seconds that other ranks took longer.

    Calls may be nested, and a rank that failed early meets the others at whichever they come to next; from there
    the error passes through the outer calls of all ranks without another collective. So work that has other
    collectives in it must come to a `together` of its own right before them."""
    if not dist.is_initialized():
        return work()
    result, failed = None, None
    try:
        result = work()
    except (RankError, RankLostError):
        raise
    except Exception as error:  # raised again below, on every rank
        if _TOLD in getattr(error, "__notes__", ()):  # in a call inside of this one
            raise
        failed = error
    since = time.perf_counter()
    anywhere = sum_over_ranks([float(failed is not None)])[0]
    waited(time.perf_counter() - since)
    if anywhere:
        told = gather_texts("" if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is not None:
            failed.add_note(_TOLD)
            raise failed
        rank, text = next((rank, text) for rank, text in enumerate(told) if text)
        raise RankError(f"rank {rank} failed, and with it all others\n  {text}")
    return result  # type: ignore[return-value]


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    return _reduce_over_ranks(values, dist.ReduceOp.SUM)


def max_over_ranks(value: int, waited: Callable[[float], None] = lambda seconds: None) -> int:
    """Return the largest value of all ranks. `waited` gets the seconds that other ranks took longer."""
    if not dist.is_initialized():
        return value
    since = time.perf_counter()
    largest = int(_reduce_over_ranks([value], dist.ReduceOp.MAX)[0])
    waited(time.perf_counter() - since)
    return largest


def _reduce_over_ranks(values: Sequence[float], operation: Any) -> list[float]:
    if not dist.is_initialized():
        return list(values)
    reduced = torch.tensor(values, dtype=torch.float64, device=_device())
    try:
        dist.all_reduce(reduced, operation)
    except RuntimeError as error:
        if lost := lost_rank(error):
            raise lost from error
        raise
    return reduced.tolist()


def gather_texts(text: str) -> list[str]:
    """The texts of all ranks, on all ranks. As bytes in tensors: nothing is unpickled."""
    if not dist.is_initialized():
        return [text]
    data, device = text.encode(errors="backslashreplace"), _device()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    mine = torch.tensor([len(data)], device=device)
    try:
        dist.all_gather(sizes, mine)
        padded = torch.zeros(max(1, *map(int, sizes)), dtype=torch.uint8, device=device)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        parts = [torch.zeros_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
    except RuntimeError as error:
        if lost := lost_rank(error):
            raise lost from error
        raise
    return [bytes(part[: int(size)].tolist()).decode() for part, size in zip(parts, sizes, strict=True)]


def _device() -> torch.device:
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def lost_rank(error: RuntimeError) -> RankLostError | None:
    """What a collective's failure means, if it means that a rank is gone. Also for those inside of other
    libraries, such as DDP's reduction of gradients."""
    first = str(error).splitlines()[0] if str(error) else ""
    gone = isinstance(error, dist.DistError) or any(word in str(error) for word in _GONE)
    if not dist.is_initialized() or not gone:
        return None
    return RankLostError(
        f"rank {dist.get_rank()} lost another rank and cannot go on ({first})\n"
        "  the output of the rank that ended first, and torchrun's summary, say why; --resume goes on"
    )


_GONE = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted")
