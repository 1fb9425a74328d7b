"""The messages about an engine that does not start."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coordexp.answers.table import COORD_TOKENS
from coordexp.config.rollout import RolloutMatching
from coordexp.errors import EngineError
from coordexp.rollout.generate import COMMAND_FIX
from coordexp.rollout.start import (
    TRAINING_FIX,
    EngineSetup,
    check_vocabulary,
    first_error,
    first_sentence,
    start_engine,
)
from tests.vocabularies import table

LOG = """WorkerProc failed to start.
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


def test_the_cause_of_a_failed_start_is_the_first_error_of_any_of_its_processes():
    assert first_error(LOG) == "Available memory on node 0 (22.0/23.54 GiB) on startup is less than desired."
    assert first_error("Traceback\n  x\ntorch.OutOfMemoryError: CUDA out of memory.\n") == (
        "OutOfMemoryError: CUDA out of memory."
    )
    assert first_error("") is None


def test_only_the_sentence_of_an_error_is_shown_without_the_text_around_it():
    assert first_sentence(VALIDATION) == "User-specified max_model_len (200000) is too long."
    assert first_sentence("\nEngine core initialization failed.\nmore") == "Engine core initialization failed."
    assert first_sentence("") == "vLLM gave no reason"


def test_a_failed_start_names_the_settings_or_the_options_and_the_backend_without_an_engine():
    assert "rollout_matching.vllm" in TRAINING_FIX and "rollout_matching" not in COMMAND_FIX
    assert TRAINING_FIX.endswith(
        "or set rollout_matching.rollout_backend: hf (in Stage 1: stage1.eval_backend: hf), which needs no engine"
    )
    assert COMMAND_FIX.endswith("or use --backend hf, which needs no engine")


@pytest.mark.scenario("R07.C6", on="pure")
@pytest.mark.slow  # it imports vLLM
def test_the_engine_of_a_rank_runs_on_the_device_of_this_rank(monkeypatch):
    from coordexp.rollout.update import RankExecutor

    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("MASTER_PORT", "29511")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 6)
    name, rank, local_rank = RankExecutor.__new__(RankExecutor)._distributed_args()
    assert (name.rpartition(":")[2], rank, local_rank) == ("29511", 6, 2)


@pytest.mark.scenario("R07.S8", on="pure")
def test_ranks_of_two_machines_cannot_share_an_engine(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    settings = RolloutMatching(vllm={"tensor_parallel_size": 3})
    with pytest.raises(EngineError) as error:
        start_engine(EngineSetup(Path("model"), "float32", settings, table("small"), torch.device("cpu")))
    assert error.value.problem == (
        "rollout_matching.vllm.tensor_parallel_size: 3 ranks share an engine, but this machine has 4"
    )
    assert error.value.fix.startswith("set it to a divisor of the number of ranks on each machine, or set ")


@pytest.mark.parametrize("fault", ["elsewhere", "missing", "too few rows"])
def test_a_vocabulary_without_the_learners_coordinate_tokens_is_refused_with_the_command_that_adds_them(fault):
    small = table("small")
    ids = {token: small.first_coord + k for k, token in enumerate(COORD_TOKENS)}
    size = small.first_coord + len(COORD_TOKENS)
    check_vocabulary(
        SimpleNamespace(convert_tokens_to_ids=lambda tokens: [ids[token] for token in tokens]), size, small
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
            SimpleNamespace(convert_tokens_to_ids=lambda tokens: [ids[token] for token in tokens]), size, small
        )
