"""Whatever a file contains, loading gives settings or findings with a fix."""

import copy
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from coordexp.config import ConfigError, parse_settings
from tests.unit.config.trees import server_mode, stage1, stage2

TEN_MISTAKES = yaml.safe_load(Path("examples/check/ten-mistakes.yaml").read_text())
VALID = [stage1(), stage2(), server_mode()]

words = st.sampled_from(
    ["vllm", "adapter", "auto", "beam", "server", "A", "name", "token_ce", "x", "", "hf", "config"]
)
scalars = st.none() | st.booleans() | st.integers(-2, 70000) | st.floats() | words
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3)
)


def all_paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path] * bool(path) + [inner for key, item in items for inner in all_paths(item, (*path, key))]


@given(st.data())
def test_any_mutation_of_a_config_is_accepted_or_explained(data):
    tree = copy.deepcopy(data.draw(st.sampled_from([*VALID, TEN_MISTAKES])))
    for _ in range(data.draw(st.integers(0, 4))):
        paths = all_paths(tree)
        if not paths:
            break
        *parents, last = data.draw(st.sampled_from(paths))
        here = tree
        for key in parents:
            here = here[key]
        match data.draw(st.sampled_from(["delete", "replace", "add"])):
            case "delete":
                del here[last]
            case "replace":
                here[last] = data.draw(values)
            case "add" if isinstance(here, dict):
                here[data.draw(words)] = data.draw(values)
    before = copy.deepcopy(tree)
    try:
        parse_settings(tree)
    except ConfigError as error:
        assert error.findings
        assert all(finding.problem and finding.fix for finding in error.findings)
    assert repr(tree) == repr(before), "the caller's tree was changed"


@given(values)
def test_any_tree_at_all_is_explained(tree):
    try:
        parse_settings({"rollout_matching": tree, "custom": tree, "stage1": tree})
    except ConfigError as error:
        assert error.findings
