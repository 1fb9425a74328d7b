"""An optimizer step has the same gradient and report, however it is packed, accumulated and distributed (D19)."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from coordexp.demo.model import make_model
from tests.integration.workers import run_worker

CLIP = 0.5

PLANS = {
    "one row": ("none", [[[0, 1, 2, 3, 4, 5, 6, 7]]]),
    "unpacked": ("none", [[[0], [1], [2], [3], [4], [5], [6], [7]]]),
    "two micro-steps": ("none", [[[0, 5, 7], [1, 2, 3, 4, 6]]]),
    "four micro-steps": ("none", [[[7], [0, 1], [2, 3, 4, 5], [6]]]),
    "ddp, one micro-step": ("ddp", [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
    "ddp, two micro-steps": ("ddp", [[[0], [4, 1, 2]], [[3, 7], [5, 6]]]),
    "ddp, four micro-steps, unpacked": ("ddp", [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]),
    "fsdp2, one micro-step": ("fsdp2", [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
    "fsdp2, two micro-steps": ("fsdp2", [[[0], [4, 1, 2]], [[3, 7], [5, 6]]]),
}

# With questions about images (from 100 on) and without (from 200 on). Some rows of some ranks have no image.
CHAT_PLANS = {
    "chat, one row": ("none", [[[0, 1, 100, 200, 101, 201]]]),
    "chat, unpacked": ("none", [[[0], [1], [100], [200], [101], [201]]]),
    "chat, ddp": ("ddp", [[[200], [0, 101]], [[1, 100], [201]]]),
    "chat, fsdp2": ("fsdp2", [[[200], [0, 101]], [[1, 100], [201]]]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("step") / "model", "small", spread=3.0)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    results = {}

    def run_once(name):
        if name not in results:
            results[name] = _run_step(name, folder, tmp_path_factory.mktemp("plan"))
        return results[name]

    return run_once


def _run_step(name: str, folder: Path, out: Path):
    mode, ranks = (PLANS | CHAT_PLANS)[name]
    plan = {"mode": mode, "ranks": ranks, "model": str(folder), "out": str(out), "clip": CLIP}
    plan["chat"] = name in CHAT_PLANS
    (out / "plan.json").write_text(json.dumps(plan))
    run_worker("step_worker.py", str(out / "plan.json"), processes=len(ranks), timeout=120)
    report = json.loads((out / "report.json").read_text())
    return load_file(out / "before.safetensors"), load_file(out / "after.safetensors"), report


@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", [name for name in PLANS if name != "one row"])
def test_the_step_has_the_same_gradient_and_report_as_one_row_on_one_process(run, name):
    check_same_step(run("one row"), run(name))


@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", [name for name in CHAT_PLANS if name != "chat, one row"])
def test_a_step_with_questions_has_the_same_gradient_and_report_also_if_a_row_has_no_image(run, name):
    check_same_step(run("chat, one row"), run(name))


def check_same_step(expected, actual):
    for whole, part in zip(expected[:2], actual[:2], strict=True):
        assert whole.keys() == part.keys()
        for weight in whole:
            scale = whole[weight].norm()
            assert (part[weight] - whole[weight]).norm() <= 1e-4 * scale + 1e-12, weight
    assert actual[2]["losses"] == pytest.approx(expected[2]["losses"], rel=1e-5, abs=1e-9)
    assert actual[2]["norm"] == pytest.approx(expected[2]["norm"], rel=1e-4)


@pytest.mark.timeout(480)
def test_clipping_acts_on_the_gradient_of_the_whole_step(run):
    before, after, report = run("one row")
    norm = sum(gradient.double().pow(2).sum() for gradient in before.values()).sqrt().item()
    assert report["norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > 2 * CLIP
    clipped = sum(gradient.double().pow(2).sum() for gradient in after.values()).sqrt().item()
    assert clipped == pytest.approx(CLIP, rel=1e-4)
