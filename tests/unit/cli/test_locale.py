"""Commands read and write the same bytes in every locale, and print what it cannot show as an escape."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source import SOURCE

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run_in_ascii(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    variables = os.environ | ASCII | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, *words], env=variables, capture_output=True, encoding="ascii", timeout=120, check=False
    )


@pytest.mark.timeout(150)
def test_names_that_the_locale_does_not_have_are_printed_as_escapes(tmp_path):
    objects = [{"desc": "café 猫", "bbox_2d": [9, 9, 2, 2]}]
    record = {"image": "a.png", "width": 64, "height": 64, "space": "pixel", "objects": objects}
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    done = run_in_ascii("-m", "coordexp", "data", "doctor", "--images", "skip", file)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 0)
    assert r"caf\xe9 \u732b" in done.stdout


@pytest.mark.timeout(150)
def test_the_files_of_a_model_are_read_as_utf_8_in_any_locale(tmp_path):
    (tmp_path / "config.json").write_text('{"author": "é"}', encoding="utf-8")
    vocab = {"model": {"vocab": {"Ġ猫": 7}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    code = "import sys; from coordexp.servers.protocol import model_fingerprint as f; print(ascii(f(sys.argv[1])))"
    done = run_in_ascii("-c", code, tmp_path)
    assert done.returncode == 0, done.stderr
    facts = ast.literal_eval(done.stdout)
    assert facts["config.author"] == "é" and facts["tokenizer.tokens"] == 1


def test_every_text_file_is_read_and_written_with_an_encoding():
    """ruff's PLW1514 is a preview, and sees only calls on a path that the same expression makes."""
    without = [
        f"{file.relative_to(SOURCE)}:{node.lineno}"
        for file in (SOURCE / "coordexp").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("read_text", "write_text")
        and "encoding" not in {keyword.arg for keyword in node.keywords}
    ]
    assert without == []
