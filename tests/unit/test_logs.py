"""Log lines have a time and a level, also those of other libraries and of child processes. Bars are left out."""

import io
import json
import os
import re
import subprocess
import sys

import pytest

from coordexp.logs import LogRecord, LogStream, at_level, guess_level
from tests.source import SOURCE

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
PROGRAM = """
import logging, subprocess, sys, time
from coordexp.logs import capture_children, start_log
start_log(sys.argv[1] if sys.argv[1:] else None)
from rich.console import Console
from tqdm import tqdm

for k in tqdm(range(3), desc="Writing model shards"):
    logging.getLogger("other").warning("warning: inside the bar")
Console(stderr=True).print("problem\\n  fix", style="red")
with capture_children():
    lines = ["ERROR of a library in C", "Triton is installed, but doesn't include CPU backend."]
    child = subprocess.Popen(["printf", "%s\\n", *lines])
child.wait()
time.sleep(0.5)  # a thread copies its lines
print("no line end", end="")
raise ValueError("broken")
"""


def run(*arguments: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "FORCE_COLOR": "1"},
    )
    assert done.returncode == 1
    return done.stdout.splitlines()


def test_in_a_file_everything_has_a_time_and_a_level_and_a_bar_is_left_out():
    lines = run()
    text = "\n".join(lines)
    assert "shards" not in text and "Triton" not in text and "\x1b" not in text and "\r" not in text
    messages = [re.sub(f"^{STAMP} ", "", line) for line in lines]
    assert messages.count("WARNING warning: inside the bar") == 3
    assert messages[messages.index("INFO    problem") + 1] == "  fix"
    assert "ERROR   ERROR of a library in C" in messages
    assert "ERROR   Traceback (most recent call last):" in messages
    assert messages[-1] == "INFO    no line end"
    assert all(re.match(f"{STAMP} (INFO|WARNING|ERROR) ", line) for line in lines if line[0] not in " V")


def test_with_json_every_line_is_an_object_and_a_traceback_is_one_of_them():
    records = [json.loads(line) for line in run("json")]
    assert all(list(record) == ["time", "level", "message"] for record in records)
    (trace,) = [record for record in records if record["message"].startswith("Traceback")]
    assert trace["level"] == "error" and trace["message"].endswith("ValueError: broken")
    assert {"level": "info", "message": "problem\n  fix"}.items() <= records[3].items()


@pytest.mark.parametrize(
    ("message", "level"),
    [
        ("step 3/10  loss 4.1", "info"),
        ("note: the median side is 4 bins", "info"),
        ("warning: step 3: rows are filled to 0.5", "warning"),
        ("warning training.bf16: ...", "warning"),
        ("(EngineCore pid=12) ERROR 10-05 14:03:22 [core.py:1] bad", "error"),
        ("/x/y.py:12: UserWarning: old", "warning"),
        ("torch.OutOfMemoryError: CUDA out of memory", "error"),
        ("errors are rare", "info"),
    ],
)
def test_the_level_is_the_word_that_a_message_begins_with(message, level):
    assert guess_level(message) == level


def test_an_error_of_the_user_is_an_error_whatever_its_words():
    stream = io.StringIO()
    with at_level("error"):
        LogStream(stream, "json").write("model.path: runs/x does not exist\n  give another one\n")
    assert json.loads(stream.getvalue())["level"] == "error"


def test_a_message_after_a_bar_that_was_not_ended_is_kept():
    stream = io.StringIO()
    log = LogStream(stream, "text")
    for piece in ("\rloading: 10%", "\rloading: 20%", "warning: slow\n", "\rloading: 100%", "\n", "don", "e\n"):
        log.write(piece)
    assert [line[28:] for line in stream.getvalue().splitlines()] == ["warning: slow", "done"]


def test_a_line_of_another_program_that_looks_like_a_record_is_a_message():
    assert LogRecord.parse('{"time": 3, "level": "info"}').message == '{"time": 3, "level": "info"}'
    other = '{"time": "2026-01-01T00:00:00", "level": 30, "message": "of another program"}'
    assert LogRecord.parse(other).to_text().endswith(f" INFO    {other}\n")
