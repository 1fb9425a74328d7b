"""The pool of servers: which may be asked, and which gets which request. A state machine and arithmetic, without
network or clock.

A server may be asked only while it has the weights of the pool's version. A server that failed is out, with the
reason. It rejoins only when a sync has given it the version that is current then.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from coordexp.errors import UserError

Chunk = tuple[int, tuple[int, ...]]  # a server, and the indices of its requests


class Loss(NamedTuple):
    """Why a server is out, and what to do about it. As JSON, it is a list of the two."""

    problem: str
    fix: str = ""

    @classmethod
    def from_error(cls, error: UserError) -> "Loss":
        return cls(error.problem, error.fix)


@dataclass(frozen=True)
class Pool:
    """The state of all servers: the version of its weights, or why it is out. `version` is that of the weights to
    answer with; None before the first sync."""

    world_sizes: tuple[int, ...]
    states: tuple[int | Loss, ...]
    version: int | None = None

    @classmethod
    def of(cls, world_sizes: Sequence[int]) -> "Pool":
        return cls(tuple(world_sizes), (Loss("no weights were sent to it yet"),) * len(world_sizes))

    @property
    def usable(self) -> tuple[int, ...]:
        if self.version is None:
            return ()
        return tuple(k for k, state in enumerate(self.states) if state == self.version)

    @property
    def out(self) -> dict[int, Loss]:
        return {k: state for k, state in enumerate(self.states) if isinstance(state, Loss)}

    def mark(self, server: int, state: int | Loss) -> "Pool":
        """Set the state of a server: it has the weights of a version, or it is out."""
        return replace(self, states=(*self.states[:server], state, *self.states[server + 1 :]))

    def capacity(self, decode_batch_size: int, learners: int) -> int:
        """Return how many requests one learner rank may have out at once: with all ranks, no more than the usable
        devices decode at once. While servers are out, at least one."""
        devices = sum(self.world_sizes[k] for k in self.usable)
        return max(1, decode_batch_size * devices // learners)

    def split(self, count: int, rank: int = 0, learners: int = 1) -> dict[int, int]:
        """Return how many of `count` requests each of the usable servers gets, which are contiguous chunks in this
        order. Rank 0 begins with the first server. Every other rank begins where its part of the devices begins,
        so that many ranks with few requests each do not all ask the same server."""
        servers = self.rotate_servers(rank, learners)
        return dict(zip(servers, split_count(count, [self.world_sizes[k] for k in servers]), strict=True))

    def rotate_servers(self, rank: int, learners: int) -> tuple[int, ...]:
        usable = self.usable
        first = rank * sum(self.world_sizes[k] for k in usable) // learners  # the rank's first device
        for index, server in enumerate(usable):
            if first < self.world_sizes[server]:
                return usable[index:] + usable[:index]
            first -= self.world_sizes[server]
        return usable


def sending_rank(server: int, senders: int, ranks: int) -> int:
    """Return the learner rank that sends weights to a server. The servers take turns with the senders, which are
    spread evenly over the ranks: with as many senders as nodes, they are the first ranks of the nodes."""
    return server % senders * ranks // senders


def split_count(count: int, world_sizes: Sequence[int]) -> list[int]:
    """Return how many of `count` requests each server gets. Servers of equal size get chunks of the rounded-up
    size, one after the other. Otherwise each server gets its proportion, by the largest remainder."""
    if count == 0 or not world_sizes:
        return [0] * len(world_sizes)
    if len(set(world_sizes)) == 1:
        size = -(-count // len(world_sizes))
        return [max(0, min(size, count - k * size)) for k in range(len(world_sizes))]
    devices = sum(world_sizes)
    counts = [count * size // devices for size in world_sizes]
    by_remainder = sorted(range(len(counts)), key=lambda k: (-(count * world_sizes[k] % devices), k))
    for k in by_remainder[: count - sum(counts)]:
        counts[k] += 1
    return counts


class Window:
    """The requests of one rank: a queue of those that wait, and those that are open on a server.

    If all of them may be open at once, each server gets its contiguous chunk in one call. Otherwise as many as may
    be open go out in contiguous chunks, one call per request, and each time that one is answered, its server gets
    the next in the queue. So no server idles while requests wait."""

    def __init__(self, pool: Pool, decode_batch_size: int, rank: int = 0, learners: int = 1) -> None:
        self.pool = pool
        self._batch, self._rank, self._learners = decode_batch_size, rank, learners
        self._waiting: deque[int] = deque()
        self._open: dict[int, list[Chunk]] = {server: [] for server in pool.usable}

    @property
    def is_idle(self) -> bool:
        """True if no request is open: all are answered, or no server is left."""
        return not any(self._open.values())

    def add(self, requests: Sequence[int]) -> None:
        """Add requests behind those that wait."""
        self._waiting.extend(requests)

    def next_calls(self) -> list[Chunk]:
        """Return the calls that may be made now. They count as open until `close` or `lose`."""
        capacity = self.pool.capacity(self._batch, self._learners)
        fits = self.is_idle and len(self._waiting) <= capacity
        most = self.pool.split(len(self._waiting) if fits else capacity, self._rank, self._learners)
        is_open = {server: sum(len(part) for _, part in calls) for server, calls in self._open.items()}
        left = capacity - sum(is_open.values())  # below 0 if the capacity has shrunk
        made: list[Chunk] = []
        for server, count in most.items():
            free = min(count - is_open[server], left, len(self._waiting))
            part = tuple(self._waiting.popleft() for _ in range(free))
            left -= len(part)
            made += [(server, part)] if fits and part else [(server, (request,)) for request in part]
        for call in made:
            self._open[call[0]].append(call)
        return made

    def close(self, call: Chunk) -> None:
        """Note that the requests of a call are answered."""
        if call[0] in self._open:
            self._open[call[0]].remove(call)

    def lose(self, server: int, loss: Loss) -> None:
        """Take a server out. Its requests go to the front of the queue. If it was the last server, the window
        forgets all that wait."""
        if server not in self._open:
            return
        self.pool = self.pool.mark(server, loss)
        self._waiting.extendleft(sorted((k for _, part in self._open.pop(server) for k in part), reverse=True))
        if not self._open:
            self._waiting.clear()
