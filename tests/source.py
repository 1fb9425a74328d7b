"""Where the code under test lies: for tests that start Python processes of their own."""

from pathlib import Path

import coordexp

SOURCE = Path(coordexp.__file__).parents[1]
