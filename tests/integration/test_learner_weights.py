"""On several ranks, sharded or replicated, the learner gives the same whole, merged weights as in one process."""

import pytest

from coordexp.demo.model import Size, make_model
from tests.integration.stage2_runs import ROOT, finish


@pytest.mark.timeout(240)
def test_two_ranks_give_the_weights_of_one_process_with_and_without_adapters(tmp_path):
    size = Size(hidden=64, layers=1, patch=8, vision_hidden=32, vision_depth=1)
    folders = [make_model(tmp_path / name, "small", tied=name == "tied", size=size) for name in ("tied", "untied")]
    finish([str(ROOT / "tests/integration/weights_worker.py"), *map(str, folders)], processes=2)
