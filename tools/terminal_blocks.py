"""Run each `$ command` in the terminal blocks of docs/checks.md, and put its current output there.

python tools/terminal_blocks.py
"""

import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/checks.md"


def _fill_block(block: re.Match[str]) -> str:
    command = block.group(1)
    output = subprocess.run(shlex.split(command), capture_output=True, text=True, cwd=ROOT).stdout
    return f"```console\n$ {command}\n{output}```"


if __name__ == "__main__":
    PAGE.write_text(re.sub(r"```console\n\$ (.*?)\n.*?```", _fill_block, PAGE.read_text(), flags=re.DOTALL))
