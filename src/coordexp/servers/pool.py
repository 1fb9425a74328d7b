"""The pool of servers: which may be asked, and which gets which request. A state machine and arithmetic, without
network or clock.

A server may be asked only while it has the weights of the pool's version. A server that failed is out, with the
reason. It rejoins only by a full sync of the version that is current then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from coordexp.config.rollout import capacity_shortage, requests_per_rank
from coordexp.errors import UserError

T = TypeVar("T")
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
        servers = self._rotate_servers(rank, learners)
        counts = split_count(len(requests), [self.world_sizes[k] for k in servers])
        chunks, start = [], 0
        for server, count in zip(servers, counts, strict=True):
            if count:
                chunks.append((server, tuple(requests[start : start + count])))
            start += count
        return chunks

    def _rotate_servers(self, rank: int, learners: int) -> tuple[int, ...]:
        usable = self.usable
        first = rank * sum(self.world_sizes[k] for k in usable) // learners  # the rank's first device
        for index, server in enumerate(usable):
            if first < self.world_sizes[server]:
                return usable[index:] + usable[:index]
            first -= self.world_sizes[server]
        return usable


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


def ask_in_waves(
    pool: Pool,
    count: int,
    decode_batch_size: int,
    ask: Callable[[list[Chunk]], tuple[dict[int, T], dict[int, Loss]]],
    rank: int = 0,
    learners: int = 1,
    known: Mapping[int, T] | None = None,
) -> tuple[Pool, dict[int, T]]:
    """Ask for the answers to requests 0 to `count` - 1, except those that are `known`, until all are there or no
    server is left. `ask` returns the answers by request, and the servers that were lost. Their requests go to the
    servers that are left. Return the pool and all answers."""
    answers = dict(known or {})
    while pool.usable and (waiting := [request for request in range(count) if request not in answers]):
        wave = waiting[: pool.capacity(decode_batch_size, learners)]
        new, losses = ask(pool.split_into_chunks(wave, rank, learners))
        answers |= new
        pool = pool.mark_all_lost(losses)
    return pool, answers
