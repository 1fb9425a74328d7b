"""Hostile files: strategies that damage valid ones, and checks that hold whatever a command is given.

`COORDEXP_FUZZ_EXAMPLES` is the number of examples per test; unset, a test has a few, for CI.
"""

import copy
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.command import run
from tests.examples import SHARE

SECRET = "zqxsecret"  # the content of a file that no command has any business with
OUTSIDE = "@outside@"  # stands for the absolute path of the folder with that file
MOST_SECONDS = 20.0  # of one command, on a machine that does other work too
MOST_MEGABYTES = 500  # by which the process may grow in a test

# Tags and attributes that no page has: where one appears, text was not escaped.
MARKUP = ("<zqx>", "</script><zqx>", "--><zqx>", "]]><zqx>", '"><zqx>', "'><zqx>", '" zqx="', "' zqx='")
NAMES = ("../outside/secret.png", f"{OUTSIDE}/secret.png", f"{OUTSIDE}/secret.json", "..", "/", "a" * 300)
TEXTS = ("", " ", "\0", "a\0.png", "\ud83d", "\u202e", "\x1b[31m", "x" * 5000, "nan", "{classes}", "%s", "[/]")
TEXTS = (*MARKUP, *NAMES, *TEXTS)
NUMBERS = (0, 1, -1, 7, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**400, 1e6, 1e12)
SPECIAL = (None, True, False, float("nan"), float("inf"), float("-inf"))
BYTES = (
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b"\xc2\x85", b'"', b"{", b"}", b"]", b",", b":", b"\\",
    b"NaN", b"Infinity", b"1e999", b"9" * 5000, b"[" * 100_000, b'{"a":' * 20_000, b"null", b'{"a": 1, "a": 2}',
    b"\\ud83d", b"&a [*a]", b"!!python/object/apply:os.system [id]", b"<<: *x", b"\t", b"#", b"- ",
    b"%YAML 9.9\n---\n",
)  # fmt: skip

scalars = st.sampled_from((*TEXTS, *NUMBERS, *SPECIAL)) | st.integers(-3, 70) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3),
    max_leaves=6,
)


def fuzzing(examples: int) -> Any:
    """Return the settings of a test that has this many examples in CI, where SHARE is a quarter."""
    count = int(os.environ.get("COORDEXP_FUZZ_EXAMPLES", 4 * SHARE * examples))
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def all_paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path] * bool(path) + [inner for key, item in items for inner in all_paths(item, (*path, key))]


@st.composite
def mutated(draw: Any, tree: Any) -> Any:
    """Return a copy of a tree of plain values in which one value is removed, replaced, added or repeated."""
    tree = copy.deepcopy(tree)
    paths = all_paths(tree)
    if not paths or draw(st.integers(0, 19)) == 0:
        return draw(values)
    *parents, last = draw(st.sampled_from(paths))
    here = tree
    for key in parents:
        here = here[key]
    match draw(st.sampled_from(["replace", "replace", "replace", "delete", "add", "swap"])):
        case "replace":
            here[last] = draw(values)
        case "delete":
            del here[last]
        case "add" if isinstance(here, dict):
            here[draw(st.sampled_from(TEXTS))] = draw(values)
        case "add":
            here.insert(last, draw(values))
        case "swap":
            *above, name = draw(st.sampled_from(paths))
            there = tree
            for key in above:
                there = there[key]
            here[last] = copy.deepcopy(there[name])
    return tree


@st.composite
def damaged_bytes(draw: Any, content: bytes) -> bytes:
    """Return the content cut off, or with a part removed, repeated, overwritten or inserted."""
    begin, end = sorted(draw(st.integers(0, len(content))) for _ in range(2))
    match draw(st.sampled_from(["cut", "remove", "repeat", "overwrite", "insert", "insert"])):
        case "cut":
            return content[:begin]
        case "remove":
            return content[:begin] + content[min(end, begin + 40) :]
        case "repeat":
            return content[:end] + content[begin:]
        case "overwrite":
            some = draw(st.binary(min_size=1, max_size=4) | st.sampled_from(BYTES))
            return content[:begin] + some + content[begin + len(some) :]
        case _:
            return content[:begin] + draw(st.sampled_from(BYTES)) + content[begin:]


@st.composite
def damaged(draw: Any, name: str, content: bytes) -> bytes:
    """Return the content of a file with one to three changes, of its values or of its bytes."""
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        changed = None if draw(st.integers(0, 2)) == 0 else _change_values(draw, name, content)
        content = draw(damaged_bytes(content)) if changed is None else changed
    return content


