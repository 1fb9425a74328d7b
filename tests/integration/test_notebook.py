"""The notebook runs from top to bottom, and is kept without outputs."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/quickstart.ipynb"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_notebook_finds_the_objects_of_the_scene_and_measures_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    predict, look, evaluate = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    names = [line.split("  ")[0] for line in _text(predict).splitlines()]
    assert names == ["yellow triangle", "red circle", "purple square"]
    assert any("image/png" in output.get("data", {}) for output in look)
    assert "F1" in _text(evaluate)
    assert str(ROOT) not in json.dumps(notebook)


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None


def _text(outputs) -> str:
    return "".join(output.text for output in outputs if output.get("name") == "stdout")
