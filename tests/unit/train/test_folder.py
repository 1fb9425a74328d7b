"""What the run folder says about the code that ran."""

import subprocess

import pytest

from coordexp.errors import DataError
from coordexp.train import folder


def test_in_a_repository_the_commit_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    (tmp_path / "new").write_text("")
    assert folder.git_state() == {"commit": head, "changed_files": 1}


@pytest.mark.parametrize("content", ["", '[{"command"', "{}", "[1]", "\0\0\0"])
def test_a_run_json_that_cannot_be_read_is_named_with_a_way_out(tmp_path, content):
    file = tmp_path / "run.json"
    file.write_text(content)
    with pytest.raises(DataError, match=str(file)) as raised:
        folder.read_starts(file)
    assert raised.value.fix
