"""The table of docs/scale.md is what the formulas say now."""

from pathlib import Path

import scale


def test_the_table_in_the_docs_is_what_the_command_writes():
    page = Path("docs/scale.md").read_text()
    table = page.partition(scale.BEGIN)[2].partition(scale.END)[0].strip()
    assert table == scale.make_table(), "stale: run python tools/scale.py"


def test_the_table_has_every_published_size_on_every_machine():
    rows = scale.make_table().splitlines()[2:]
    assert len(rows) == len(scale.PUBLISHED) * len(scale.MACHINES) * 2
    assert {row.split(" | ")[2] for row in rows} == {"1 x 24", "1 x 80", "3 + 1 x 80", "8 x 80"}
