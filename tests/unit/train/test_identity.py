"""What must be the same when a run is resumed: the identity in its checkpoints."""

from types import SimpleNamespace

import pytest

from coordexp.train import run
from tests.unit.config.trees import load, stage2

LATER = ("correction", "rollouts_per_sample", "choice", "noise")


def identity(monkeypatch, **changes):
    monkeypatch.setattr(run, "fingerprint", lambda records: {"sha256": "same"})
    settings = load(stage2(**{f"rollout_matching__{name}": value for name, value in changes.items()})).settings
    return run._identity(settings, SimpleNamespace())


def test_defaults_of_later_releases_are_none_as_in_a_checkpoint_without_them(monkeypatch):
    usual = identity(monkeypatch)
    assert all(usual[f"rollout_matching.{name}"] is None for name in LATER)


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
    assert usual[f"model.{name}"] is None  # as in a checkpoint of an earlier release
    assert limited == usual | {f"model.{name}": 65536}
