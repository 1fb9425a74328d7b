"""What rollout servers did, from the `servers*.jsonl` of a run folder: syncs, calls for answers, what failed."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from coordexp.files import read_json_lines
from coordexp.inspector.report.forms import Is, check_form, is_count, is_list_of, is_number, is_object, is_text

NO_REASON = "no reason was given"


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
    events = []
    for file in sorted(folder.glob("servers*.jsonl")):
        for number, event in enumerate(read_json_lines(file), start=1):
            _check_event(event, f"{file}, line {number}")
            events.append(event)
    return _fleet(events) if events else None


def _is_failed(value: Any) -> bool:
    """Reasons by the number of the server."""
    return is_object(value) and all(k.isdecimal() and len(k) < 10 and is_text(why) for k, why in value.items())


SYNC: dict[str, Is] = {
    "servers": is_list_of(is_object),
    "synced": is_list_of(is_count),
    "failed": _is_failed,
    "seconds": is_number,
    "bytes": is_count,
}
ROUND: dict[str, Is] = {"calls": is_list_of(is_object), "seconds": is_number}
CALL: dict[str, Is] = {"server": is_count, "base_url": is_text, "count": is_count}


def _check_event(event: dict[str, Any], where: str) -> None:
    if event.get("event") == "sync":
        check_form(event, SYNC, where, {"fallbacks": is_list_of(is_text)})
        for k, server in enumerate(event["servers"]):
            check_form(server, {"base_url": is_text}, f"{where}: servers[{k}]")
    if event.get("event") == "rollouts":
        check_form(event, ROUND, where)
        for k, call in enumerate(event["calls"]):
            check_form(call, CALL, f"{where}: calls[{k}]")


def _fleet(events: list[dict[str, Any]]) -> Fleet:
    syncs = [event for event in events if event.get("event") == "sync"]
    rounds = [event for event in events if event.get("event") == "rollouts"]
    addresses: dict[int, str] = {}
    count: Counter[tuple[str, int]] = Counter()
    why: Counter[str] = Counter()
    for event in syncs:
        addresses |= {k: one["base_url"] for k, one in enumerate(event["servers"])}
        count.update(("synced", k) for k in event["synced"])
        count.update(("failed", int(k)) for k in event["failed"])
        why.update((each.splitlines() or [NO_REASON])[0] for each in event["failed"].values())
    for event in rounds:
        for call in event["calls"]:
            addresses.setdefault(call["server"], call["base_url"])
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
        tuple(dict.fromkeys(told for event in syncs for told in event.get("fallbacks") or ())),
        tuple(why.most_common(5)),
    )


def _middle_and_most(values: list[float]) -> tuple[float, float]:
    return (median(values), max(values)) if values else (0.0, 0.0)
