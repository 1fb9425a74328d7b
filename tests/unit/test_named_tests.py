"""Pages that name tests as proof name tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
MATRIX = (ROOT / "docs/hardening.md").read_text()
FAULTS = (ROOT / "docs/operations.md").read_text().partition("## When something fails\n")[2].partition("\n## ")[0]


def rows(page: str) -> list[list[str]]:
    """Return the cells of all tables, without their heads."""
    lines = [line.strip("| \n") for line in page.splitlines() if line.startswith("| ")]
    cells = [re.split(r" \| ", line) for line in lines]
    marks = {k for k, row in enumerate(cells) if set("".join(row)) <= {"-"}}
    return [row for k, row in enumerate(cells) if k not in marks and k + 1 not in marks]


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of the functions in a file, which are none if there is no such file."""
    path = ROOT / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_missing(file: str, name: str) -> bool:
    return name not in functions_of(file)


@pytest.mark.parametrize("page", [MATRIX, FAULTS], ids=["matrix", "faults"])
def test_every_test_that_a_table_names_exists(page):
    names = NAME.findall(page)
    assert len(names) > 20
    assert not [f"{file}::{name}" for file, name in names if is_missing(file, name)]
    assert page.count("::test_") == len(names)  # none is written in another form


def test_every_row_of_the_matrix_has_a_test_or_a_reason():
    table = MATRIX.partition("## The reliability matrix\n")[2].partition("\n## ")[0]
    assert len(rows(table)) > 70
    for row in rows(table):
        assert len(row) == 3, row
        assert NAME.search(row[-1]) or "*explained*: " in row[-1], row


def test_every_fault_of_an_operator_has_all_columns_and_a_test():
    assert len(rows(FAULTS)) > 15
    for row in rows(FAULTS):
        assert len(row) == 6 and all(row) and NAME.search(row[-1]), row


def test_a_name_that_does_not_exist_is_noticed():
    assert is_missing("tests/unit/test_files.py", "test_nothing") and is_missing("tests/unit/nothing.py", "test_a")
    assert not is_missing("tests/unit/test_files.py", "test_the_mode_of_a_file_follows_the_umask")
