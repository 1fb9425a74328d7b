"""Compare answer formats, and orders of objects, on drawn scenes: the same start, samples and steps for each, with
several seeds.

    python tools/compare_answers.py run --out DIR --arm native --seed 0
    python tools/compare_answers.py run --out DIR --arm large_first --objects 4
    python tools/compare_answers.py table --out DIR

Run it from the root of the repository. `run` makes the data if it is missing. What is complete is not repeated.
All runs of a folder need the same `--objects` and `--steps`.

Every run of a seed starts from the same weights: the vision tower of examples/scenes-cpu/model, which has seen
such scenes, and a language model with new random weights. Neither format has a better start: neighbouring
coordinate tokens have similar rows, as after `coordexp model add-coords --ordinal`, and so do neighbouring digits,
which a pretrained model has learned. One small tokenizer has the words of both formats as single tokens.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from coordexp.answers.expand import ordinal_rows
from coordexp.answers.formats import AnswerFormat, load_format
from coordexp.answers.table import VocabularyTable
from coordexp.data import BINS, RecordFile
from coordexp.demo.model import COORD_DEVIATION, SCENES, make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.evaluate import ImageAnswer, evaluate, read_predictions, read_truth, write_predictions
from coordexp.evaluate.answer import build_answer
from coordexp.evaluate.report import count_by_image
from coordexp.families import load_model
from coordexp.files import write_json
from coordexp.intervals import bootstrap_differences
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/demo/scenes-cpu.yaml"
VISION = ROOT / "examples/scenes-cpu/model/model.safetensors"
TRAIN, HELD_OUT, OBJECTS = 12_000, 300, 2
STEPS, BATCH, ONE_OBJECT_SAMPLES = 1000, 16, 4800
ANSWER_BATCH, TOKENS_PER_OBJECT = 20, 60
BASE = "coord_tokens"  # in the order of the file, which is the reading order
ORDERS = ("left_to_right", "large_first", "random")

TOKEN_CE = {
    "name": "token_ce",
    "enabled": True,
    "weight": 1.0,
    "channels": ["A"],
    "config": {"struct_ce_weight": 1.0, "desc_ce_weight": 2.0, "eos_ce_weight": 1.0},
}
CROSS_ENTROPY = {"coord_ce_weight": 1.0, "soft_ce_weight": 0.0, "w1_weight": 0.0, "coord_gate_weight": 1.0}


def describe_pipeline(arm: str) -> dict[str, Any] | None:
    """Return the objective of an arm, or None for that of the config: soft targets and W1."""
    if arm == BASE or arm in ORDERS:
        return None
    if arm == "native":
        module = {"name": "number_ce", "config": {"ce_weight": 1.0}}
    else:  # cross entropy of the true bin, over the whole vocabulary: what number_ce is for digits
        shape = {"text_gate_weight": 0.0, "temperature": 1.0, "target_sigma": 16.0, "target_truncate": None}
        module = {"name": "coord_reg", "config": CROSS_ENTROPY | shape}
    return {
        "objective": [TOKEN_CE, {"enabled": True, "weight": 1.0, "channels": ["A"]} | module],
        "diagnostics": [],
    }


ARMS = (BASE, "coord_tokens_ce", "native", *ORDERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arm", choices=ARMS, default="native")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--objects", type=int, default=OBJECTS, help="The largest number of objects of a scene.")
    options = parser.parse_args()
    if options.command == "run":
        make_data(options.out, options.objects)
        run(options.out, options.arm, options.seed, options.steps)
    else:
        print(write_table(options.out))


def make_data(out: Path, objects: int) -> None:
    if not (out / "data").exists():
        write_scenes(out / "data", SceneSettings(objects=(1, objects)), train=TRAIN, val=HELD_OUT, seed=0)


def make_start(out: Path, seed: int) -> Path:
    """Return the model that all arms of a seed start from."""
    folder = out / f"start-{seed}"
    if not folder.exists():
        make_model(folder, "small", native=True, seed=seed, spread=3.0, ordinal=True, size=SCENES)
        file, table = folder / "model.safetensors", VocabularyTable.from_folder(folder)
        weights, trained = load_file(file), load_file(VISION)
        weights |= {name: trained[name].float() for name in weights if ".visual." in name}
        (embedding,) = (weights[name] for name in weights if name.endswith("language_model.embed_tokens.weight"))
        digits = [table.byte_ids[byte] for byte in b"0123456789"]
        bins = torch.arange(10) * (BINS - 1) // 9
        mean = embedding[: table.first_coord].mean(0)
        embedding[digits] = ordinal_rows(embedding.shape[1], seed)[bins] * COORD_DEVIATION + mean
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def run(out: Path, arm: str, seed: int, steps: int) -> None:
    """Train one arm with one seed, and answer the held-out images. Write the numbers to result.json."""
    folder = out / f"{arm}-{seed}"
    if (folder / "result.json").is_file():
        return
    tree: dict[str, Any] = {
        "extends": [os.path.relpath(CONFIG, folder)],
        "model": {"path": str(make_start(out, seed))},
        "custom": {
            "train_jsonl": str(out / "data/train.jsonl"),
            "val_jsonl": str(out / "data/val.jsonl"),
            "answer_format": "native" if arm == "native" else "coord_tokens",
            "object_order": arm if arm in ORDERS else "file",
            "curriculum": [{"objects": 1, "samples": ONE_OBJECT_SAMPLES}],
        },
        "training": {
            "output_dir": str(folder / "run"),
            "seed": 100 + seed,
            "max_steps": steps,
            "per_device_train_batch_size": BATCH,
            "eval_strategy": "no",
            "save_steps": steps,
            "report_to": "none",
        },
    }
    if pipeline := describe_pipeline(arm):
        tree["stage1"] = {"pipeline": pipeline}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "coordexp", "train", "--config", str(folder / "config.yaml")]
    if (folder / "run").exists():
        command.append("--resume")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    training = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    write_json(folder / "result.json", answer(out, folder, steps) | {"training_cpu_s": training})


def answer(out: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Answer the held-out images, write the predictions, and return what was measured."""
    torch.set_num_threads(1)
    model_folder = folder / f"run/checkpoint-{steps}"
    answers, records = load_format(model_folder), RecordFile(out / "data/val.jsonl")
    prompts = PromptBuilder(AutoProcessor.from_pretrained(model_folder), "Detect all objects.")
    model = load_model(model_folder, dtype=torch.float32)
    backend = HuggingFaceBackend(lambda: model, prompts, answers.table, ANSWER_BATCH)
    truth = read_truth(records)
    decode = Decode.greedy(TOKENS_PER_OBJECT * max(len(record.objects) for _, record in truth))
    requests = [Request(ImageRef.of(records, record), decode) for _, record in truth]
    began = time.process_time()
    rollouts = backend.generate(requests)
    seconds = time.process_time() - began
    given = [
        build_answer(number, record.image, rollout, answers)
        for (number, record), rollout in zip(truth, rollouts, strict=True)
    ]
    write_predictions(folder / "preds.json", given, truth)
    whole = [score_all_tokens(answer, rollout, answers) for answer, rollout in zip(given, rollouts, strict=True)]
    report = evaluate(truth, given).metrics()
    objects, true = (
        sum(len(answer.objects) for answer in given),
        sum(len(record.objects) for _, record in truth),
    )
    written = sum(len(answers.write((), record.true_objects())) for _, record in truth)
    return {
        **report,
        "ap_all_tokens": evaluate(truth, whole).metrics().get("ap"),
        "cpu_s_per_image": seconds / len(truth),
        "tokens_per_image": sum(answer.tokens for answer in given) / len(truth),
        "tokens_per_object": sum(answer.tokens for answer in given) / max(1, objects),
        "true_tokens_per_object": written / true,
    }


