"""Which servers may be asked, and who gets which request: a state machine and arithmetic, no network, no clock.

A server may be asked only while it has the weights of the pool's version. One that failed is out, with the reason,
and comes back only by a full sync at the version that is current then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from coordexp.config.capacity import capacity_shortage, requests_per_rank

T = TypeVar("T")
Chunk = tuple[int, tuple[int, ...]]  # a server, and the places of its requests


@dataclass(frozen=True)
class Up:
    version: int


@dataclass(frozen=True)
class Out:
    reason: str


@dataclass(frozen=True)
class Pool:
    """`version` is that of the weights which answers are to be made by; None before there are any."""

    world_sizes: tuple[int, ...]
    states: tuple[Up | Out, ...]
    version: int | None = None

    @classmethod
    def of(cls, world_sizes: Sequence[int]) -> "Pool":
        return cls(tuple(world_sizes), (Out("no weights were sent to it yet"),) * len(world_sizes))

    @property
    def usable(self) -> tuple[int, ...]:
        if self.version is None:
            return ()
        return tuple(k for k, state in enumerate(self.states) if state == Up(self.version))

    @property
    def out(self) -> dict[int, str]:
        return {k: state.reason for k, state in enumerate(self.states) if isinstance(state, Out)}

    @property
    def behind(self) -> tuple[int, ...]:
        """Those that need a sync."""
        return tuple(k for k in range(len(self.states)) if k not in self.usable)

    def at(self, version: int) -> "Pool":
        """The learner has new weights: nobody has them yet."""
        return replace(self, version=version)

    def synced(self, server: int, version: int) -> "Pool":
        """It has all weights of `version`. If that is not the current one, it does not come back by it."""
        return self._with(server, Up(version)) if version == self.version else self

    def lost(self, server: int, reason: str) -> "Pool":
        """In whatever it was doing. The first reason is kept."""
        return self if isinstance(self.states[server], Out) else self._with(server, Out(reason))

    def failed(self, server: int, reason: str) -> "Pool":
        """It could not be brought back: the newest reason is kept."""
        return self._with(server, Out(reason))

    def without(self, losses: Mapping[int, str]) -> "Pool":
        found = self
        for server, reason in sorted(losses.items()):
            found = found.lost(server, reason)
        return found

    def sized(self, world_sizes: Sequence[int]) -> "Pool":
        return replace(self, world_sizes=tuple(world_sizes))

    def _with(self, server: int, state: Up | Out) -> "Pool":
        states = list(self.states)
        states[server] = state
        return replace(self, states=tuple(states))

    def capacity(self, decode_batch_size: int, learners: int) -> int:
        """Requests that one learner rank may have out at once (R15). While servers are out, at least one."""
        sizes = tuple(self.world_sizes[k] for k in self.usable)
        if capacity_shortage(decode_batch_size, sizes, learners):
            return 1
        return requests_per_rank(decode_batch_size, sizes, learners)

    def chunks(self, places: Sequence[int], rank: int = 0, learners: int = 1) -> list[Chunk]:
        """Who of the usable servers gets which of these requests. Rank 0 begins with the first server; the others
        further on, each where its part of the devices begins, so that many ranks with few requests each do not
        all ask the same one."""
        turned = self._turned(rank, learners)
        counts = shares(len(places), [self.world_sizes[k] for k in turned])
        found, start = [], 0
        for server, count in zip(turned, counts, strict=True):
            if count:
                found.append((server, tuple(places[start : start + count])))
            start += count
        return found

    def _turned(self, rank: int, learners: int) -> tuple[int, ...]:
        usable = self.usable
        first = rank * sum(self.world_sizes[k] for k in usable) // learners  # a device
        for at, server in enumerate(usable):
            if first < self.world_sizes[server]:
                return usable[at:] + usable[:at]
            first -= self.world_sizes[server]
        return usable


def shares(count: int, world_sizes: Sequence[int]) -> list[int]:
    """How many of `count` requests each server gets (D20): the first so many, then the next one."""
    if count == 0 or not world_sizes:
        return [0] * len(world_sizes)
    if len(set(world_sizes)) == 1:
        size = -(-count // len(world_sizes))
        return [max(0, min(size, count - k * size)) for k in range(len(world_sizes))]
    devices = sum(world_sizes)
    found = [count * size // devices for size in world_sizes]
    by_rest = sorted(range(len(found)), key=lambda k: (-(count * world_sizes[k] % devices), k))
    for k in by_rest[: count - sum(found)]:
        found[k] += 1
    return found


def answered(
    pool: Pool,
    count: int,
    decode_batch_size: int,
    ask: Callable[[list[Chunk]], tuple[dict[int, T], dict[int, str]]],
    rank: int = 0,
    learners: int = 1,
    have: Mapping[int, T] | None = None,
) -> tuple[Pool, dict[int, T]]:
    """Wave by wave until all requests are answered or no server is left, besides those that `have` an answer.
    `ask` gives the answers by place, and the servers that were lost, whose requests go to those that are left."""
    found = dict(have or {})
    while pool.usable and (waiting := [place for place in range(count) if place not in found]):
        wave = waiting[: pool.capacity(decode_batch_size, learners)]
        answers, losses = ask(pool.chunks(wave, rank, learners))
        found |= answers
        pool = pool.without(losses)
    return pool, found
