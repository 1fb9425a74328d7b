"""What the run folder says about the code that ran."""

import subprocess
from pathlib import Path

from coordexp.train import folder


def test_outside_a_repository_the_commit_is_that_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-C", str(Path(folder.__file__).parent), "rev-parse", "HEAD"]
    expected = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    state = folder.git_state()
    assert (state and state["commit"]) == expected


def test_in_a_repository_the_commit_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    (tmp_path / "new").write_text("")
    assert folder.git_state() == {"commit": head, "changed_files": 1}
