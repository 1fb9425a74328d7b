"""Run folders as training writes them, made by hand: settings, a manifest, metrics, evaluations."""

import hashlib
import json
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from coordexp.evaluate import write_predictions
from coordexp.pages.curves import Series, collect_series
from coordexp.pages.run_folder import STARTS, Run, validate
from coordexp.train.encode import StepIndex
from tests.dumped import TRUTH, dumping

TERMS = [
    {"term": "token_ce/struct_ce", "weight": 1.0, "channels": ["A", "B"], "divided_by": ["structure"]},
    {"term": "coord_reg/w1", "weight": 4.0, "channels": ["A", "B"], "divided_by": ["coord"]},
]


def settings(seed=1, output_dir="runs/one", **changes):
    """`changes` go into `training`."""
    training = {"output_dir": output_dir, "seed": seed, "data_seed": None, "run_name": None, "max_steps": 40}
    custom = {"trainer_variant": "stage2_rollout_aligned", "val_jsonl": "val.jsonl"}
    return {"custom": custom, "training": training | changes}


def manifest(**changes):
    objective = {"terms": TERMS, "idle": {"bbox_geo": "its weight is 0"}, "masked_desc": []}
    packages = {"coordexp": "0.1.0", "torch": "2.13.0"}
    start = {"command": ["coordexp", "train"], "files": ["a.yaml"], "python": "3.11.7", "packages": packages}
    return start | {"git": None, "data": {}, "objective": objective, "rollouts": {"backend": "hf"}} | changes


def lines(steps=10, rollouts=True, every=1):
    """Return one line per step, with a falling loss, and with rollouts in every `every`th step."""
    logged = []
    for step in range(1, steps + 1):
        line = {"step": step, "seconds": 2.0 * step, "loss": 5.0 / step, "grad_norm": 1.0, "learning_rate": 1e-3}
        line |= {"token_ce/struct_ce": 1.0 / step, "coord_reg/w1": 1.0 / step, "broken_logits": 0.0}
        line |= {"time/compute": 1.0, "time/pictures": 0.25, "time/step": 1.5, "tokens": 100.0}
        if rollouts and step % every == 0:
            line |= {"rollout/answers": 4.0, "rollout/cut_off": 0.0, "rollout/looped": 0.0, "match/recall": 0.5}
            line |= {"match/missed": 2.0, "parse/objects": 8.0, "parse/invalid": 0.0, "time/rollout": 0.25}
        logged.append(line)
    return logged


def evaluation_line(step, **values):
    return {"step": step, "seconds": 2.0 * step + 1} | {f"eval_{name}": value for name, value in values.items()}


END = {"step": 10, "seconds": 30.0, "train_runtime": 30.0}


def write_run(folder, logged=None, tree=None, starts=None, end=""):
    """`end` is written after the last line feed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resolved.yaml").write_text(yaml.safe_dump(tree or settings(output_dir=str(folder))))
    (folder / "run.json").write_text(json.dumps(starts or [manifest()]))
    text = "".join(json.dumps(line) + "\n" for line in (lines() if logged is None else logged))
    (folder / "metrics.jsonl").write_text(text + end)
    return folder


def write_data(file, truth):
    file.write_text("".join(f"{record.as_json()}\n" for _, record in truth))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"val": {"file": str(file), "records": len(truth), "sha256": digest}}


def write_evaluation(folder, step, truth, answers):
    write_predictions(folder / "evaluations" / f"step-{step}.json", answers, truth)


def make_run(logged=None, tree=None, starts=None, folder="runs/one"):
    """Return a run in memory that logged these lines."""
    validated = tuple(validate(STARTS, [manifest()] if starts is None else starts, "run.json"))
    log = collect_series([*lines(), END] if logged is None else logged, "metrics.jsonl")
    return Run(Path(folder), tree or settings(), validated, log)


def make_series(*pairs):
    steps, values = zip(*pairs, strict=True)
    return Series(np.array(steps, np.int64), np.array(values, float))


COORD_REG = {
    "name": "coord_reg",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {
        "soft_ce_weight": 1.0,
        "w1_weight": 0.0,
        "target_sigma": 8.0,
        "target_truncate": 24,
        "temperature": 1.0,
    },
}


def write_dumped_run(folder, steps=(0, 1), truth=TRUTH, **changes):
    """Write a run whose dumps have the examples of `tests.dumped` at these steps, with their images. `changes` are
    settings of the rollouts, or another script. To show other images, give their `truth`."""
    tree = settings(output_dir=str(folder)) | {"rollout_matching": {"pipeline": {"objective": [COORD_REG]}}}
    data = {"train": {"file": str(folder / "records.jsonl"), "records": len(truth), "sha256": ""}}
    write_run(folder, lines(), tree, [manifest(data=data)])
    for name in truth:
        Image.new("RGB", (64, 48), "teal").save(folder / name)
    encode, _ = dumping(folder, truth=truth, **changes)
    for step in steps:
        encode(range(len(truth)), StepIndex(step, 0))
    return folder
