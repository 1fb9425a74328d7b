"""Measure calls in turn, and print values with their goals. All benchmarks use this."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.progress import Progress

REPEATS = 5


def medians(
    calls: dict[str, Callable[[], Any]], repeats: int = REPEATS, before: Callable[[], None] | None = None
) -> dict[str, float]:
    """Return the median seconds of each call. The calls take turns, so that other load on the machine
    affects all of them. The first round is not counted. `before` runs before every call, and its time is not
    counted either."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round in range(repeats + 1):
        for name, call in calls.items():
            if before is not None:
                before()
            start = time.perf_counter()
            call()
            if round:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def at_least(value: float, goal: float) -> dict[str, Any]:
    return {"value": round(value, 4), "goal": goal, "ok": value >= goal}


def at_most(value: float, goal: float) -> dict[str, Any]:
    return {"value": round(value, 4), "goal": goal, "ok": value <= goal}


def without_goal(value: float) -> dict[str, Any]:
    return {"value": round(value, 4), "goal": None, "ok": True}


Results = dict[str, dict[str, Any]]


def main(
    description: str, measure: Callable[[Progress], Results], part: str, parts: dict[str, Callable[[], Any]]
) -> None:
    """Run the command of a benchmark. It runs itself in another process, with the option `part`, for each of the
    `parts` that need a process of their own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(part, dest="part", choices=tuple(parts), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(parts[options.part]()))
        return
    with Progress(transient=True, disable=options.json) as progress:
        results = measure(progress)
    show(results, options.json)


def show(results: Results, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results, indent=2))
        return
    for name, result in results.items():
        goal = (
            "" if result["goal"] is None else f"goal {result['goal']:g} {'ok' if result['ok'] else 'not reached'}"
        )
        print(f"{name:<62} {result['value']:>9.4g}  {goal}")
