"""How many examples a property test tries: all of them in a full run, a quarter in CI, a tenth while you work."""

import os

from hypothesis import settings

SHARE = float(os.environ.get("COORDEXP_TEST_EXAMPLES", 0.25))


def examples(count: int) -> settings:
    """Return the settings of a test that has `count` examples in a full run."""
    return settings(max_examples=max(10, round(SHARE * count)), deadline=None)
