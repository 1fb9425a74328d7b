"""Write the git commit into wheels and source archives, so that `coordexp --version` can name it.

Hatchling runs this (`tool.hatch.build.hooks.custom` in pyproject.toml). A wheel that is built from a source
archive takes over the commit of the archive. An editable install needs no file: its checkout knows the commit.
Where there is no `.git`, as in a container, COORDEXP_COMMIT can name the commit.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILE = "coordexp/commit.txt"


class CommitHook(BuildHookInterface):
    """Adds the file with the commit to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file, unless the commit is not known or the build is editable."""
        commit = os.environ.get("COORDEXP_COMMIT") or self._ask_git()
        if version == "editable" or not commit:
            return
        self.note = Path(self.directory) / f"commit-{self.target_name}.txt"
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.write_text(commit)
        build_data["force_include"][str(self.note)] = FILE if self.target_name == "wheel" else f"src/{FILE}"

    def _ask_git(self) -> str:
        if not (Path(self.root) / ".git").exists():
            return ""
        describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=-changed"]
        done = subprocess.run(describe, cwd=self.root, capture_output=True, text=True)
        if done.returncode:
            self.app.display_warning(f"coordexp --version will not name the commit: {done.stderr.strip()}")
        return done.stdout.strip()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the note beside the artifact."""
        if hasattr(self, "note"):
            self.note.unlink()
