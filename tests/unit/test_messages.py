"""Messages are worded as in tests/messages.txt. `COORDEXP_UPDATE_MESSAGES=1 pytest tests/unit/test_messages.py`
writes the file anew, so that a change of wording is read in the diff of one file."""

import os

from tests.messages import SNAPSHOT, load_cases, read_snapshot, render, say


def test_messages_are_those_of_the_snapshot(tmp_path):
    said = {}
    for number, (name, case) in enumerate(load_cases().items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        said[name] = say(case, folder)
    assert [name for name, text in said.items() if not text] == []
    if os.environ.get("COORDEXP_UPDATE_MESSAGES"):
        SNAPSHOT.write_text(render(said))
    assert said == read_snapshot()
