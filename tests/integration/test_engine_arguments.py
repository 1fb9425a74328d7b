"""The arguments that vLLM engines are started with, beside the learner and in a server. No engine is started."""

import pytest
import torch

from coordexp.config.rollout import RepeatTerminate, RolloutMatching
from coordexp.rollout.backend import Decode
from coordexp.rollout.engine import CUDA_IPC, ENGINE_SIDE, SHARED_MEMORY, starting
from coordexp.rollout.guard import ENGINE_GUARD, guard_arguments, key_pattern
from coordexp.rollout.setup import Setup
from coordexp.serve.engine import BROADCAST, SERVER_SIDE
from coordexp.serve.guard import TEXT
from coordexp.vocab import VocabularyTable
from tests.integration.servers import GUARD
from tests.integration.stage2_runs import MODEL


def setup(**settings) -> Setup:
    table = VocabularyTable.from_folder(MODEL)
    return Setup(MODEL, "float32", RolloutMatching(**settings), table, torch.device("cpu"))


@pytest.mark.scenario("R10", "R10.S2")
@pytest.mark.parametrize(
    ("transfer", "side"), [(SHARED_MEMORY, ENGINE_SIDE), (CUDA_IPC, ENGINE_SIDE), (BROADCAST, SERVER_SIDE)]
)
@pytest.mark.parametrize(("batch", "devices"), [(1, 1), (5, 1), (5, 3)])
def test_an_engine_may_compute_decode_batch_size_sequences_for_each_of_its_devices(transfer, side, batch, devices):
    about = setup(decode_batch_size=batch, vllm={"tensor_parallel_size": devices})
    with starting(about, transfer, side) as arguments:
        assert arguments["tensor_parallel_size"] == devices
        assert arguments["max_num_seqs"] == batch * devices


@pytest.mark.scenario("R33.S4")
def test_what_a_server_gets_by_its_environment_changes_nothing_for_an_engine_beside_the_learner(monkeypatch):
    """The learner's own settings alone decide (D33)."""
    monkeypatch.setenv(TEXT, RepeatTerminate(**GUARD).model_dump_json())
    for guard, processors in ((RepeatTerminate(), None), (RepeatTerminate(**GUARD), [ENGINE_GUARD])):
        about = setup(repeat_terminate=guard)
        with starting(about, SHARED_MEMORY, ENGINE_SIDE) as arguments:
            assert arguments["logits_processors"] == processors
        asked = guard_arguments(Decode.of(about.settings).guard, key_pattern(about.table), about.table.end_of_turn)
        assert bool(asked) == guard.enabled
