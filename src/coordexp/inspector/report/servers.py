"""What rollout servers did, from the `servers*.jsonl` of a run folder: syncs, calls for answers, what failed."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from coordexp.errors import DataError
from coordexp.inspector.run import each_line


@dataclass(frozen=True)
class Server:
    address: str
    calls: int
    answers: int
    lost: int
    synced: int
    failed: int


@dataclass(frozen=True)
class Fleet:
    """`why` are the reasons of failed syncs, most frequent first; seconds are of one sync, and of one round."""

    servers: tuple[Server, ...]
    syncs: int
    sync_seconds: tuple[float, float]
    megabytes: float
    rounds: int
    round_seconds: tuple[float, float]
    fallbacks: tuple[str, ...]
    why: tuple[tuple[str, int], ...]


def read_fleet(folder: Path) -> Fleet | None:
    """Of all processes of the learner; None when the run had no servers. DataError for what no run writes."""
    events = [event for file in sorted(folder.glob("servers*.jsonl")) for event in each_line(file)]
    try:
        return _fleet(events) if events else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder}/servers*.jsonl: not what a run writes ({error!r})\n  move it away") from error


def _fleet(events: list[dict[str, Any]]) -> Fleet:
    syncs = [event for event in events if event.get("event") == "sync"]
    rounds = [event for event in events if event.get("event") == "rollouts"]
    addresses: dict[int, str] = {}
    count: Counter[tuple[str, int]] = Counter()
    why: Counter[str] = Counter()
    for event in syncs:
        addresses |= {k: str(one["base_url"]) for k, one in enumerate(event["servers"])}
        count.update(("synced", k) for k in event["synced"])
        count.update(("failed", int(k)) for k in event["failed"])
        why.update(str(each).splitlines()[0] for each in event["failed"].values())
    for event in rounds:
        for call in event["calls"]:
            addresses.setdefault(call["server"], str(call["base_url"]))
            lost = bool(call.get("lost"))
            count.update({("lost" if lost else "calls", call["server"]): 1})
            count.update({("answers", call["server"]): 0 if lost else call["count"]})
    fields = ("calls", "answers", "lost", "synced", "failed")
    return Fleet(
        tuple(Server(addresses[k], *(count[field, k] for field in fields)) for k in sorted(addresses)),
        len(syncs),
        _middle_and_most([event["seconds"] for event in syncs]),
        max((event["bytes"] for event in syncs), default=0) / 1e6,
        len(rounds),
        _middle_and_most([event["seconds"] for event in rounds]),
        tuple(dict.fromkeys(str(told) for event in syncs for told in event.get("fallbacks", ()))),
        tuple(why.most_common(5)),
    )


def _middle_and_most(values: list[float]) -> tuple[float, float]:
    return (median(values), max(values)) if values else (0.0, 0.0)
