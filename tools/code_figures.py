"""Measure how readable the source is: sizes of files and functions, `try`, lambdas, docstrings and names.

    python tools/code_figures.py                      # the checkout
    python tools/code_figures.py --ref v0.1.0         # another commit, beside the checkout
    python tools/code_figures.py --list fragments     # every place behind one figure

`CONTRIBUTING.md` has the goals.
"""

import argparse
import ast
import io
import re
import statistics
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = "src/coordexp"
DIALECT = {"found", "one", "told", "each", "about", "wanted"}
# A docstring that begins like this is a relative clause or a prepositional phrase, not a sentence.
FRAGMENT = re.compile(
    r"(Of|With|That|By|What|Where|Those|Until|Also|Such|Or|And|Not|Which|Who|Whose|From an?|For an?)\b|[a-z]"
)
PARTICIPLE = re.compile(
    r"(?!need|embed|feed|seed|speed|exceed|proceed|shed)\w+ed$"
    r"|(told|said|gone|found|left|made|taken|sent|known|seen|given|held|shown|written|built|kept|lost|drawn|chosen"
    r"|broken|spent|heard|brought|bound|begun|done|cut_off|torn|sworn|worn|hidden|put_on|met|paid|sold|stood|thrown)$"
)


@dataclass
class Figures:
    """The measurements of one tree of Python files. `places` lists the names and docstrings that are counted."""

    files: list[int] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    tries: int = 0
    lambdas: int = 0
    docstrings: int = 0
    places: dict[str, list[str]] = field(
        default_factory=lambda: {"fragments": [], "dialect": [], "participles": [], "small": []}
    )

    def add(self, name: str, text: str) -> None:
        """Count one file."""
        lines = text.count("\n")
        self.files.append(lines)
        if lines < 50:
            self.places["small"].append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            self._add_node(name, node)

    def _add_node(self, file: str, node: ast.AST) -> None:
        self.tries += isinstance(node, ast.Try)
        self.lambdas += isinstance(node, ast.Lambda)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            self._add_docstring(file, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
            if PARTICIPLE.match(node.name.strip("_").split("_")[0]):
                self.places["participles"].append(f"{file}:{node.lineno} {node.name}")
        for name in names_bound_by(node):
            if name in DIALECT:
                self.places["dialect"].append(f"{file}:{getattr(node, 'lineno', 0)} {name}")

    def _add_docstring(
        self, file: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    ) -> None:
        text = ast.get_docstring(node)
        if text is None:
            return
        self.docstrings += 1
        if FRAGMENT.match(text):
            where = f"{file}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}"
            self.places["fragments"].append(f"{where}: {text.splitlines()[0]}")

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the value of each figure."""
        lines, thousands = sum(self.files), sum(self.files) / 1000
        small, participles = self.places["small"], self.places["participles"]
        yield "files / lines", f"{len(self.files)} / {lines:,}"
        yield "lines per file, median / p90 / max", spread(self.files)
        yield "files under 50 lines", f"{len(small)} ({len(small) / len(self.files):.0%})"
        yield "functions", f"{len(self.functions):,}"
        yield "lines per function, median / p90 / max", spread(self.functions)
        yield "`try` per 1,000 lines", f"{self.tries / thousands:.1f} ({self.tries})"
        yield "lambdas per 1,000 lines", f"{self.lambdas / thousands:.1f} ({self.lambdas})"
        fragments = self.places["fragments"]
        yield (
            "docstrings that are fragments",
            f"{len(fragments) / self.docstrings:.1%} ({len(fragments)} of {self.docstrings})",
        )
        yield "names of the dialect", str(len(self.places["dialect"]))
        yield (
            "functions named by a participle",
            f"{len(participles) / len(self.functions):.1%} ({len(participles)})",
        )


def names_bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds: variables, arguments and fields."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id.strip("_")
    elif isinstance(node, ast.arg):
        yield node.arg.strip("_")
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr.strip("_")


def spread(values: Sequence[int]) -> str:
    """Return the median, the 90th percentile and the maximum."""
    high = sorted(values)[int(0.9 * (len(values) - 1))]
    return f"{statistics.median(values):g} / {high} / {max(values)}"


def measure_checkout(root: Path) -> Figures:
    figures = Figures()
    for path in sorted((root / SOURCE).rglob("*.py")):
        figures.add(str(path.relative_to(root)), path.read_text())
    return figures


def measure_commit(root: Path, ref: str) -> Figures:
    """Measure the source at another commit, without checking it out."""
    command = ["git", "-C", str(root), "archive", ref, SOURCE]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    figures = Figures()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                figures.add(member.name, content.read().decode())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ref", help="also measure this commit")
    parser.add_argument("--list", choices=list(Figures().places), help="print every place behind a figure")
    options = parser.parse_args()
    root = Path(__file__).parents[1]
    now = measure_checkout(root)
    if options.list:
        print("\n".join(now.places[options.list]))
        return
    if options.ref is None:
        print("| | now |\n| --- | --- |")
        for name, value in now.rows():
            print(f"| {name} | {value} |")
        return
    print(f"| | {options.ref} | now |\n| --- | --- | --- |")
    for (name, before), (_, value) in zip(measure_commit(root, options.ref).rows(), now.rows(), strict=True):
        print(f"| {name} | {before} | {value} |")


if __name__ == "__main__":
    main()
