"""Runs with fake servers: real HTTP and real weight transfer, no model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordexp.servers import backend, sender
from tests.unit.servers.served import Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """A function that starts runs, whose buckets hold only a part of the weights."""
    monkeypatch.setattr(backend, "AGAIN", 0.05)
    monkeypatch.setattr(sender, "BUCKET_BYTES", 700)
    runs: list[Run] = []

    def start(*arguments: object, **changes: object) -> Run:
        runs.append(Run(tmp_path, *arguments, **changes))
        return runs[-1]

    yield start
    for started in runs:
        started.close()
