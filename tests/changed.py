"""Print the tests that a change concerns, for `./dev test --changed`. They are a fast look, not a proof.

    python tests/changed.py           the tests that the uncommitted change concerns
    python tests/changed.py main      the same, for everything since the branch left `main`

A test is concerned if it imports a changed module, or a module that imports one. With more steps between them,
most tests would be. To import `tests/command.py` is to import the command. A change of another file counts as one
of the files that name it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = 2
FAST = ("tests/unit", "tests/property")
COMMAND = "tests/command.py"


def main() -> None:
    print("\n".join(sorted(concerned(changed_files(sys.argv[1] if sys.argv[1:] else "HEAD")))))


def changed_files(since: str) -> list[str]:
    """Return the files that differ from where this branch left `since`, those that git does not know included."""
    base = _git("merge-base", since, "HEAD")[0]
    return [*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")]


def concerned(files: Iterable[str]) -> set[str]:
    """Return the files of fast tests that a change of these files concerns."""
    tests = {name for name in _sources() if name.startswith(FAST) and Path(name).name.startswith("test_")}
    reached, selected = set(), set()
    for file in files:
        if Path(file).name == "conftest.py":
            selected |= {test for test in tests if test.startswith(f"{Path(file).parent}/")}
        elif file.endswith(".py"):
            reached.add(file)
        else:
            name = re.escape(Path(file).name if "." in Path(file).name.lstrip(".") else file)
            named = re.compile(rf"(?<![\w.-]){name}(?![\w-])")
            reached |= {source for source in _sources() if named.search((ROOT / source).read_text())}
    for _ in range(STEPS):
        selected |= reached & tests
        reached = _importers(reached)
        reached |= _importers({COMMAND}) if COMMAND in reached else set()
    return selected | reached & tests


def _importers(modules: set[str]) -> set[str]:
    return {name for name, imports in _imports().items() if imports & modules}


@cache
def _imports() -> dict[str, set[str]]:
    """Return, for each source file, the source files that it imports. A name that a package takes from one of its
    modules leads to that module."""
    files = {_module(name): name for name in _sources()}
    taken = {name: dict(_imported(ROOT / name)) for name in _sources()}

    def origin(path: str) -> str | None:
        if path in files:
            return files[path]
        package = files.get(path.rpartition(".")[0], "")
        source = taken.get(package, {}).get(path.rpartition(".")[2]) if package.endswith("/__init__.py") else None
        return origin(source) if source else package or None

    return {name: {*filter(None, map(origin, paths.values()))} for name, paths in taken.items()}


def _imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the names that a file imports, and where they come from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def _sources() -> list[str]:
    """Return the Python files of the package and of its tests."""
    return [str(path.relative_to(ROOT)) for top in ("src", "tests") for path in sorted((ROOT / top).rglob("*.py"))]


def _module(name: str) -> str:
    return name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else sys.exit(1)  # git has said why


if __name__ == "__main__":
    main()
