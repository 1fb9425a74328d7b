"""docs/troubleshooting.md quotes messages that the source has."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
OURS = PAGE.split("| message of torch, vLLM or the system |")[0]
MESSAGES = re.findall(r"^\| `([^`]*)` \|", OURS, re.MULTILINE)
HOLE = "\0"  # a value in an f-string


def strings(file: Path) -> Iterator[str]:
    """Yield all texts of a source file. The values of f-strings are holes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def source() -> list[str]:
    return [text for file in sorted((ROOT / "src/coordexp").rglob("*.py")) for text in strings(file)]


def is_in_source(message: str) -> bool:
    """Return True if a text of the source has the words of the message in order, with a value for each `...`."""
    words = message.split("...")
    pattern = re.compile(f".*{HOLE}.*".join(map(re.escape, words)), re.DOTALL)
    return any(all(part in text for part in words) and pattern.search(text) for text in source())


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_source(message):
    assert is_in_source(message)


def test_the_page_has_thirty_messages():
    assert len(MESSAGES) >= 30


@pytest.mark.parametrize("message", ["... image files are not there", "unknown kee", "no GPU ... is visible"])
def test_a_message_that_nobody_writes_is_noticed(message):
    assert not is_in_source(message)
