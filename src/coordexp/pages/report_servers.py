"""The rollout servers of a run: what each of them did, and in which steps it was out.

`servers.jsonl` has every weight sync and every call for rollouts, and ranks other than the first write files of
their own. A version of the weights is the number of updates before it, so the sync of version 4 is in step 5. A
server was out in a step if it did not get the weights of that step, or if a call to it was lost.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter

from coordexp.files import read_json_lines
from coordexp.pages.run_folder import Count, RunFileModel, validate

MAX_REASONS = 5  # of failed syncs
MAX_STRETCHES = 3  # of steps in which a server was out, in one list
MAX_SERVERS = 3  # that a note names one by one


class ServerAddress(RunFileModel):
    base_url: str


class SyncEvent(RunFileModel):
    """A weight sync. `failed` has the reason by the number of the server."""

    version: Count | None = None
    servers: list[ServerAddress]
    synced: list[Count]
    failed: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], str]


class ServerCall(RunFileModel):
    server: Count
    base_url: str
    count: Count
    lost: Any = False


class RolloutEvent(RunFileModel):
    """A round of calls that together answered the requests of a step."""

    version: Count | None = None
    calls: list[ServerCall]


SYNC, ROLLOUT = TypeAdapter(SyncEvent), TypeAdapter(RolloutEvent)


@dataclass(frozen=True)
class ServerTotals:
    """The work of one server over the whole run. `out` are the steps in which it was out."""

    number: int
    address: str
    calls: int
    answers: int
    lost: int
    synced: int
    failed: int
    out: tuple[int, ...]


@dataclass(frozen=True)
class ServerSummary:
    """`failures` are reasons of failed syncs with their counts, most frequent first. `steps` are those whose
    weights were sent."""

    servers: tuple[ServerTotals, ...]
    failures: tuple[str, ...]
    steps: tuple[int, ...]


def read_servers(folder: Path) -> ServerSummary | None:
    """Return the summary over all ranks of the learner, or None if the run used no servers. Raise DataError if a
    file holds something that no run writes."""
    syncs: list[SyncEvent] = []
    rounds: list[RolloutEvent] = []
    files = sorted(folder.glob("servers*.jsonl"))
    lines = [(f"{file}, line {k}", event) for file in files for k, event in enumerate(read_json_lines(file), 1)]
    for where, event in lines:
        if event.get("event") == "sync":
            syncs.append(validate(SYNC, event, where))
        elif event.get("event") == "rollouts":
            rounds.append(validate(ROLLOUT, event, where))
    return _summarise(syncs, rounds) if lines else None


def _summarise(syncs: Sequence[SyncEvent], rounds: Sequence[RolloutEvent]) -> ServerSummary:
    addresses: dict[int, str] = {}
    counts: Counter[tuple[str, int]] = Counter()
    failures: Counter[str] = Counter()
    synced: dict[int, set[int]] = {}  # the weights of a step may be sent again, to servers that came back
    out: defaultdict[int, set[int]] = defaultdict(set)
    for sync in syncs:
        addresses |= {k: server.base_url for k, server in enumerate(sync.servers)}
        counts.update([*(("synced", k) for k in sync.synced), *(("failed", int(k)) for k in sync.failed)])
        failures.update((reason.splitlines() or ["no reason was given"])[0] for reason in sync.failed.values())
        if sync.version is not None:
            synced.setdefault(sync.version + 1, set()).update(sync.synced)
    for sync in syncs:
        if sync.version is not None:
            for server in set(range(len(sync.servers))) - synced[sync.version + 1]:
                out[server].add(sync.version + 1)
    for event in rounds:
        for call in event.calls:
            addresses.setdefault(call.server, call.base_url)
            counts["lost" if call.lost else "calls", call.server] += 1
            counts["answers", call.server] += 0 if call.lost else call.count
            if call.lost and event.version is not None and event.version + 1 in synced:
                out[call.server].add(event.version + 1)
    totals = [
        ServerTotals(
            number=k,
            address=addresses[k],
            calls=counts["calls", k],
            answers=counts["answers", k],
            lost=counts["lost", k],
            synced=counts["synced", k],
            failed=counts["failed", k],
            out=tuple(sorted(out[k])),
        )
        for k in sorted(addresses)
    ]
    reasons = [
        f"{reason} ({count} times)" if count > 1 else reason for reason, count in failures.most_common(MAX_REASONS)
    ]
    return ServerSummary(tuple(totals), tuple(reasons), tuple(sorted(synced)))


def note_servers_out(summary: ServerSummary, last: int) -> list[str]:
    """Report the servers that were out in some steps. `last` is the last step of the run: the evaluation behind it
    sends weights too."""
    out = [server for server in summary.servers if server.out]
    if len(out) <= MAX_SERVERS:
        return [f"server {server.number} was out in {describe_steps(server.out, summary, last)}" for server in out]
    longest = max(out, key=lambda server: len(server.out))
    return [
        f"{len(out)} of {len(summary.servers)} servers were out in some steps; server {longest.number} in most: "
        f"{describe_steps(longest.out, summary, last)}"
    ]


def describe_steps(steps: Sequence[int], summary: ServerSummary, last: int) -> str:
    """Return the steps as stretches without a gap: steps between which no weights were sent have none."""
    order = {step: k for k, step in enumerate(summary.steps)}
    places = [order[step] for step in steps]
    starts = [k for k in range(len(steps)) if k == 0 or places[k] > places[k - 1] + 1]
    pairs = [(steps[a], steps[b - 1]) for a, b in pairwise([*starts, len(steps)])]
    limited = [(min(first, last), min(end, last)) for first, end in pairs]
    words = [f"{first} to {end}" if first < end else f"{first}" for first, end in limited[:MAX_STRETCHES]]
    if len(pairs) > MAX_STRETCHES:
        words.append(f"and {len(pairs) - MAX_STRETCHES} more times")
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(words)}"
