"""Every file of a run folder meets every fault of a disk or a kill: the run resumes exactly, or the file is
named."""

import json
from collections import defaultdict
from contextlib import ExitStack

import pytest

from coordexp.demo.model import make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from tests.integration.stage1_runs import TINY
from tests.integration.stage2_runs import config, started

WORKERS = 2
# A tiny run on rollouts that leaves all kinds of files: dumps, evaluations, TensorBoard, a carry buffer.
CHANGES = {
    "rollout_matching__max_new_tokens": 8,
    "stage2": {"dump_every": 1, "dump_samples": 1},
    "training__save_steps": 1,
    "training__eval_strategy": "steps",
    "training__eval_steps": 1,
    "training__learning_rate": 1e-3,
    "training__lr_scheduler_type": "constant",
    "training__per_device_train_batch_size": 2,
    "training__gradient_accumulation_steps": 1,
    "training__packing_min_fill_ratio": 0.1,
    "training__report_to": "tensorboard",
}


@pytest.mark.full
@pytest.mark.timeout(1500)  # three minutes on two free cores
def test_whatever_happens_to_a_file_of_a_run_it_resumes_exactly_or_the_file_is_named(tmp_path):
    write_scenes(tmp_path / "data", SceneSettings(objects=(1, 2)), train=12, val=2, seed=1)
    model = make_model(tmp_path / "model", "small", ordinal=True, size=TINY)
    file = config(tmp_path, "run", model__path=str(model), **CHANGES)
    with ExitStack() as stack:
        workers = []
        for part in range(WORKERS):
            folder = tmp_path / str(part)
            folder.mkdir()
            words = ["-m", "tests.integration.run_faults", file, folder, part, WORKERS]
            workers.append(stack.enter_context(started(list(map(str, words)))))
        assert [worker.wait(1400) for worker in workers] == [0] * WORKERS, [worker.shown for worker in workers]
    table: dict[str, dict[str, str]] = defaultdict(dict)
    for outcomes in sorted(tmp_path.glob("*/outcomes.jsonl")):
        for row in map(json.loads, outcomes.read_text().splitlines()):
            table[row["file"]][row["fault"]] = row["outcome"]
    failed = [
        f"{name}, {fault}: {outcome}"
        for name, outcomes in table.items()
        for fault, outcome in outcomes.items()
        if "FAILED" in outcome
    ]
    assert not failed, "\n\n".join(failed)
    files = {name.partition("/")[2] for name in table if name.startswith("checkpoint-")}
    assert {"manifest.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "stream_0.json"} <= files
    assert {"metrics.jsonl", "run.json", "resolved.yaml", "runs/events", "dumps/tokenizer.json"} <= set(table)
    for name, outcomes in table.items():
        if name.startswith("checkpoint-3/"):
            assert outcomes["killed"] == "killed; exact from checkpoint-2"
            assert outcomes["no room"] == "error; exact from checkpoint-2"
        if name.startswith("checkpoint-2/"):
            assert set(outcomes.values()) == {"exact from checkpoint-1"}
