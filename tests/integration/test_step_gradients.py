"""An optimizer step with records and questions has the same gradient and report, however it is packed, accumulated
and distributed (D19). test_stage2.py shows it for records alone, in whole runs."""

import json

import pytest
from safetensors.torch import load_file

from coordexp.demo.model import make_model
from tests.integration.stage2_runs import ROOT, finish

pytestmark = pytest.mark.timeout(480)

# By the number of processes: how the model is distributed, and the micro-steps of each rank. Seeds from 100 on are
# questions about images, those from 200 on questions without one: some rows of some ranks have no image.
SPLIT = [[[200], [0, 101]], [[1, 100], [201]]]
STEPS = {
    1: {
        "one row": ("none", [[[0, 1, 100, 200, 101, 201]]]),
        "unpacked": ("none", [[[0], [1], [100], [200], [101], [201]]]),
    },
    2: {"ddp": ("ddp", SPLIT), "fsdp2": ("fsdp2", SPLIT)},
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Make all steps. Return how to read one."""
    out = tmp_path_factory.mktemp("steps")
    model = make_model(out / "model", "small", spread=3.0)
    for processes, plans in STEPS.items():
        file = out / f"{processes}.json"
        file.write_text(json.dumps({"steps": plans, "model": str(model), "out": str(out), "clip": 0.5}))
        finish([str(ROOT / "tests/integration/step_worker.py"), str(file)], processes)

    def read(name):
        report = json.loads((out / name / "report.json").read_text())
        return load_file(out / name / "before.safetensors"), load_file(out / name / "after.safetensors"), report

    return read


@pytest.mark.parametrize("name", ["unpacked", "ddp", "fsdp2"])
def test_the_step_has_the_same_gradient_and_report_as_one_row_on_one_process(steps, name):
    expected, actual = steps("one row"), steps(name)
    for whole, part in zip(expected[:2], actual[:2], strict=True):
        assert whole.keys() == part.keys()
        for weight in whole:
            scale = whole[weight].norm()
            assert (part[weight] - whole[weight]).norm() <= 1e-4 * scale + 1e-12, weight
    assert actual[2]["losses"] == pytest.approx(expected[2]["losses"], rel=1e-5, abs=1e-9)
    assert actual[2]["norm"] == pytest.approx(expected[2]["norm"], rel=1e-4)
