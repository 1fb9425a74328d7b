"""Commands in the documentation: finds them in Markdown, and compares them with the commands that exist."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from coordexp.cli import app

ROOT = Path(__file__).parents[1]
# Folders of this repository that commands name.
FOLDERS = ("configs", "examples", "tools", "benchmarks", "deploy", "docs", "tests", "src", ".ci")
UsageError: Any = typer.BadParameter.__base__  # of the copy of click inside typer
_BLOCK = re.compile(r"^(?P<indent> *)```bash\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of shell commands on a page. `reason` says why no test runs it, if it is marked so."""

    page: str
    line: int
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def find_pages() -> list[str]:
    """Return all pages with commands for users."""
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    return sorted(str(file.relative_to(ROOT)) for file in files)


def find_blocks(page: str) -> list[Block]:
    return read_blocks(page, (ROOT / page).read_text())


def read_blocks(page: str, text: str) -> list[Block]:
    """Return the ```bash blocks of a text, with the mark that may stand above each."""
    blocks = []
    for match in _BLOCK.finditer(text):
        before = text[: match.start()]
        mark = _MARK.search(before)
        content = "\n".join(line.removeprefix(match["indent"]) for line in match["text"].splitlines())
        blocks.append(Block(page, before.count("\n") + 1, content, mark[1] if mark else None))
    return blocks


def find_commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell script. Variables become 1."""
    script = re.sub(r"(^|\s)#.*$", "", re.sub(r"\\\n", " ", script), flags=re.MULTILINE)
    lexer = shlex.shlex(script, posix=True, punctuation_chars=";|&()<>\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if set(token) <= set(";|&()<>\n"):
            yield from [_strip_prefix(words)] if _strip_prefix(words) else []
            words = []
        else:
            words.append(re.sub(r"\$\{?\w+\}?", "1", token))


def _strip_prefix(words: list[str]) -> list[str]:
    """Return a command without the words of the shell and the variables before it."""
    while words and (words[0] in ("do", "then", "time", "exec") or _ASSIGNMENT.fullmatch(words[0])):
        words = words[1:]
    return words


def find_coordexp(words: list[str]) -> list[str] | None:
    """Return the arguments of `coordexp` if a command calls it, also as a module."""
    if words and words[0] == "coordexp":
        return words[1:]
    for module in ("coordexp", "src.sft"):
        if any(words[k : k + 2] == ["-m", module] for k in range(len(words))):
            rest = words[words.index(module) + 1 :]
            return rest if module == "coordexp" else ["train", *rest]
    return None


@cache
def _root() -> Any:
    return typer.main.get_command(app)


def _is_group(command: Any) -> bool:
    return bool(getattr(command, "commands", None))


def _find_command(arguments: list[str]) -> tuple[Any, str, list[str]]:
    """Return the command that is called, its name, and the arguments after it."""
    command, name, rest = _root(), "coordexp", list(arguments)
    while _is_group(command) and rest and rest[0] in command.commands:
        command, name, rest = command.commands[rest[0]], f"{name} {rest[0]}", rest[1:]
    return command, name, rest


def find_unknown_names(arguments: list[str]) -> list[str]:
    """Return the names in a call that no command or option has. Values and missing arguments are not looked at."""
    command, _, rest = _find_command(arguments)
    options = {name for item in command.params for name in (*item.opts, *item.secondary_opts)} | {"--help", "-h"}
    unknown = [word for word in rest if word.startswith("-") and word.partition("=")[0] not in options]
    return unknown + (rest[:1] if _is_group(command) and rest and not rest[0].startswith("-") else [])


def find_mistake(arguments: list[str]) -> str | None:
    """Return what is wrong with a call of `coordexp`, or None. It is parsed as the shell would, and not run."""
    command, name, rest = _find_command(arguments)
    if any(word in ("--help", "--version") for word in rest):
        return None
    if _is_group(command):
        return f"{name} has no command {' '.join(rest[:1])}"
    try:
        with _any_path(command):
            command.make_context(name, rest)
    except UsageError as error:
        return f"{name}: {error.format_message()}"
    return None


@contextmanager
def _any_path(command: Any) -> Iterator[None]:
    """Accept paths that do not exist: most are made by an earlier command."""
    kinds = [item.type_descriptor.parameter_info for item in command.params]
    before = [kind.exists for kind in kinds]
    for kind in kinds:
        kind.exists = False
    try:
        yield
    finally:
        for kind, exists in zip(kinds, before, strict=True):
            kind.exists = exists


def find_missing_paths(words: list[str]) -> list[str]:
    """Return the words that name a file of this repository which does not exist. `my-*` are the reader's own."""
    named = [part for word in words for part in word.split("=") if part.split("/")[0] in FOLDERS and "/" in part]
    named = [path for path in named if not any(part in path for part in ("*", "{", "$", "/my-"))]
    return [path for path in named if not (ROOT / path).exists()]
