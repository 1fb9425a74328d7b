"""The pool of servers: which may be asked, and which gets which request. A state machine and arithmetic, without
network or clock.

A server may be asked only while it has the weights of the pool's version. A server that failed is out, with the
reason. It rejoins only by a full sync of the version that is current then.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from coordexp.config.rollout import capacity_shortage, requests_per_rank
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

    @property
    def behind(self) -> tuple[int, ...]:
        """The servers that need a sync."""
        return tuple(k for k in range(len(self.states)) if k not in self.usable)

    def advance_to(self, version: int) -> "Pool":
        """Return the pool after the learner got new weights, which no server has yet."""
        return replace(self, version=version)

    def mark_synced(self, server: int, version: int) -> "Pool":
        """Mark the server as holding `version`. It rejoins the pool only if that is the current version."""
        return self._with_state(server, version) if version == self.version else self

    def mark_lost(self, server: int, loss: Loss) -> "Pool":
        """Mark the server as out. If it is out already, keep the first reason."""
        return self if isinstance(self.states[server], Loss) else self._with_state(server, loss)

    def mark_failed(self, server: int, loss: Loss) -> "Pool":
        """Mark the server as out because an attempt to bring it back failed. Keep this newest reason."""
        return self._with_state(server, loss)

    def _with_state(self, server: int, state: int | Loss) -> "Pool":
        states = list(self.states)
        states[server] = state
        return replace(self, states=tuple(states))

    def capacity(self, decode_batch_size: int, learners: int) -> int:
        """Return how many requests one learner rank may have out at once: with all ranks, no more than the usable
        devices decode at once. While servers are out, at least one."""
        sizes = tuple(self.world_sizes[k] for k in self.usable)
        if capacity_shortage(decode_batch_size, sizes, learners):
            return 1
        return requests_per_rank(decode_batch_size, sizes, learners)

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
    be open go out in contiguous chunks, one call per request, and each time that one is answered, the next in the
    queue goes to the server with the most room. So no server idles while requests wait. The servers in `serial`
    answer one call at a time; they get as many requests in a call as may be open."""

    def __init__(
        self,
        pool: Pool,
        decode_batch_size: int,
        rank: int = 0,
        learners: int = 1,
        serial: frozenset[int] = frozenset(),
    ) -> None:
        self.pool, self.serial = pool, serial
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
        if self.is_idle:
            counts = self.pool.split(min(capacity, len(self._waiting)), self._rank, self._learners)
        else:
            counts = self._fill(capacity)
        calls = self._take(counts, one_by_one=not fits)
        for call in calls:
            self._open[call[0]].append(call)
        return calls

    def close(self, call: Chunk) -> None:
        """Note that the requests of a call are answered."""
        if call[0] in self._open:
            self._open[call[0]].remove(call)

    def lose(self, server: int, loss: Loss) -> None:
        """Take a server out. Its requests go to the front of the queue. If it was the last server, the window
        forgets all that wait."""
        if server not in self._open:
            return
        self.pool = self.pool.mark_lost(server, loss)
        self._waiting.extendleft(sorted((k for _, part in self._open.pop(server) for k in part), reverse=True))
        if not self._open:
            self._waiting.clear()

    def _fill(self, capacity: int) -> dict[int, int]:
        """Return how many requests each server gets beside those that are open: at most its part of the capacity,
        rounded up. The first goes to the server with the most room."""
        servers = self.pool.rotate_servers(self._rank, self._learners)
        sizes = {server: self.pool.world_sizes[server] for server in servers}
        is_open = {server: sum(len(part) for _, part in self._open[server]) for server in sizes}
        room = {k: -(-capacity * size // sum(sizes.values())) - is_open[k] for k, size in sizes.items()}
        room |= {server: 0 for server in self.serial if is_open.get(server)}
        counts = dict.fromkeys(sizes, 0)
        for _ in range(min(len(self._waiting), capacity - sum(is_open.values()))):
            server = max(room, key=lambda k: room[k])
            if room[server] <= 0:
                break
            room[server] -= 1
            counts[server] += 1
        return counts

    def _take(self, counts: Mapping[int, int], one_by_one: bool) -> list[Chunk]:
        """Take the next requests from the queue, for one server after the other."""
        calls: list[Chunk] = []
        for server, count in counts.items():
            part = tuple(self._waiting.popleft() for _ in range(count))
            if one_by_one and server not in self.serial:
                calls += [(server, (request,)) for request in part]
            elif part:
                calls.append((server, part))
        return calls
