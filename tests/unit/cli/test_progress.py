"""A log says now and then how far a long command is, how fast it is, and what remains."""

import time

import pytest
from rich.console import Console

from coordexp.cli import console
from coordexp.tasks import describe_progress


@pytest.mark.parametrize(
    ("done", "rate", "text"),
    [
        (1200, 3.4, "answering 1,200 of 20,000, 3.4 per second, 1:32:09 left"),
        (16, 0.0213, "answering 16 of 20,000, 0.0213 per second, 10 days, 20:36:56 left"),
        (0, 0.0, "answering 0 of 20,000"),
        (20_000, 5.0, "answering 20,000 of 20,000, 5 per second, 0:00:00 left"),
    ],
)
def test_progress_is_described_by_count_rate_and_what_remains(done, rate, text):
    assert describe_progress("answering", done, 20_000, rate) == text


@pytest.mark.timeout(60)
def test_a_log_gets_lines_while_a_batch_runs_and_a_terminal_gets_none(monkeypatch, capsys):
    monkeypatch.setattr(console, "TELL_EVERY_S", 0.05)
    lines: list[str] = []
    monkeypatch.setattr(console, "say", lines.append)
    with console.bar("answering", 8, done=4) as advance:
        wait_for(lines, 2)
        advance()
        advance(6)
        wait_for(lines, 2)
    assert lines[0] == "answering" and lines[1] == "answering 4 of 8"
    assert lines[-1].startswith("answering 6 of 8, ") and "per second" in lines[-1]
    assert float(lines[-1].split(", ")[1].split()[0]) <= 2 / 0.1  # the four of an earlier run do not count
    time.sleep(0.2)  # a line may be on its way when the block ends
    count = len(lines)
    time.sleep(0.2)
    assert len(lines) == count
    monkeypatch.setattr(console, "err", Console(stderr=True, force_terminal=True))
    with console.bar("answering", 8):
        time.sleep(0.2)
    assert "of 8" not in capsys.readouterr().err


def wait_for(lines: list[str], more: int) -> None:
    end, until = len(lines) + more, time.monotonic() + 30
    while len(lines) < end and time.monotonic() < until:
        time.sleep(0.01)
    assert len(lines) >= end
