"""What must be the same when a run is resumed: the identity in its checkpoints."""

from types import SimpleNamespace

import pytest

from coordexp.data import open_data
from coordexp.train import run
from coordexp.train.folder import fingerprint
from tests.unit.config.trees import load, stage2

RECORD = '{"image": "1.png", "width": 8, "height": 8, "space": "pixel", "objects": []}'


def identity(monkeypatch, **changes):
    monkeypatch.setattr(run, "fingerprint", lambda records: {"sha256": "same"})
    settings = load(stage2(**{f"rollout_matching__{name}": value for name, value in changes.items()})).settings
    return run._identity(settings, SimpleNamespace())


@pytest.mark.parametrize(
    "changes",
    [
        {"correction": {"insertion": "in_order"}},
        {"correction": {"duplicate_iou": 0.7, "duplicates": "remove"}},
        {"rollouts_per_sample": 2, "decoding": {"temperature": 0.7}},
        {"rollouts_per_sample": 2, "decoding": {"temperature": 0.7}, "choice": {"rule": "union"}},
        {"rollout_backend": "hf", "noise": {"enabled": True}},
    ],
)
def test_another_policy_choice_or_control_is_another_run(monkeypatch, changes):
    assert identity(monkeypatch, **changes) != identity(monkeypatch)


@pytest.mark.parametrize("name", ["max_pixels", "min_pixels"])
def test_another_limit_on_the_pixels_of_an_image_is_another_run(monkeypatch, name):
    monkeypatch.setattr(run, "fingerprint", lambda records: {"sha256": "same"})
    usual, limited = (
        run._identity(load(stage2(**changes)).settings, SimpleNamespace())
        for changes in ({}, {f"model__{name}": 65536})
    )
    assert usual[f"model.{name}"] is None
    assert limited == usual | {f"model.{name}": 65536}


def write_shards(folder):
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text(RECORD + "\n")
    return [folder / "a.jsonl", folder / "b.jsonl"]


def test_a_change_in_any_file_of_the_data_is_another_run(tmp_path):
    settings, files = load(stage2()).settings, write_shards(tmp_path)
    before = run._identity(settings, open_data([files]))
    assert run._identity(settings, open_data([files])) == before
    files[1].write_text(RECORD + "\n\n")
    assert run._identity(settings, open_data([files]))["data"] != before["data"]


def test_the_manifest_has_every_file_of_the_data_and_one_file_as_in_earlier_releases(tmp_path):
    files = write_shards(tmp_path)
    own = [{"file": str(file), "records": 1, "sha256": open_data([[file]]).sha256} for file in files]
    assert fingerprint(open_data([files[:1]])) == own[0]
    whole = open_data([files])
    assert fingerprint(whole) == {
        "file": f"{files[0]} and 1 more file",
        "records": 2,
        "sha256": whole.sha256,
        "files": own,
    }