def _change_values(draw: Any, name: str, content: bytes) -> bytes | None:
    """Return the content with one value changed, or None if it can no longer be read."""
    try:
        if name.endswith(".json"):
            return json.dumps(draw(mutated(json.loads(content)))).encode()
        if name.endswith((".yaml", ".yml")):
            return yaml.safe_dump(draw(mutated(yaml.safe_load(content)))).encode()
        lines = content.split(b"\n")
        number = draw(st.integers(0, len(lines) - 1))
        if name.endswith(".jsonl"):
            lines[number] = json.dumps(draw(mutated(json.loads(lines[number])))).encode()
        else:
            words = lines[number].split(b" ")
            words[draw(st.integers(0, len(words) - 1))] = str(draw(scalars)).encode(errors="surrogatepass")
            lines[number] = b" ".join(words)
        return b"\n".join(lines)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


@dataclass(frozen=True)
class Case:
    """A folder of valid files and the commands that read them. `{folder}` in a command is that folder, and `{new}`
    one that commands write to. `damaged` are the files to damage, by their paths in the folder."""

    folder: Path
    commands: Sequence[str]
    damaged: Sequence[str]

    @st.composite
    @staticmethod
    def _draw(draw: Any, case: "Case") -> tuple[str, dict[str, bytes]]:
        names = draw(st.lists(st.sampled_from(case.damaged), min_size=1, max_size=2, unique=True))
        files = {name: draw(damaged(name, (case.folder / name).read_bytes())) for name in names}
        return draw(st.sampled_from(case.commands)), files

    def examples(self) -> st.SearchStrategy[tuple[str, dict[str, bytes]]]:
        return Case._draw(self)


@dataclass
class Outcome:
    exit_code: int
    output: str
    opened: set[str]
    folder: Path  # of the damaged files
    written: Path  # the folder for new files
    outside: Path  # the folder of foreign files

    @property
    def names_its_files(self) -> bool:
        """True if the message says where the problem is."""
        return str(self.folder) in self.output


@contextmanager
def attempt(case: Case, base: Path, command: str, files: dict[str, bytes]) -> Iterator[Outcome]:
    """Run a command on a copy of the folder with damaged files. Check what must hold for every command: it ends in
    time with a success, or with a message and no other exception, and shows nothing of a foreign file."""
    folder, new = base / "case", base / "new"
    for path in (folder, new):
        shutil.rmtree(path, ignore_errors=True)
    outside = base / "outside"
    shutil.copytree(case.folder, folder)
    new.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content.replace(OUTSIDE.encode(), str(outside).encode()))
    words = [word.format(folder=folder, new=new) for word in command.split()]
    since = time.monotonic()
    with opened_files() as opened:
        result = run(*words, code=None)
    seconds = time.monotonic() - since
    assert result.exit_code in (0, 1, 2)
    assert result.exit_code == 0 or result.output.strip(), "it failed without a word"
    assert "Traceback" not in result.output and SECRET not in result.output
    assert seconds < MOST_SECONDS, f"{seconds:.1f} s"
    for page in new.rglob("*.html"):
        check_page(page.read_text(encoding="utf-8"))
    yield Outcome(result.exit_code, result.output, opened, folder, new, outside)


def write_outside(base: Path) -> None:
    """Write the foreign files, of which nothing may be seen."""
    outside = base / "outside"
    outside.mkdir(exist_ok=True)
    for name in ("secret.png", "secret.json", "secret.jsonl", "secret.yaml"):
        (outside / name).write_text(json.dumps({"desc": SECRET, "image": SECRET}))


_watched: list[set[str]] = []


def _note_open(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event == "open" and isinstance(arguments[0], str | bytes):
        _watched[-1].add(os.path.normpath(os.fsdecode(arguments[0])))


sys.addaudithook(_note_open)


@contextmanager
def opened_files() -> Iterator[set[str]]:
    """Yield the set of the files that this process opens in the block."""
    names: set[str] = set()
    _watched.append(names)
    try:
        yield names
    finally:
        _watched.remove(names)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Check that the peak of the process's memory in the block is not far above its memory at the start. The
    earlier peak is reset first, because below it no growth would be seen."""
    Path("/proc/self/clear_refs").write_text("5")
    before = read_memory("VmRSS")
    yield
    grown = read_memory("VmHWM") - before
    assert grown < MOST_MEGABYTES, f"the process grew by {grown:.0f} MB"


def read_memory(name: str) -> float:
    """Return the resident memory (VmRSS) or its peak (VmHWM) of this process, in MB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


class _MarkFinder(HTMLParser):
    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = [tag, *(name for name, _ in attributes)]
        assert not any("zqx" in name for name in names), f"unescaped: {self.get_starttag_text()}"
        assert not any(name.startswith("on") for name, _ in attributes), self.get_starttag_text()


def check_page(text: str) -> None:
    """Check that no text from data became a tag or an attribute, and that nothing of a foreign file is there."""
    finder = _MarkFinder(convert_charrefs=True)
    finder.feed(text)
    finder.close()
    assert SECRET not in text
    assert not re.search(r"(src|href)=[\"'](?!data:|#)[a-z]+://(?!127\.0\.0\.1)", text)
