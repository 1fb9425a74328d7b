"""The rollout servers of a run: what each of them did, and in which steps it was out.

`servers.jsonl` has every weight sync and every call for rollouts, and ranks other than the first write files of
their own. A version of the weights is the number of updates before it, so the sync of version 4 is in step 5. A
server was out in a step if it did not get the weights of that step, or if a call to it was lost.
"""

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter

from coordexp.files import read_json_lines
from coordexp.pages.run_folder import Count, RunFileModel, validate

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


@dataclass
class ServerTotals:
    """The work of one server over the whole run. `out` are the steps in which it was out."""

    address: str
    calls: int = 0
    answers: int = 0
    lost: int = 0
    synced: int = 0
    failed: int = 0
    out: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class ServerSummary:
    """The servers by their numbers, the reasons of failed syncs with their counts, and the steps whose weights
    were sent, in order."""

    servers: dict[int, ServerTotals]
    failures: Counter[str]
    steps: list[int]

    def describe_out(self, server: int, last: int) -> str:
        """Return the steps in which a server was out, as stretches without a gap, or "" if there are none. Steps
        between which no weights were sent make no gap. `last` is the last step of the run: the evaluation behind
        it sends weights too."""
        runs = itertools.groupby(self.steps, key=self.servers[server].out.__contains__)
        stretches = [[min(step, last) for step in steps] for is_out, steps in runs if is_out]
        words = [f"{s[0]} to {s[-1]}" if s[0] < s[-1] else f"{s[0]}" for s in stretches[:MAX_STRETCHES]]
        if len(stretches) > MAX_STRETCHES:
            words.append(f"and {len(stretches) - MAX_STRETCHES} more times")
        return f"step{'s' if sum(map(len, stretches)) > 1 else ''} {', '.join(words)}" if words else ""


def read_servers(folder: Path) -> ServerSummary | None:
    """Return the summary over all ranks of the learner, or None if the run used no servers. Raise DataError if a
    file holds something that no run writes."""
    files = sorted(folder.glob("servers*.jsonl"))
    lines = [(f"{file}, line {k}", event) for file in files for k, event in enumerate(read_json_lines(file), 1)]
    if not lines:
        return None
    syncs = [validate(SYNC, event, where) for where, event in lines if event.get("event") == "sync"]
    rounds = [validate(ROLLOUT, event, where) for where, event in lines if event.get("event") == "rollouts"]
    servers: dict[int, ServerTotals] = {}
    failures: Counter[str] = Counter()
    synced: defaultdict[int, set[int]] = defaultdict(set)  # by step; weights may be sent again
    for sync in syncs:
        for k, server in enumerate(sync.servers):
            totals = servers.setdefault(k, ServerTotals(server.base_url))
            totals.synced += k in sync.synced
            totals.failed += str(k) in sync.failed
        failures.update((reason.splitlines() or ["no reason was given"])[0] for reason in sync.failed.values())
        if sync.version is not None:
            synced[sync.version + 1].update(sync.synced)
    for sync in syncs:
        if sync.version is not None:
            for k in set(range(len(sync.servers))) - synced[sync.version + 1]:
                servers[k].out.add(sync.version + 1)
    for event in rounds:
        for call in event.calls:
            totals = servers.setdefault(call.server, ServerTotals(call.base_url))
            totals.lost += bool(call.lost)
            totals.calls += not call.lost
            totals.answers += 0 if call.lost else call.count
            if call.lost and event.version is not None and event.version + 1 in synced:
                totals.out.add(event.version + 1)
    return ServerSummary(dict(sorted(servers.items())), failures, sorted(synced))


def note_servers_out(summary: ServerSummary, last: int) -> list[str]:
    """Report the servers that were out in some steps. `last` is the last step of the run."""
    out = {k: summary.describe_out(k, last) for k, server in summary.servers.items() if server.out}
    if len(out) <= MAX_SERVERS:
        return [f"server {k} was out in {steps}" for k, steps in out.items()]
    longest = max(out, key=lambda k: len(summary.servers[k].out))
    count = f"{len(out)} of {len(summary.servers)} servers were out in some steps"
    return [f"{count}; server {longest} in most: {out[longest]}"]
