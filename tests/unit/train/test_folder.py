"""What the run folder says about the code that ran."""

import subprocess

from coordexp.train import folder


def test_in_a_repository_the_commit_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    (tmp_path / "new").write_text("")
    assert folder.git_state() == {"commit": head, "changed_files": 1}
