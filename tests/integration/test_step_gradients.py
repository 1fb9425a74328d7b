"""An optimizer step has the same gradient and report, however it is packed, accumulated and distributed (D19)."""

import json

import pytest
from safetensors.torch import load_file

from coordexp.demo.model import make_model
from tests.integration.stage2_runs import ROOT, finish

pytestmark = pytest.mark.timeout(480)
CLIP = 0.5

# The micro-steps of each rank, by the way in which the model is distributed. Seeds from 100 on are questions about
# images, those from 200 on questions without one: some rows of some ranks have no image.
STEPS = {
    "none": {
        "one row": [[[0, 1, 2, 3, 4, 5, 6, 7]]],
        "unpacked": [[[0], [1], [2], [3], [4], [5], [6], [7]]],
        "four micro-steps": [[[7], [0, 1], [2, 3, 4, 5], [6]]],
        "chat, one row": [[[0, 1, 100, 200, 101, 201]]],
        "chat, unpacked": [[[0], [1], [100], [200], [101], [201]]],
    },
    "ddp": {
        "ddp, one micro-step": [[[0, 1, 2]], [[3, 4, 5, 6, 7]]],
        "ddp, two micro-steps": [[[0], [4, 1, 2]], [[3, 7], [5, 6]]],
        "chat, ddp": [[[200], [0, 101]], [[1, 100], [201]]],
    },
    "fsdp2": {
        "fsdp2, one micro-step": [[[0, 1, 2]], [[3, 4, 5, 6, 7]]],
        "fsdp2, two micro-steps": [[[0], [4, 1, 2]], [[3, 7], [5, 6]]],
        "chat, fsdp2": [[[200], [0, 101]], [[1, 100], [201]]],
    },
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Make all steps, those with the same distribution in the same processes. Return how to read one."""
    out = tmp_path_factory.mktemp("steps")
    model = make_model(out / "model", "small", spread=3.0)
    for mode, plans in STEPS.items():
        job = {"mode": mode, "steps": plans, "model": str(model), "out": str(out), "clip": CLIP}
        (out / f"{mode}.json").write_text(json.dumps(job))
        worker = [str(ROOT / "tests/integration/step_worker.py"), str(out / f"{mode}.json")]
        finish(worker, processes=1 if mode == "none" else 2)

    def read(name):
        report = json.loads((out / name / "report.json").read_text())
        return load_file(out / name / "before.safetensors"), load_file(out / name / "after.safetensors"), report

    return read


@pytest.mark.parametrize("name", [name for plans in STEPS.values() for name in plans if "one row" not in name])
def test_the_step_has_the_same_gradient_and_report_as_one_row_on_one_process(steps, name):
    expected, actual = steps("chat, one row" if name.startswith("chat") else "one row"), steps(name)
    for whole, part in zip(expected[:2], actual[:2], strict=True):
        assert whole.keys() == part.keys()
        for weight in whole:
            scale = whole[weight].norm()
            assert (part[weight] - whole[weight]).norm() <= 1e-4 * scale + 1e-12, weight
    assert actual[2]["losses"] == pytest.approx(expected[2]["losses"], rel=1e-5, abs=1e-9)
    assert actual[2]["norm"] == pytest.approx(expected[2]["norm"], rel=1e-4)


def test_clipping_acts_on_the_gradient_of_the_whole_step(steps):
    before, after, report = steps("one row")
    norm = sum(gradient.double().pow(2).sum() for gradient in before.values()).sqrt().item()
    assert report["norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > 2 * CLIP
    clipped = sum(gradient.double().pow(2).sum() for gradient in after.values()).sqrt().item()
    assert clipped == pytest.approx(CLIP, rel=1e-4)
