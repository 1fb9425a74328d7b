"""Packages import in one direction only, in the order that `docs/architecture.md` shows."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.source import SOURCE

PACKAGE = SOURCE / "coordexp"

# A part imports no part of its own line or of a later one.
ORDER = (
    ("errors",),
    ("files", "child_processes", "extensions", "intervals", "logs", "tasks"),
    ("families", "shapes"),
    ("config",),
    ("data",),
    ("answers",),
    ("ranks",),
    ("rollout",),
    ("servers",),
    ("objective",),
    ("dumps",),
    ("evaluate",),
    ("detect",),
    ("train", "pages"),
    ("demo",),
    ("launch",),
    ("doctor",),
    ("cli",),
    ("__main__", "__init__"),
)
LINE = {part: number for number, parts in enumerate(ORDER) for part in parts}


@cache
def find_imported_parts(source: str, module: str) -> set[str]:
    """Return the top-level parts of coordexp that a module imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = {name.split(".")[1] for name in names if name.startswith("coordexp.")}
    return {part for part in parts if part in LINE}


def find_forbidden(part: str, source: str, module: str) -> list[str]:
    """Return the imports that go against the order."""
    return sorted(
        f"{module} imports coordexp.{other}"
        for other in find_imported_parts(source, module)
        if other != part and LINE[other] >= LINE[part]
    )


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_no_module_imports_a_later_part():
    violations = []
    for file in sorted(PACKAGE.rglob("*.py")):
        violations += find_forbidden(part_of(file), file.read_text(), str(file.relative_to(PACKAGE)))
    assert violations == []


def test_every_part_has_a_place():
    parts = {part_of(file) for file in PACKAGE.rglob("*.py")}
    assert parts == set(LINE)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("data", "from coordexp.answers import VocabularyTable"),
        ("data", "import coordexp.answers"),
        ("data", "def late():\n    from coordexp.answers import serialise"),
        ("answers", "from coordexp import train"),
        ("rollout", "from coordexp.servers import app"),
    ],
)
def test_a_forbidden_import_is_found(part, line):
    assert len(find_forbidden(part, line, "new.py")) == 1


def test_only_the_command_line_imports_pages():
    importers = {
        part_of(file)
        for file in PACKAGE.rglob("*.py")
        if "pages" in find_imported_parts(file.read_text(), str(file))
    }
    assert importers == {"pages", "cli"}
