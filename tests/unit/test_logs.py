"""Messages have a time and a level outside a terminal, also those of other libraries. Bars are left out."""

import json
import os
import re
import subprocess
import sys

import pytest

from coordexp.logs import ESCAPES
from tests.source import SOURCE

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
PROGRAM = """
import logging, sys, warnings
from coordexp.logs import say, start_log
start_log(sys.argv[1] if sys.argv[1:] else None)
from rich.text import Text
from tqdm import tqdm

for k in tqdm(range(3), desc="Writing model shards"):
    logging.getLogger("other").warning("inside the bar")
say("warning: of our own")
logging.getLogger("coordexp").error(Text("problem\\n  fix", style="red"))
warnings.warn("of Python")
say("2 images in \x1b[2Ja\x1b[0m.jsonl")
raise ValueError("broken")
"""
OF_TRANSFORMERS = """
from coordexp.logs import adopt_transformers, start_log
start_log(None)
adopt_transformers()
from transformers.utils import logging
logging.get_logger("transformers.models").warning("of transformers")
"""


def run(program: str, *arguments: str, code: int = 1) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "FORCE_COLOR": "1"},
    )
    assert (done.returncode, done.stdout) == (code, "")
    return done.stderr.splitlines()


def test_in_a_file_every_message_has_a_time_and_a_level_and_a_bar_is_left_out():
    lines = run(PROGRAM)
    text = "\n".join(lines)
    assert "shards" not in text and "\x1b" not in text and "\r" not in text
    messages = [re.sub(f"^{STAMP} ", "", line) for line in lines]
    assert messages.count("WARNING inside the bar") == 3
    assert messages[3:6] == ["WARNING warning: of our own", "ERROR   problem", "  fix"]
    assert any(re.fullmatch(r"WARNING <string>:\d+: UserWarning: of Python", message) for message in messages)
    assert "INFO    2 images in a.jsonl" in messages
    assert "ERROR   uncaught exception" in messages and messages[-1] == "ValueError: broken"


@pytest.mark.slow
def test_messages_of_transformers_are_written_as_ours():
    (line,) = run(OF_TRANSFORMERS, code=0)
    assert re.fullmatch(f"{STAMP} WARNING of transformers", line)


def test_with_json_every_line_is_an_object_and_a_traceback_is_one_of_them():
    records = [json.loads(line) for line in run(PROGRAM, "json")]
    assert all(list(record) == ["time", "level", "message"] for record in records)
    assert records[-1]["level"] == "error" and records[-1]["message"].endswith("ValueError: broken")
    assert {"level": "error", "message": "problem\n  fix"}.items() <= records[4].items()


def test_nothing_that_steers_a_terminal_stays_in_a_message():
    steering = "\x1b[31mred\x1b[0m\x1b[2J\x1b[1A\x1b]0;title\x07\x1b7\x07 \x9b2Kend\ttab"
    assert ESCAPES.sub("", steering) == "red 2Kend\ttab"
