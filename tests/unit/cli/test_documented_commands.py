"""Every command in the documentation exists, with its options, and names files of the repository that exist."""

import re

import pytest

from tests.documented_commands import (
    ROOT,
    find_blocks,
    find_commands,
    find_coordexp,
    find_missing_paths,
    find_mistake,
    find_pages,
    find_unknown_names,
)

PAGES = find_pages()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_in_a_block_can_be_parsed(page):
    for block in find_blocks(page):
        for words in find_commands(block.text):
            arguments = find_coordexp(words)
            mistake = None if arguments is None else find_mistake(arguments)
            assert mistake is None, f"{block}: {' '.join(words)}\n{mistake}"
            assert find_missing_paths(words) == [], block


@pytest.mark.parametrize("page", PAGES)
def test_every_option_of_a_command_in_a_sentence_exists(page):
    """A sentence may leave out what a command needs. Only its name and those of its options are compared."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`(coordexp [^`]+)`", text):
        if "import pascal" in span:  # of the package that docs/extending.md makes
            continue
        words = [word for word in span.split() if re.fullmatch(r"[a-z][\w-]*|--?[a-z][\w-]*", word)]
        assert find_unknown_names(words[1:]) == [], f"{page}: {span}"


def test_commands_are_found_in_pipes_loops_and_continued_lines():
    script = (
        "for x in 1 2; do coordexp check --config a$x.yaml; done   # a comment\n"
        "A=1 coordexp report \\\n  runs/a | jq -c 'select(.b | c)' && ls\ntorchrun -m coordexp train"
    )
    commands = list(find_commands(script))
    calls = [arguments for words in commands if (arguments := find_coordexp(words)) is not None]
    assert calls == [["check", "--config", "a1.yaml"], ["report", "runs/a"], ["train"]]
    assert ["jq", "-c", "select(.b | c)"] in commands and ["ls"] in commands


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["check", "--config", "a.yaml"], None),
        (["check", "--konfig", "a.yaml"], "No such option"),
        (["data", "imprt", "coco", "a"], "coordexp data has no command imprt"),
        (["plan", "--config", "a.yaml", "--gpus", "many"], "valid integer"),
        (["check"], "Missing option"),
        (["--version"], None),
    ],
)
def test_mistakes_in_commands_are_found(arguments, mistake):
    problem = find_mistake(arguments)
    assert (problem is None) if mistake is None else mistake in problem


def test_files_that_do_not_exist_are_found():
    words = [
        "train",
        "configs/stage1.yaml",
        "configs/nothing.yaml",
        "runs/x",
        "configs/*.yaml",
        "configs/my-a.yaml",
    ]
    assert find_missing_paths(words) == ["configs/nothing.yaml"]
