"""Puts the current output of each `$ command` into the terminal blocks of README.md.

python tools/readme.py
"""

import re
import shlex
import subprocess
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def _filled(block: re.Match[str]) -> str:
    command = block.group(1)
    shown = subprocess.run(shlex.split(command), capture_output=True, text=True, cwd=README.parent).stdout
    return f"```console\n$ {command}\n{shown}```"


if __name__ == "__main__":
    README.write_text(re.sub(r"```console\n\$ (.*?)\n.*?```", _filled, README.read_text(), flags=re.DOTALL))
