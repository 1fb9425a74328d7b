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
class Up:
    version: int


@dataclass(frozen=True)
class Out:
    loss: Loss


@dataclass(frozen=True)
class Pool:
    """The state of all servers. `version` is that of the weights to answer with; None before the first sync."""

    world_sizes: tuple[int, ...]
    states: tuple[Up | Out, ...]
    version: int | None = None

    @classmethod
    def of(cls, world_sizes: Sequence[int]) -> "Pool":
        return cls(tuple(world_sizes), (Out(Loss("no weights were sent to it yet")),) * len(world_sizes))

    @property
    def usable(self) -> tuple[int, ...]:
        if self.version is None:
            return ()
        return tuple(k for k, state in enumerate(self.states) if state == Up(self.version))

    @property
    def out(self) -> dict[int, Loss]:
        return {k: state.loss for k, state in enumerate(self.states) if isinstance(state, Out)}

    @property
    def behind(self) -> tuple[int, ...]:
        """The servers that need a sync."""
        return tuple(k for k in range(len(self.states)) if k not in self.usable)

    def advance_to(self, version: int) -> "Pool":
        """Return the pool after the learner got new weights, which no server has yet."""
        return replace(self, version=version)

    def mark_synced(self, server: int, version: int) -> "Pool":
        """Mark the server as holding `version`. It rejoins the pool only if that is the current version."""
        return self._with_state(server, Up(version)) if version == self.version else self

    def mark_lost(self, server: int, loss: Loss) -> "Pool":
        """Mark the server as out. If it is out already, keep the first reason."""
        return self if isinstance(self.states[server], Out) else self._with_state(server, Out(loss))

    def mark_failed(self, server: int, loss: Loss) -> "Pool":
        """Mark the server as out because an attempt to bring it back failed. Keep this newest reason."""
        return self._with_state(server, Out(loss))

    def mark_all_lost(self, losses: Mapping[int, Loss]) -> "Pool":
        pool = self
        for server, loss in sorted(losses.items()):
            pool = pool.mark_lost(server, loss)
        return pool

    def _with_state(self, server: int, state: Up | Out) -> "Pool":
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

    def split_into_chunks(self, requests: Sequence[int], rank: int = 0, learners: int = 1) -> list[Chunk]:
        """Return which of the usable servers gets which of these requests. Rank 0 begins with the first server.
        Every other rank begins where its part of the devices begins, so that many ranks with few requests each do
        not all ask the same server."""
        servers = self.rotate_servers(rank, learners)
        counts = split_count(len(requests), [self.world_sizes[k] for k in servers])
        chunks, start = [], 0
        for server, count in zip(servers, counts, strict=True):
            if count:
                chunks.append((server, tuple(requests[start : start + count])))
            start += count
        return chunks

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
    """The requests of one rank that wait for a server, and those that are open on one.

    Requests are dealt to the usable servers in contiguous chunks. If all of them may be open at once, each server
    gets its chunk in one call. Otherwise they go out one by one as others are answered, and a server whose chunk
    is done takes requests from the end of the chunk that is furthest behind, so that none idles while requests
    wait. The servers in `serial` answer one call at a time; they get as many requests in a call as may be open."""

    def __init__(
        self,
        pool: Pool,
        decode_batch_size: int,
        rank: int = 0,
        learners: int = 1,
        serial: frozenset[int] = frozenset(),
    ) -> None:
        self.pool = pool
        self.serial = serial
        self._batch, self._rank, self._learners = decode_batch_size, rank, learners
        self._waiting: dict[int, deque[int]] = {server: deque() for server in pool.usable}
        self._open: dict[int, list[Chunk]] = {server: [] for server in pool.usable}
        self._count: dict[int, int] = dict.fromkeys(pool.usable, 0)  # requests that are open
        self._set_limits()

    @property
    def is_idle(self) -> bool:
        """True if no request is open: all are answered, or no server is left."""
        return not any(self._count.values())

    def deal(self, requests: Sequence[int]) -> None:
        """Add requests behind those that wait."""
        for server, part in self.pool.split_into_chunks(requests, self._rank, self._learners):
            self._waiting[server].extend(part)

    def next_calls(self) -> list[Chunk]:
        """Return the calls that may be made now. They count as open until `close` or `lose`."""
        calls: list[Chunk] = []
        waiting = sum(map(len, self._waiting.values()))
        if not waiting:
            return calls
        room = {server: most - self._count[server] for server, most in self._most.items()}
        room |= {server: 0 for server in self.serial if self._count.get(server)}
        free = self._capacity - sum(self._count.values())
        all_fit = waiting <= free and all(len(queue) <= room[k] for k, queue in self._waiting.items())
        while (server := self._next_server(room, free)) is not None:
            is_whole = all_fit or server in self.serial
            part = self._take(server, min(room[server], free) if is_whole else 1)
            room[server] = 0 if server in self.serial else room[server] - len(part)
            free -= len(part)
            calls.append((server, part))
            self._open[server].append((server, part))
            self._count[server] += len(part)
        return calls

    def close(self, call: Chunk) -> None:
        """Note that the requests of a call are answered."""
        server, part = call
        if server in self._open:
            self._open[server].remove(call)
            self._count[server] -= len(part)

    def lose(self, server: int, loss: Loss) -> None:
        """Take a server out. Its requests go to the others, in front of those that wait there. If it was the last
        server, the window forgets them."""
        if server not in self._open:
            return
        self.pool = self.pool.mark_lost(server, loss)
        del self._count[server]
        self._set_limits()
        open_requests = [request for _, part in self._open.pop(server) for request in part]
        requests = sorted([*open_requests, *self._waiting.pop(server)])
        for other, part in self.pool.split_into_chunks(requests, self._rank, self._learners):
            self._waiting[other].extendleft(reversed(part))

    def _set_limits(self) -> None:
        """Compute how many requests of this rank may be open, on all servers and on each: its part, rounded up."""
        servers = self.pool.rotate_servers(self._rank, self._learners)  # the order in which they are asked
        sizes = {server: self.pool.world_sizes[server] for server in servers}
        self._capacity = self.pool.capacity(self._batch, self._learners)
        self._most = {server: -(-self._capacity * size // sum(sizes.values())) for server, size in sizes.items()}

    def _next_server(self, room: Mapping[int, int], free: int) -> int | None:
        """Return the server with the most room among those with requests of their own, else among all."""
        if free <= 0 or not any(self._waiting.values()):
            return None
        roomy = [server for server in room if room[server] > 0]
        own = [server for server in roomy if self._waiting[server]]
        return max(own or roomy, key=lambda server: room[server], default=None)

    def _take(self, server: int, count: int) -> tuple[int, ...]:
        queue = self._waiting[server]
        if queue:
            return tuple(queue.popleft() for _ in range(min(count, len(queue))))
        behind = max(self._waiting.values(), key=len)
        return tuple(sorted(behind.pop() for _ in range(min(count, len(behind)))))
