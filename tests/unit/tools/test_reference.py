"""The pages of docs/reference are what `python tools/reference.py` writes now, and are complete."""

import json
import re
from collections import Counter

import pytest
import reference
import typer
from reference import FOLDER

from coordexp.cli import app
from coordexp.config import schema


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
    assert len(commands) > 20
    for name, command in commands.items():
        section = pages["cli.md"].partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
        assert section, name
        for option in command.params:
            if option.param_type_name == "option":
                assert f"`{option.opts[0]}`" in section, (name, option.opts)


def test_the_detector_comes_first_and_every_entry_has_text(pages):
    names = re.findall(r"^(?:###|-) `(?:class )?([A-Za-z_]\w*)", pages["python.md"], re.MULTILINE)
    assert names[0] == "Detector"
    assert {"RolloutBackend", "ModuleKind", "Family", "SourceImage", "Record", "evaluate"} <= set(names)


def test_the_page_of_settings_states_the_defaults_of_the_schema(pages):
    rows = re.findall(r"^- `(\w+)` \((?:.*?; )?`([^`]*)`\): ", pages["config.md"], re.MULTILINE)
    arguments = pages["config.md"].partition("```text\n")[2].partition("\n```")[0]  # those of transformers
    rows += re.findall(r"(\w+): (.*?)(?:,\s|$)", arguments)
    stated = Counter(rows)
    expected = Counter(
        (str(path[-1]), default if isinstance(default, str) and default else json.dumps(default))
        for path, node in schema.leaves()
        if (default := node.get("default", ...)) is not ... and path[-1] not in ("objective", "diagnostics")
    )
    assert expected - stated == Counter()
    assert ("decode_batch_size", "1") in stated
