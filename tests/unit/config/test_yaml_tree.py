"""Reading YAML files: what `extends` means, how scalars are read, and the origin of each value."""

import math

import pytest

from coordexp.config import ConfigError, load_settings
from coordexp.config.yaml_tree import MAX_BYTES, read_document


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return _write


def error_of(path):
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    return str(caught.value)


def test_later_files_win_mappings_merge_and_lists_are_replaced(write):
    write("a.yaml", "m: {x: 1, y: 1, deep: {p: 1, q: 1}}\nl: [1, 2, 3]\n")
    write("sub/b.yaml", "m: {y: 2, deep: {q: 2}}\n")
    document = read_document(write("c.yaml", "extends: [a.yaml, sub/b.yaml]\nm: {z: 3}\nl: [9]\n"))
    assert document.tree == {"m": {"x": 1, "y": 2, "deep": {"p": 1, "q": 2}, "z": 3}, "l": [9]}
    assert {path: str(document.places[path]) for path in (("m", "x"), ("m", "y"), ("m", "z"), ("l", 0))} == {
        ("m", "x"): "a.yaml:1",
        ("m", "y"): "sub/b.yaml:1",
        ("m", "z"): "c.yaml:2",
        ("l", 0): "c.yaml:3",
    }


def test_extends_is_relative_to_the_file_that_contains_it(write):
    write("first/base.yaml", "x: 1\n")
    write("first/mid.yaml", "extends: base.yaml\ny: 2\n")
    assert read_document(write("second/top.yaml", "extends: ../first/mid.yaml\n")).tree == {"x": 1, "y": 2}


def test_null_removes_a_section_of_an_extended_file(write):
    write("a.yaml", "adapter: {rank: 8}\n")
    document = read_document(write("b.yaml", "extends: a.yaml\nadapter: null\n"))
    assert document.tree == {"adapter": None}
    assert ("adapter", "rank") not in document.places


def test_a_cycle_is_named(write):
    write("a.yaml", "extends: b.yaml\n")
    message = error_of(write("b.yaml", "extends: a.yaml\n"))
    assert "cycle: b.yaml -> a.yaml -> b.yaml" in message


def test_two_ways_to_the_same_base_are_not_a_cycle(write):
    write("base.yaml", "x: 1\n")
    write("a.yaml", "extends: base.yaml\n")
    write("b.yaml", "extends: base.yaml\n")
    assert read_document(write("c.yaml", "extends: [a.yaml, b.yaml]\n")).tree == {"x": 1}


@pytest.mark.parametrize("entry", ["missing.yaml", "/etc/base.yaml", "{a: 1}", "[1]", "."])
def test_a_bad_base_is_refused(write, entry):
    assert error_of(write("a.yaml", f"extends: {entry}\n")).startswith("extends: ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("'1'", "1"),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("-3", -3),
        ("1_000", "1_000"),
        ("2026-11-15", "2026-11-15"),
        ("12:30", "12:30"),
        ("$HOME/${USER}", "$HOME/${USER}"),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
    ],
)
def test_scalars_follow_yaml_1_2_and_nothing_is_interpolated(write, text, value):
    read = read_document(write("a.yaml", f"x: {text}\n")).tree["x"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x: 1\ny: 2\nx: 3\n", "x: written twice, first at a.yaml:1  (a.yaml:3)"),
        ("m: {x: 1, x: 2}\n", "m.x: written twice"),
        ("x: !!python/object/apply:os.system [ls]\n", "YAML tag"),
        ("x: !!binary aGk=\n", "YAML tag"),
        ("- 1\n- 2\n", "not a mapping"),
        ("x: [1\n", "cannot be read"),
        ("x: \x00\n", "cannot be read"),
        ("&a x: &b [*b]\n", "levels"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "\n".join(
                f"{n}: &{n} [{', '.join(['*' + p] * 10)}]" for p, n in zip("abcdef", "bcdefg", strict=True)
            ),
            "values",
        ),
    ],
)
def test_anything_but_a_plain_tree_is_refused(write, text, expected):
    assert expected in error_of(write("a.yaml", text))


def test_a_file_that_is_missing_or_too_large_is_refused(write, tmp_path):
    assert "no such file" in error_of(tmp_path / "none.yaml")
    assert "bytes" in error_of(write("big.yaml", "# " + "x" * MAX_BYTES))


def test_an_empty_file_is_an_empty_tree(write):
    assert read_document(write("a.yaml", "# nothing\n")).tree == {}
