"""The lines of all parts in one log, each with its time, and with colours only on a terminal."""

import io
import json
import logging
import re
from datetime import datetime

import pytest

from coordexp.launch.parts import Log


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_the_time_and_the_colours_of_the_parts_but_nothing_that_steers_it():
    stream = Terminal()
    Log(stream, ("server 0", "learner")).write(
        "learner", "\x1b[31mred\x1b[0m\x1b[2J\x1b[1A\x1b]0;title\x07\x1b7 end"
    )
    shown = re.sub(r"^\x1b\[2m\d\d:\d\d:\d\d\x1b\[0m ", "", stream.getvalue())
    assert shown == "\x1b[33mlearner  | \x1b[0mred end\n"


def test_a_file_gets_times_and_levels_and_no_colours():
    stream = io.StringIO()
    log = Log(stream, ("server 10",))
    log.write("server 10", "\x1b[31mred\x1b[0m \x1b[?25lend")
    log.say("server 10 ended", logging.WARNING)
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"[\d-]{10} [\d:]{8} INFO    server 10 \| red end", first)
    assert re.fullmatch(r"[\d-]{10} [\d:]{8} WARNING launch    \| server 10 ended", second)


def test_a_record_of_a_part_keeps_its_time_its_level_and_all_of_its_lines():
    line = '{"time": "2026-02-03T04:05:06.789+00:00", "level": "error", "message": "bad\\n  fix"}'
    time = datetime.fromisoformat("2026-02-03T04:05:06.789+00:00").astimezone()
    text, lines = io.StringIO(), io.StringIO()
    Log(text, ("learner",)).write("learner", line)
    stamp = f"{time:%Y-%m-%d %H:%M:%S} ERROR   learner | "
    assert text.getvalue() == f"{stamp}bad\n{stamp}  fix\n"
    Log(lines, ("learner",), "json").write("learner", line)
    fields = {"time": time.isoformat(timespec="milliseconds"), "level": "error", "process": "learner"}
    assert json.loads(lines.getvalue()) == fields | {"message": "bad\n  fix"}


@pytest.mark.parametrize(
    "line",
    [
        '{"time": 3, "level": "info"}',
        '{"time": "2026-01-01T00:00:00", "level": 30, "message": "of another program"}',
        '{"time": "2026-01-01T00:00:00", "lev',
    ],
)
def test_a_line_of_another_program_that_looks_like_a_record_is_a_message(line):
    stream = io.StringIO()
    Log(stream, ("learner",)).write("learner", line)
    assert stream.getvalue().endswith(f" INFO    learner | {line}\n")
