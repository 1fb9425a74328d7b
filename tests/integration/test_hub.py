"""Models named as on the Hugging Face hub, from a cache laid out as huggingface_hub does, without a network."""

import json
import os
from pathlib import Path

import huggingface_hub
import pytest
import yaml

from coordexp.demo.model import Size, make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.errors import UserError
from coordexp.files import find_model, is_hub_name
from tests import zygote
from tests.command import run
from tests.source import SOURCE

pytestmark = pytest.mark.timeout(600)
CONFIG = Path("configs/demo/stage1-cpu.yaml").absolute()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache_model(home: Path, name: str, files: Path) -> Path:
    """Put the files of a model into a cache as huggingface_hub does: blobs, and a snapshot of links to them."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for part in (folder / "blobs", folder / "refs", snapshot):
        part.mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    for number, file in enumerate(sorted(files.iterdir())):
        file.rename(folder / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return HF_HOME with a model without coordinate tokens, Tiny/plain."""
    folder = tmp_path_factory.mktemp("home")
    size = Size(hidden=64, layers=2, patch=8, vision_hidden=32)
    make_model(folder / "plain", "small", size=size, coords=False, tied=False)
    cache_model(folder, "Tiny/plain", folder / "plain")
    return folder


@pytest.fixture
def offline(home, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_model_that_is_not_in_the_cache_is_an_error_with_the_command_that_downloads_it(offline):
    with pytest.raises(UserError) as caught:
        find_model("Tiny/other")
    assert "run: hf download Tiny/other (" in caught.value.fix
    assert "hf download Tiny/other --local-dir DIR" in caught.value.fix


def test_a_folder_comes_before_a_name_and_a_missing_path_is_not_looked_up(tmp_path, monkeypatch, offline):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Tiny/plain").mkdir(parents=True)
    assert find_model("Tiny/plain") == Path("Tiny/plain")
    for name in ("Tiny/typo", "checkpoints/x", "runs/stage1/checkpoint-4", "/somewhere/else", "model", "../a/b"):
        assert not is_hub_name(name)
        assert find_model(name) == Path(name)
    assert is_hub_name("Qwen/Qwen3-VL-4B-Instruct")


def test_a_cached_model_gets_coordinate_tokens_trains_and_answers(home, offline, tmp_path, monkeypatch):
    """All commands get the name, and none needs the network."""
    monkeypatch.chdir(tmp_path)
    run("model", "add-coords", "--model", "Tiny/plain", "--out", "coords")
    assert not any(path.is_symlink() for path in (tmp_path / "coords").iterdir())
    cache_model(home, "Tiny/coords", tmp_path / "coords")
    write_scenes(tmp_path / "data", SceneSettings(objects=(1, 2)), train=8, val=2, seed=1)
    config = {
        "extends": [os.path.relpath(CONFIG, tmp_path)],
        "model": {"path": "Tiny/coords"},
        "custom": {"train_jsonl": "data/train.jsonl", "val_jsonl": None},
        "training": {"output_dir": "run", "max_steps": 1, "eval_strategy": "no", "report_to": [], "save_steps": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SOURCE)}
    environment.pop("HF_HUB_CACHE", None)
    zygote.run(["-m", "coordexp", "train", "-c", "run.yaml"], cwd=tmp_path, env=environment, check=True)
    path = yaml.safe_load((tmp_path / "run/resolved.yaml").read_text())["model"]["path"]
    assert path == str(home / "hub/models--Tiny--coords/snapshots" / COMMIT)
    words = ("predict", "--model", "Tiny/coords", "--data", "data/val.jsonl", "--out", "p.json")
    run(*words, "--max-new-tokens", "4")
    assert isinstance(json.loads((tmp_path / "p.json").read_text()), list)


class BrokenConnection(Exception):
    """As HTTP libraries define theirs: no OSError, and without words."""


def test_a_download_that_breaks_off_is_an_error_with_the_command_that_repeats_it(monkeypatch):
    def break_off(*_: object, **__: object) -> str:
        raise BrokenConnection

    monkeypatch.setattr(huggingface_hub, "snapshot_download", break_off)
    with pytest.raises(UserError, match="cannot be downloaded: BrokenConnection") as caught:
        find_model("Tiny/other")
    assert "hf download Tiny/other" in caught.value.fix
