"""Tools are scripts, not a package: they are imported by name, from their own folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tools"))