def score_all_tokens(answer: ImageAnswer, rollout: Rollout, answers: AnswerFormat) -> ImageAnswer:
    """Return the answer with scores that include the tokens of coordinates, to compare rankings."""
    tokens = answers.read(rollout.ids).tokens
    objects = tuple(
        item if item.reason else replace(item, score=math.exp(sum(rollout.logprobs[k] for k in where)))
        for item, where in zip(answer.objects, tokens, strict=True)
    )
    return replace(answer, objects=objects)


COLUMNS = {
    "F1@0.5": "f1_50",
    "F1@0.5, any class": "f1_50_any_class",
    "AP": "ap",
    "AP, coordinates in the score": "ap_all_tokens",
    "tokens per image": "tokens_per_image",
    "tokens per true object": "true_tokens_per_object",
    "CPU seconds per image": "cpu_s_per_image",
    "CPU minutes of training": "training_cpu_s",
}


def write_table(out: Path) -> str:
    """Return means and standard deviations over the seeds, and differences with intervals, in Markdown."""
    truth = read_truth(RecordFile(out / "data/val.jsonl"))
    lines = [_join("", *COLUMNS, "seeds"), _join(*["---"] * (len(COLUMNS) + 2))]
    counts = {}
    for arm in ARMS:
        folders = sorted(path.parent for path in out.glob(f"{arm}-[0-9]*/result.json"))
        if not folders:
            continue
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        cells = [_spread(results, name) for name in COLUMNS.values()]
        lines.append(_join(arm, *cells, ", ".join(folder.name.rpartition("-")[2] for folder in folders)))
        counts[arm] = [count_by_image(truth, read_predictions(folder / "preds.json", truth)) for folder in folders]
    for arm, own in counts.items():
        if arm != BASE and BASE in counts and len(own) == len(counts[BASE]):
            for difference in bootstrap_differences(counts[BASE], own):
                if difference.name in ("f1_50", "f1_50_any_class"):
                    lines.append(f"\n{arm} - {BASE}, {difference.name}: {asdict(difference)}")
    return "\n".join(lines)


def _spread(results: Sequence[dict[str, Any]], name: str) -> str:
    values = [result[name] / (60 if name.endswith("cpu_s") else 1) for result in results]
    mean = statistics.mean(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {statistics.stdev(values):.3f}"


def _join(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
