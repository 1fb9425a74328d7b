"""Run each `$ command` in the terminal blocks of README.md, and put its current output there.

python tools/readme.py
"""

import re
import shlex
import subprocess
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def _fill_block(block: re.Match[str]) -> str:
    command = block.group(1)
    output = subprocess.run(shlex.split(command), capture_output=True, text=True, cwd=README.parent).stdout
    return f"```console\n$ {command}\n{output}```"


if __name__ == "__main__":
    README.write_text(re.sub(r"```console\n\$ (.*?)\n.*?```", _fill_block, README.read_text(), flags=re.DOTALL))
