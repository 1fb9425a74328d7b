"""Packages import in one direction only. The order is the one drawn in `docs/architecture.md`."""

import ast
from pathlib import Path

import pytest

from tests.source import SOURCE

PACKAGE = SOURCE / "coordexp"

# No part imports one of a later line. Parts on the same line do not import each other either.
ORDER = (
    ("errors", "text"),
    ("dump_files", "files", "folders", "leftovers", "torchrun"),
    ("document",),
    ("config",),
    ("data",),
    ("vocab",),
    ("correction",),
    ("ranks", "sharding"),
    ("rollout",),
    ("serve",),
    ("pack",),
    ("objective",),
    ("dumps",),
    ("evaluate",),
    ("train",),
    ("inspector",),
    ("demo",),
    ("launch",),
    ("doctor",),
    ("plugins",),
    ("cli",),
    ("__main__", "__init__"),
)
LINE = {part: number for number, parts in enumerate(ORDER) for part in parts}


def imported_parts(source: str, module: str) -> set[str]:
    """Return the top-level parts of coordexp that a module imports, inside of functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = {name.split(".")[1] for name in names if name.startswith("coordexp.")}
    return {part for part in parts if part in LINE}


def forbidden(part: str, source: str, module: str) -> list[str]:
    return sorted(
        f"{module} imports coordexp.{other}"
        for other in imported_parts(source, module)
        if other != part and LINE[other] >= LINE[part]
    )


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_no_module_imports_a_later_part():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        found += forbidden(part_of(file), file.read_text(), str(file.relative_to(PACKAGE)))
    assert found == []


def test_every_part_has_a_place():
    parts = {part_of(file) for file in PACKAGE.rglob("*.py")}
    assert parts == set(LINE)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("data", "from coordexp.vocab import VocabularyTable"),
        ("data", "import coordexp.correction"),
        ("data", "def late():\n    from coordexp.correction import serialise"),
        ("correction", "from coordexp import train"),
        ("rollout", "from coordexp.serve import app"),
    ],
)
def test_a_forbidden_import_is_found(part, line):
    assert len(forbidden(part, line, "new.py")) == 1
