"""A run calls the functions that docs/architecture.md lists as the walk of one sample, in that order."""

import json
import os
import re

import pytest

from tests import zygote
from tests.integration.stage2_runs import ROOT, config, draw
from tests.source import SOURCE

MOST = 12
ENGINE = "coordexp.rollout.colocate:ColocateBackend.generate"
TRANSFORMERS = "coordexp.rollout.hugging_face:HuggingFaceBackend.generate"

# Runs a command and prints, as JSON, which of the given functions were called, in the order of their first calls.
FOLLOW = """
import json, sys
from coordexp.cli import main
wanted, words = set(json.loads(sys.argv[1])), sys.argv[2:]
calls = []

def note(frame, event, _):
    if event == "call":
        name = f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"
        if name in wanted and name not in calls:
            calls.append(name)

sys.setprofile(note)
try:
    main(words)
finally:
    sys.setprofile(None)
    print(json.dumps(calls), file=sys.__stderr__)
"""


@pytest.mark.timeout(300)
def test_a_run_calls_the_functions_of_the_walk_in_their_order(tmp_path):
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `([\w.]+:[\w.]+)`", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1)) and len(rows) <= MOST
    walk = [TRANSFORMERS if name == ENGINE else name for _, name in rows]
    assert TRANSFORMERS in walk
    settings = {"training__max_steps": 1, "training__save_strategy": "no", "training__packing": False}
    file = config(draw(tmp_path), "run", **settings)
    command = ["-c", FOLLOW, json.dumps(walk), "train", "--config", str(file)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    run = zygote.run(command, env=environment, cwd=ROOT, timeout=280)
    calls = next((line for line in reversed(run.stderr.splitlines()) if line.startswith('["coordexp')), run.stderr)
    assert json.loads(calls) == walk
