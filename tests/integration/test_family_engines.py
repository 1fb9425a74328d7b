"""After a weight sync, vLLM answers as transformers does, with Qwen2.5-VL and Qwen3-VL-MoE whose checkpoints got
coordinate tokens.

Qwen3.5 is missing: on a CPU, vLLM 0.32 computes its linear attention in bfloat16 only, and tokens may then differ
although all weights are right.
"""

import pytest
import torch

from coordexp.answers.expand import add_coord_tokens
from coordexp.config.settings import Adapter
from coordexp.demo.model import Size, make_model
from coordexp.train.learner import with_adapter
from tests.integration.answers import whole_model
from tests.integration.colocation import Colocation, draw_images, ids

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]

LORA = Adapter(rank=4, alpha=8)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_after_a_sync_vllm_answers_as_transformers_does(family, tmp_path):
    make_model(tmp_path / "plain", "small", family=family, spread=6.0, size=Size(patch=8), coords=False)
    folder = tmp_path / "model"
    add_coord_tokens(tmp_path / "plain", folder, noise=1.0)
    colocation = Colocation(folder, draw_images(tmp_path / "images"))
    requests = colocation.requests(10)
    try:
        with colocation.backend.session():
            colocation.sync(0)
        last = ids(colocation.learner.generate(requests))
        for adapter in (None, LORA):
            torch.manual_seed(0)
            colocation.model = with_adapter(whole_model(folder), adapter, colocation.table.first_coord)
            trained = [weight for weight in colocation.model.parameters() if weight.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-4 if adapter is None else 3e-3)
            for number in range(2):
                colocation.train(optimizer, number)
            answers = colocation.sync_and_compare(requests)
            assert answers != last and len(set(answers)) > 2
            last = answers
    finally:
        colocation.backend.close()
