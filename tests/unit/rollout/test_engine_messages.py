"""What a person reads when an engine cannot be started, and where it would be."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from coordexp.errors import EngineError
from coordexp.rollout.engine import _cause, _devices, _told, _visible, _way_out, check_vocabulary
from coordexp.vocab import COORD_TOKENS
from tests.vocabularies import table

HEARD = """WorkerProc failed to start.
Traceback (most recent call last):
  File "worker.py", line 83, in __init__
    raise ValueError(
ValueError: Available memory on node 0 (22.0/23.54 GiB) on startup is less than desired.
EngineCore failed to start.
Traceback (most recent call last):
  File "core.py", line 1482, in run_engine_core
Exception: WorkerProc initialization failed due to an exception in a background process.
"""
VALIDATION = """1 validation error for ModelConfig
  Value error, User-specified max_model_len (200000) is too long. [type=value_error, input_value=1]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""


def test_the_cause_of_a_failed_start_is_the_first_error_that_any_of_its_processes_had():
    assert _cause(HEARD) == "Available memory on node 0 (22.0/23.54 GiB) on startup is less than desired."
    assert _cause("Traceback\n  x\ntorch.OutOfMemoryError: CUDA out of memory.\n") == (
        "OutOfMemoryError: CUDA out of memory."
    )
    assert _cause("") is None


def test_of_an_error_the_sentence_is_told_and_not_its_frame():
    assert _told(VALIDATION) == "User-specified max_model_len (200000) is too long."
    assert _told("\nEngine core initialization failed.\nmore") == "Engine core initialization failed."
    assert _told("") == "it did not say why"


@pytest.mark.parametrize(
    ("told", "way"),
    [
        ("Available memory is less than desired", "lower rollout_matching.vllm.gpu_memory_utilization"),
        (
            "requested memory for kv cache",
            "raise rollout_matching.vllm.gpu_memory_utilization, or lower max_model_len",
        ),
        ("heads (4) must be divisible by tensor parallel size (3)", "tensor_parallel_size to what divides it"),
        ("something else", "what it printed above says why"),
    ],
)
def test_every_failed_start_names_a_way_out_and_the_backend_without_an_engine(told, way):
    assert way in _way_out(told)
    assert _way_out(told).endswith("or set rollout_matching.rollout_backend: hf, which needs no engine")


@dataclass
class About:
    size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@pytest.mark.scenario("R07.C6", on="pure")
def test_an_engine_has_the_devices_of_the_ranks_that_share_it(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _devices(About(2)) == range(2, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert _visible(_devices(About(2))) == "3,1", "the third and fourth of those that the learner sees"


@pytest.mark.scenario("R07.S8", on="pure")
def test_ranks_of_two_machines_cannot_share_an_engine(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(EngineError) as error:
        _devices(About(4))
    assert str(error.value).splitlines() == [
        "rollout_matching.vllm.tensor_parallel_size: 4 ranks from local rank 2 on share an engine, and this "
        "machine has 4",
        "  set it to a divisor of the ranks of each machine, or set rollout_matching.rollout_backend: hf, which "
        "needs no engine",
    ]


@pytest.mark.parametrize("fault", ["elsewhere", "missing", "too few rows"])
def test_a_vocabulary_without_the_learners_coordinate_tokens_is_refused_with_the_command_that_adds_them(fault):
    small = table("small")
    ids = {token: small.first_coord + k for k, token in enumerate(COORD_TOKENS)}
    size = small.first_coord + len(COORD_TOKENS)
    check_vocabulary(
        SimpleNamespace(convert_tokens_to_ids=lambda tokens: [ids[one] for one in tokens]), size, small
    )
    if fault == "elsewhere":
        ids = {token: id + 1 for token, id in ids.items()}
    if fault == "missing":
        ids = dict.fromkeys(ids, 0)
    size -= fault == "too few rows"
    with pytest.raises(
        EngineError, match=r"run `coordexp model add-coords` on the checkpoint, and set model.path"
    ):
        check_vocabulary(
            SimpleNamespace(convert_tokens_to_ids=lambda tokens: [ids[one] for one in tokens]), size, small
        )
