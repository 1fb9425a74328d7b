"""Ten steps of Stage 2 give the stored numbers, so that no change of them goes unnoticed.

`python -m tests.integration.test_golden` prints the trace of this checkout. Store it below if a change is
intended.
"""

import tempfile
from pathlib import Path

import pytest

from tests.integration.stage2_runs import config, draw, finish, steps, training

# One thread, and only instructions that all x86 processors of the last ten years have.
REPEATABLE = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

# The loss of each step, the number of tokens of its rollouts, and the number of matched objects.
TRACE = [
    (3.83551, 346, 10),
    (3.95604, 309, 9),
    (3.86999, 319, 8),
    (3.84541, 312, 8),
    (4.06632, 180, 4),
    (4.00026, 284, 8),
    (4.05244, 105, 3),
    (3.98624, 247, 7),
    (3.77109, 312, 9),
    (3.7099, 281, 8),
]


def trace(folder: Path) -> list[tuple[float, int, int]]:
    changes = {
        "rollout_matching__max_new_tokens": 72,  # cuts off some answers with two objects, but not all
        "training__max_steps": 10,
        "training__learning_rate": 1e-3,
        "training__save_strategy": "no",
    }
    file = config(draw(folder), "golden", **changes)
    finish(training(file), **REPEATABLE)
    return [
        (float(f"{line['loss']:.6g}"), int(line["rollout/tokens"]), int(line["match/matched"]))
        for line in steps(folder / "golden")
    ]


@pytest.mark.timeout(480)
def test_ten_steps_have_the_stored_losses(tmp_path):
    steps_now = trace(tmp_path)
    assert [rest for _, *rest in steps_now] == [rest for _, *rest in TRACE]
    assert [loss for loss, *_ in steps_now] == pytest.approx([loss for loss, *_ in TRACE], abs=1.1e-5)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for step in trace(Path(scratch)):
            print(f"    {step},")
