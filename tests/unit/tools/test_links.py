"""Links between Markdown files lead to files and headings that exist, also from and to files outside the site."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted(
    str(file.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md")
    for file in ROOT.glob(pattern)
)
CODE_BLOCK = re.compile(r"^( {0,3})```.*?^\1```$", re.MULTILINE | re.DOTALL)


def find_headings(text: str) -> set[str]:
    """Return the anchors of a Markdown file, as GitHub makes them."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ +(.+?) *$", CODE_BLOCK.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


def find_broken_links(file: Path, text: str) -> list[str]:
    """Return the links of a file to other files, or to headings of Markdown files, that do not exist."""
    prose = re.sub(r"`[^`\n]*`", "", CODE_BLOCK.sub("", text))
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue
        target = file.parent / path if path else file
        is_heading = bool(anchor) and target.suffix == ".md" and target.exists()
        if not target.exists() or (is_heading and anchor not in find_headings(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("name", FILES)
def test_links_lead_to_files_and_headings(name):
    file = ROOT / name
    assert find_broken_links(file, file.read_text()) == []


def test_broken_links_are_found():
    text = "[a](nothing.md), [b](README.md#nowhere), [c](README.md#quickstart), [d](https://a.b/c), `[e](no.md)`"
    assert find_broken_links(ROOT / "x.md", text) == ["nothing.md", "README.md#nowhere"]
