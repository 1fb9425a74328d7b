"""The rollout servers of a run: what each of them did, and in which steps it was out.

`servers.jsonl` has every weight sync and every call for rollouts, and ranks other than the first write files of
their own. A version of the weights is the number of updates before it, so the sync of version 4 is in step 5. A
server was out in a step if it did not get the weights of that step, or if a call to it was lost.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter

from coordexp.files import read_json_lines
from coordexp.pages.charts import format_duration
from coordexp.pages.document import escape_text, render_list, render_table
from coordexp.pages.report_tables import render_badge
from coordexp.pages.run_folder import Count, LoggedRun, Number, RunFileModel, RunGroup, validate

NO_REASON = "no reason was given"
MAX_STRETCHES = 3  # of steps in which a server was out, in one list
MAX_SERVERS = 3  # that a note names one by one
ServerNumber = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


class ServerAddress(RunFileModel):
    base_url: str


class SyncEvent(RunFileModel):
    """A weight sync. `failed` has the reason by the number of the server."""

    version: Count | None = None
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

    version: Count | None = None
    calls: list[ServerCall]
    seconds: Number


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
    """`failures` are reasons of failed syncs with their counts, most frequent first. `sync_seconds` and
    `round_seconds` are the median and the maximum. `steps` are those whose weights were sent."""

    servers: tuple[ServerTotals, ...]
    syncs: int
    sync_seconds: tuple[float, float]
    megabytes: float
    rounds: int
    round_seconds: tuple[float, float]
    fallbacks: tuple[str, ...]
    failures: tuple[tuple[str, int], ...]
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
    for sync in syncs:
        addresses |= {k: server.base_url for k, server in enumerate(sync.servers)}
        counts.update(("synced", k) for k in sync.synced)
        counts.update(("failed", int(k)) for k in sync.failed)
        failures.update((reason.splitlines() or [NO_REASON])[0] for reason in sync.failed.values())
    for call in (call for event in rounds for call in event.calls):
        addresses.setdefault(call.server, call.base_url)
        counts["lost" if call.lost else "calls", call.server] += 1
        counts["answers", call.server] += 0 if call.lost else call.count
    steps, missed = _find_steps_out(syncs, rounds)
    totals = tuple(
        ServerTotals(
            number=k,
            address=addresses[k],
            calls=counts["calls", k],
            answers=counts["answers", k],
            lost=counts["lost", k],
            synced=counts["synced", k],
            failed=counts["failed", k],
            out=tuple(sorted(missed[k])),
        )
        for k in sorted(addresses)
    )
    return ServerSummary(
        totals,
        len(syncs),
        _median_and_max([sync.seconds for sync in syncs]),
        max((sync.bytes for sync in syncs), default=0) / 1e6,
        len(rounds),
        _median_and_max([event.seconds for event in rounds]),
        tuple(dict.fromkeys(reason for sync in syncs for reason in sync.fallbacks or ())),
        tuple(failures.most_common(5)),
        steps,
    )


def _find_steps_out(
    syncs: Sequence[SyncEvent], rounds: Sequence[RolloutEvent]
) -> tuple[tuple[int, ...], Mapping[int, set[int]]]:
    """Return the steps whose weights were sent, in order, and those in which a server was out, by its number. The
    weights of a step may be sent again, to servers that came back."""
    synced: dict[int, set[int]] = {}
    missed: defaultdict[int, set[int]] = defaultdict(set)
    for sync in syncs:
        if sync.version is not None:
            synced.setdefault(sync.version + 1, set()).update(sync.synced)
    for sync in syncs:
        if sync.version is not None:
            for server in set(range(len(sync.servers))) - synced[sync.version + 1]:
                missed[server].add(sync.version + 1)
    for event in rounds:
        if event.version is not None and event.version + 1 in synced:
            for call in event.calls:
                if call.lost:
                    missed[call.server].add(event.version + 1)
    return tuple(sorted(synced)), missed


def _median_and_max(values: list[float]) -> tuple[float, float]:
    return (median(values), max(values)) if values else (0.0, 0.0)


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


def render_servers(groups: Sequence[RunGroup], summaries: Mapping[Path, ServerSummary]) -> str:
    """Return a table per run that used rollout servers. `summaries` are by the folder of the run."""
    return "".join(
        _render_servers(group, run, summaries[run.run.folder])
        for group in groups
        for run in group.runs
        if run.run.folder in summaries
    )


def _render_servers(group: RunGroup, run: LoggedRun, summary: ServerSummary) -> str:
    rows = []
    for server in summary.servers:
        counts = (server.calls, server.answers, server.lost, server.synced, server.failed)
        out = describe_steps(server.out, summary, run.last_step) if server.out else "never"
        name = f"{server.number} <small>{escape_text(server.address)}</small>"
        rows.append((name, *(f"{count:,}" for count in counts), out))
    heads = ("server", "calls answered", "answers", "calls lost", "syncs", "syncs failed", "out in")
    failures = [f"{reason} ({count} times)" if count > 1 else reason for reason, count in summary.failures]
    return (
        f'<h3>{render_badge(group)} {escape_text(run.name)}</h3><p class="about">'
        f"Weight syncs of {summary.megabytes:.3g} MB: {_describe_times(summary.syncs, summary.sync_seconds)}. "
        f"Rounds of answers: {_describe_times(summary.rounds, summary.round_seconds)}. "
        "A server was out in a step if it did not get its weights, or if a call to it was lost.</p>"
        + render_table(heads, rows, "numbers")
        + render_list(map(escape_text, (*failures, *summary.fallbacks)))
    )


def _describe_times(count: int, seconds: tuple[float, float]) -> str:
    if not count:
        return "none"
    return f"{count:,}, median {format_duration(seconds[0])}, at most {format_duration(seconds[1])}"
