"""Exits 1, naming each difference, unless the running environment has exactly the versions a file pins."""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def main(constraints: str) -> int:
    installed = {_normal(d.metadata["Name"]): d.version for d in distributions()}
    differences = 0
    for line in Path(constraints).read_text().splitlines():
        name, equals, pinned = line.partition("==")
        if not equals or line.startswith("#"):
            continue
        found = installed.get(_normal(name), "not installed")
        if found.partition("+")[0] != pinned:  # torch 2.13.0+cpu is torch 2.13.0
            print(f"{name}: {found}, and {constraints} pins {pinned}")
            differences += 1
    return 1 if differences else 0


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
