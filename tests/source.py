"""The folder of the code under test, for tests that start Python processes."""

from pathlib import Path

import coordexp

SOURCE = Path(coordexp.__file__).parents[1]
