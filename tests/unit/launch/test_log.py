"""Whole lines from pieces of text, each with its time, and colours only on a terminal."""

import io
import json
import re

import pytest

from coordexp.launch.parts import Lines, Log
from coordexp.logs import LogRecord


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one\r\ntwo\n\nlast", ["one", "two", "", "last"]),
        ("".join(f"\r{k}%" for k in range(101)) + "\nnext\n", ["0%", "100%", "next"]),
        ("\r1%\r2%\r   \r\nnext\n", ["1%", "2%", "next"]),
    ],
    ids=["cut anywhere", "a bar that redraws itself", "a bar that is erased"],
)
def test_lines_come_whole_however_the_text_is_cut_with_the_first_and_last_state_of_a_bar(text, lines):
    for pieces in (text, [text]):
        found = Lines()
        assert [*(line for piece in pieces for line in found.feed(piece)), *found.end()] == lines


def test_a_line_without_end_is_cut():
    assert len(list(Lines().feed("x" * 100_000))) == 1


def test_a_terminal_gets_the_time_and_the_colours_of_the_parts_but_nothing_that_moves_the_cursor():
    stream = Terminal()
    Log(stream, ("server 0", "learner")).write(
        "learner", "\x1b[31mred\x1b[0m\x1b[2J\x1b[1A\x1b]0;title\x07\x1b7 end"
    )
    shown = re.sub(r"^\x1b\[2m\d\d:\d\d:\d\d\x1b\[0m ", "", stream.getvalue())
    assert shown == "\x1b[33mlearner  | \x1b[0m\x1b[31mred\x1b[0m end\x1b[0m\n"


def test_a_file_gets_times_and_levels_and_no_colours():
    stream = io.StringIO()
    log = Log(stream, ("server 10",))
    log.write("server 10", "\x1b[31mred\x1b[0m \x1b[?25lend")
    log.say("server 10 ended", "warning")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"[\d-]{10} [\d:]{8} INFO    server 10 \| red end", first)
    assert re.fullmatch(r"[\d-]{10} [\d:]{8} WARNING launch    \| server 10 ended", second)


def test_a_record_of_a_part_keeps_its_time_its_level_and_all_of_its_lines():
    record = LogRecord.parse(
        '{"time": "2026-02-03T04:05:06.789+00:00", "level": "error", "message": "bad\\n  fix"}'
    )
    text, lines = io.StringIO(), io.StringIO()
    Log(text, ("learner",)).write("learner", record.to_json())
    stamp = "2026-02-03 04:05:06 ERROR   learner | "
    assert text.getvalue() == f"{stamp}bad\n{stamp}  fix\n"
    Log(lines, ("learner",), "json").write("learner", record.to_json())
    fields = {"time": "2026-02-03T04:05:06.789+00:00", "level": "error", "process": "learner"}
    assert json.loads(lines.getvalue()) == fields | {"message": "bad\n  fix"}
