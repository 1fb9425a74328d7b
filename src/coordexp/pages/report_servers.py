"""The rollout servers of a run: what each of them did, and in which steps it was out.

`servers.jsonl` has every weight sync and every call for rollouts, and ranks other than the first write files of
their own. A version of the weights is the number of updates before it, so the sync of version 4 is in step 5. A
server was out in a step if it did not get the weights of that step, or if a call to it was lost.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordexp.errors import explain
from coordexp.files import read_json_lines
from coordexp.pages.curves import NOT_WRITTEN_BY_A_RUN

MALFORMED = (KeyError, TypeError, AttributeError, IndexError)  # what an event of another form raises
MAX_SERVERS = 3  # that a note names one by one


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
    """The servers by their numbers, and the reasons of failed syncs with their counts."""

    servers: dict[int, ServerTotals]
    failures: Counter[str]

    def describe_out(self, server: int, last: int) -> str:
        """Return the steps in which a server was out, or "" if there are none. `last` is the last step of the run:
        the evaluation behind it sends weights too."""
        steps = sorted({min(step, last) for step in self.servers[server].out})
        if len(steps) > 1:
            return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        return f"step {steps[0]}" if steps else ""


def read_servers(folder: Path) -> ServerSummary | None:
    """Return the summary over all ranks of the learner, or None if the run used no servers. Raise DataError if a
    file holds something that no run writes."""
    events = [event for file in sorted(folder.glob("servers*.jsonl")) for event in read_json_lines(file)]
    with explain(MALFORMED, f"{folder / 'servers.jsonl'} has an event without its parts", NOT_WRITTEN_BY_A_RUN):
        return _summarise(events) if events else None


def _summarise(events: Sequence[Mapping[str, Any]]) -> ServerSummary:
    servers: dict[int, ServerTotals] = {}
    failures: Counter[str] = Counter()
    synced: defaultdict[int, set[int]] = defaultdict(set)  # by step; weights may be sent again
    syncs = [event for event in events if event.get("event") == "sync"]
    for sync in syncs:
        for k, server in enumerate(sync["servers"]):
            totals = servers.setdefault(k, ServerTotals(str(server["base_url"])))
            totals.synced += k in sync["synced"]
            totals.failed += str(k) in sync["failed"]
        failures.update((reason.splitlines() or ["no reason was given"])[0] for reason in sync["failed"].values())
        if sync.get("version") is not None:
            synced[sync["version"] + 1].update(sync["synced"])
    for sync in syncs:
        if sync.get("version") is not None:
            for k in set(range(len(sync["servers"]))) - synced[sync["version"] + 1]:
                servers[k].out.add(sync["version"] + 1)
    for event in events:
        for call in event["calls"] if event.get("event") == "rollouts" else ():
            totals = servers.setdefault(call["server"], ServerTotals(str(call["base_url"])))
            if not call.get("lost"):
                totals.calls += 1
                totals.answers += call["count"]
                continue
            totals.lost += 1
            if event.get("version") is not None and event["version"] + 1 in synced:
                totals.out.add(event["version"] + 1)
    return ServerSummary(dict(sorted(servers.items())), failures)


def note_servers_out(summary: ServerSummary, last: int) -> list[str]:
    """Report the servers that were out in some steps. `last` is the last step of the run."""
    out = {k: summary.describe_out(k, last) for k, server in summary.servers.items() if server.out}
    if len(out) <= MAX_SERVERS:
        return [f"server {k} was out in {steps}" for k, steps in out.items()]
    longest = max(out, key=lambda k: len(summary.servers[k].out))
    count = f"{len(out)} of {len(summary.servers)} servers were out in some steps"
    return [f"{count}; server {longest} in most: {out[longest]}"]
