"""What must be the same when a run is resumed: the identity in its checkpoints."""

from types import SimpleNamespace

import pytest

from coordexp.data import open_data
from coordexp.train import data
from tests.unit.config.trees import load, stage2

RECORD = '{"image": "1.png", "width": 8, "height": 8, "space": "pixel", "objects": []}'


def identity(monkeypatch, **changes):
    monkeypatch.setattr(data, "fingerprint", lambda records: {"sha256": "same"})
    settings = load(stage2(**{f"rollout_matching__{name}": value for name, value in changes.items()})).settings
    return data.describe_identity(settings, SimpleNamespace())


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


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("custom", {"answer_format": "native"}),
        ("custom", {"prompt": "Other."}),
        ("model", {"freeze": ("vision",)}),
    ],
)
def test_another_format_prompt_or_frozen_part_is_another_run(monkeypatch, section, changes):
    monkeypatch.setattr(data, "fingerprint", lambda records: {"sha256": "same"})
    settings = load(stage2()).settings
    changed = settings.model_copy(update={section: getattr(settings, section).model_copy(update=changes)})
    assert data.describe_identity(changed, SimpleNamespace()) != data.describe_identity(
        settings, SimpleNamespace()
    )


def write_shards(folder):
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text(RECORD + "\n")
    return [folder / "a.jsonl", folder / "b.jsonl"]


def test_a_change_in_any_file_of_the_data_is_another_run(tmp_path):
    settings, files = load(stage2()).settings, write_shards(tmp_path)
    before = data.describe_identity(settings, open_data([files]))
    assert data.describe_identity(settings, open_data([files])) == before
    files[1].write_text(RECORD + "\n\n")
    assert data.describe_identity(settings, open_data([files]))["data"] != before["data"]
