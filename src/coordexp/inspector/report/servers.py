"""The work of the rollout servers, from the `servers*.jsonl` of a run folder: weight syncs, calls and failures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter

from coordexp.files import read_json_lines
from coordexp.inspector.run import Count, Number, RunFileModel, validate

NO_REASON = "no reason was given"
ServerNumber = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


class ServerAddress(RunFileModel):
    base_url: str


class SyncEvent(RunFileModel):
    """A weight sync. `failed` has the reason by the number of the server."""

    servers: list[ServerAddress]
    synced: list[Count]
    failed: dict[ServerNumber, str]
    seconds: Number
    bytes: Count
    fallbacks: list[str] | None = None


class ServerCall(RunFileModel):
    server: Count
    base_url: str
    count: Count
    lost: Any = False


class RolloutEvent(RunFileModel):
    """A round of calls that together answered the requests of a step."""

    calls: list[ServerCall]
    seconds: Number


SYNC, ROLLOUT = TypeAdapter(SyncEvent), TypeAdapter(RolloutEvent)


@dataclass(frozen=True)
class ServerTotals:
    """The work of one server over the whole run."""

    address: str
    calls: int
    answers: int
    lost: int
    synced: int
    failed: int


@dataclass(frozen=True)
class ServerSummary:
    """`failures` are reasons of failed syncs with their counts, most frequent first. `sync_seconds` and
    `round_seconds` are the median and the maximum."""

    servers: tuple[ServerTotals, ...]
    syncs: int
    sync_seconds: tuple[float, float]
    megabytes: float
    rounds: int
    round_seconds: tuple[float, float]
    fallbacks: tuple[str, ...]
    failures: tuple[tuple[str, int], ...]


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
    for sync in syncs:
        addresses |= {k: server.base_url for k, server in enumerate(sync.servers)}
        counts.update(("synced", k) for k in sync.synced)
        counts.update(("failed", int(k)) for k in sync.failed)
        failures.update((reason.splitlines() or [NO_REASON])[0] for reason in sync.failed.values())
    for call in (call for event in rounds for call in event.calls):
        addresses.setdefault(call.server, call.base_url)
        counts["lost" if call.lost else "calls", call.server] += 1
        counts["answers", call.server] += 0 if call.lost else call.count
    fields = ("calls", "answers", "lost", "synced", "failed")
    return ServerSummary(
        tuple(ServerTotals(addresses[k], *(counts[field, k] for field in fields)) for k in sorted(addresses)),
        len(syncs),
        _median_and_max([sync.seconds for sync in syncs]),
        max((sync.bytes for sync in syncs), default=0) / 1e6,
        len(rounds),
        _median_and_max([event.seconds for event in rounds]),
        tuple(dict.fromkeys(reason for sync in syncs for reason in sync.fallbacks or ())),
        tuple(failures.most_common(5)),
    )


def _median_and_max(values: list[float]) -> tuple[float, float]:
    return (median(values), max(values)) if values else (0.0, 0.0)
