"""The pages of docs/reference are what `python tools/reference.py` writes now, and are complete."""

import re

import pytest
import reference
import typer
from reference import FOLDER, check_names, describe_schema, escape, split_at_commas

from coordexp.cli import app


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.render_pages()


@pytest.mark.timeout(120)
def test_the_pages_are_up_to_date(pages):
    for name, page in pages.items():
        assert (FOLDER / name).read_text() == page, f"{name} is stale: run `python tools/reference.py`"


def test_every_command_and_option_is_on_the_page(pages):
    def walk(command, name):
        yield name, command
        for inner, child in getattr(command, "commands", {}).items():
            yield from walk(child, f"{name} {inner}")

    commands = dict(walk(typer.main.get_command(app), "coordexp"))
    assert len(commands) > 25
    for name, command in commands.items():
        section = pages["cli.md"].partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
        assert section, name
        for option in command.params:
            if option.param_type_name == "option":
                assert f"`{option.opts[0]}`" in section, (name, option.opts)


def test_the_detector_comes_first_and_every_entry_has_text(pages):
    headings = re.findall(r"^### `(\w+)`$", pages["python.md"], re.MULTILINE)
    assert headings[0] == "Detector"
    assert {"RolloutBackend", "ModuleKind", "Family", "SourceImage", "Record", "evaluate"} <= set(headings)


def test_a_name_without_a_meaning_and_a_meaning_without_a_name_are_refused():
    check_names("table", ["a"], {"a": "the first letter"})
    with pytest.raises(ValueError, match="b"):
        check_names("table", ["a", "b"], {"a": "the first letter"})
    with pytest.raises(ValueError, match="c"):
        check_names("table", ["a"], {"a": "the first letter", "c": "the third"})


def test_types_are_described_in_words():
    whole = {"type": "integer", "minimum": 1}
    assert describe_schema({"anyOf": [whole, {"type": "null"}]}) == "integer >= 1 or null"
    assert describe_schema({"type": "array", "items": {"$ref": "#/$defs/Choice"}}) == "list of `Choice`"


def test_arguments_are_split_outside_of_brackets():
    assert split_at_commas("a: dict[str, int], *, b=(1, 2)") == ["a: dict[str, int]", "*", "b=(1, 2)"]


def test_markdown_is_escaped_outside_of_code():
    assert escape("a < b, `c < d`, *e") == r"a \< b, `c < d`, \*e"
