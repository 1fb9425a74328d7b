"""Processes end with their parent, and the folders of their sockets are removed."""

import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from coordexp import child_processes
from coordexp.errors import EngineError
from tests.source import SOURCE

pytestmark = pytest.mark.timeout(60)

OWNER = """
import time
from coordexp.child_processes import engine_folder
print(engine_folder(), flush=True)
time.sleep(60)
"""


def test_the_folder_of_an_engine_is_removed_when_its_owner_is_killed():
    variables = {"PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-c", OWNER]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | variables)
    assert owner.stdout is not None
    with owner.stdout as shown:
        folder = Path(shown.readline().strip())
    assert folder.is_dir()
    (folder / "socket").touch()
    owner.kill()
    owner.wait()
    until = time.monotonic() + 20
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists()


CHILD = """
import os, subprocess, sys, time
from functools import partial
from coordexp.child_processes import end_with_parent
words = ["sh", "-c", "echo $$; exec sleep 600"]
parent = os.getpid() if sys.argv[1] == "mine" else 1
subprocess.Popen(words, preexec_fn=partial(end_with_parent, parent), stderr=subprocess.DEVNULL)
time.sleep(600)
"""


@pytest.mark.parametrize("whose", ["mine", "of another"])
def test_a_tied_process_ends_when_its_parent_is_killed_or_has_ended_before(whose):
    parent = subprocess.Popen([sys.executable, "-c", CHILD, whose], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as shown:
        if whose == "mine":
            int(shown.readline())
            assert not select.select([shown], [], [], 0.2)[0]
        parent.kill()
        parent.wait()
        assert shown.read() == ""  # the child has closed it, since it has ended


def test_a_folder_has_a_name_that_is_short_enough_for_a_socket_of_an_engine_in_it(tmp_path, monkeypatch):
    for place in (tmp_path, tmp_path / ("long" * 30)):
        place.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        folder = child_processes.make_folder()
        try:
            name = f"{folder}/12345678/00000000-0000-0000-0000-000000000000"
            assert len(name) <= 107 and folder.name.startswith("coordexp-") and not list(folder.iterdir())
        finally:
            folder.rmdir()


def test_if_every_path_is_too_long_the_message_says_what_to_set(monkeypatch):
    monkeypatch.setattr(child_processes, "LONGEST", 3)
    with pytest.raises(EngineError, match="short enough for sockets\n  set TMPDIR"):
        child_processes.make_folder()


def test_only_their_owner_may_enter_the_folder_of_sockets():
    before = os.umask(0)
    try:
        folder = child_processes.make_folder()
    finally:
        os.umask(before)
    mode = folder.stat().st_mode & 0o777
    folder.rmdir()
    assert mode == 0o700
