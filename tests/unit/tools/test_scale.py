"""The table of docs/scale.md is what the formulas say now."""

from pathlib import Path

import pytest
import scale


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_the_command_writes():
    page = Path("docs/scale.md").read_text()
    table = page.partition(scale.BEGIN)[2].partition(scale.END)[0].strip()
    assert table == scale.make_table(), "stale: run python tools/scale.py"
