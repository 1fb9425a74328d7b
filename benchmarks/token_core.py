"""Compare the cost of correcting an answer with the bare libraries that it uses, on the real Qwen vocabulary.

    python benchmarks/token_core.py [--json] [--no-engine]

`parse` is a multiple of json.loads on the decoded text. `match` is a multiple of bare pycocotools and scipy on
the same shapes. `total` is parsing, matching and building the segment, as a share of the time in which vLLM's
CPU engine generates as many tokens with a tiny model (the time per token is measured on 8 sequences of 256
tokens). `policy` is a correction under the most expensive policy, as a multiple of the specified one, of an answer
that repeats three of ten objects. All are medians of repeated runs.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from pycocotools import mask as rle
from scipy.optimize import linear_sum_assignment
from tests.vocabularies import table

from coordexp.answers.correct import correct
from coordexp.answers.match import assign, match_objects
from coordexp.answers.parse import parse_rollout
from coordexp.answers.segment import serialise
from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.config.rollout import CorrectionPolicy
from coordexp.data import Geometry, TrueObject

SETTINGS = RolloutMatching()
DEAREST = RolloutMatching(
    correction=CorrectionPolicy(duplicates="remove", insertion="in_order", supervise="matched_with_desc")
)
SIZES = (10, 60, 500)
DESCS = ("red cup", "a man in a blue shirt", "dog", "traffic light", "left-most window of the house")


def make_scene(
    count: int, vocabulary: VocabularyTable, repeat: float = 0.0
) -> tuple[list[int], str, list[TrueObject]]:
    """Return a rollout that finds 90 % of the true objects, slightly shifted, its text, and the true objects. A
    share of what it finds is written twice."""
    chooser, repeater = random.Random(count), random.Random(count)
    truth, predicted = [], []
    for _ in range(count):
        x, y, w, h = (
            chooser.randint(0, 880),
            chooser.randint(0, 880),
            chooser.randint(20, 110),
            chooser.randint(20, 110),
        )
        desc = chooser.choice(DESCS)
        truth.append(TrueObject(desc, Geometry("bbox_2d", (x, y, x + w, y + h))))
        jitter = [min(999, max(0, v + chooser.randint(-3, 3))) for v in (x, y, x + w, y + h)]
        if chooser.random() < 0.9:
            predicted.append(TrueObject(desc, Geometry("bbox_2d", tuple(jitter))))
            if repeater.random() < repeat:
                predicted.append(
                    TrueObject(desc, Geometry("bbox_2d", (jitter[0], jitter[1], x + w - 1, y + h - 1)))
                )
    answer = serialise(predicted, after=b"{", first_number=1, order="desc_first", table=vocabulary)
    text = "{" + answer.text.decode()
    return [*vocabulary.encode(text.encode()), vocabulary.end_of_turn], text, truth


def medians_us(calls: dict[str, Callable[[], Any]], duration: float = 3.0) -> dict[str, float]:
    """Return the median microseconds of calls that take turns, so that other load on the machine affects all
    of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + duration
    while time.perf_counter() < end or len(times[next(iter(calls))]) < 7:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}


def match_bare(predicted: list[Geometry], true: list[Geometry]) -> None:
    scale = SETTINGS.maskiou_resolution / 1000
    size = SETTINGS.maskiou_resolution
    rings = [
        [
            [x1 * scale, y1 * scale, x2 * scale, y1 * scale, x2 * scale, y2 * scale, x1 * scale, y2 * scale]
            for x1, y1, x2, y2 in boxes
        ]
        for boxes in ([g.bins for g in predicted], [g.bins for g in true])
    ]
    left, right = (rle.frPyObjects(side, size, size) for side in rings)
    iou = np.asarray(rle.iou(left, right, [0] * len(right)))
    linear_sum_assignment(np.where(iou >= SETTINGS.maskiou_gate, -1.0 - iou, 0.0))


def measure(count: int, vocabulary: VocabularyTable) -> dict[str, float]:
    ids, text, truth = make_scene(count, vocabulary)
    shapes = [true.geometry for true in truth]

    repeating, _, _ = make_scene(count, vocabulary, repeat=0.3)

    def correct_answer(settings: RolloutMatching, answer: list[int]) -> None:
        correct((1, 2, 3), answer, truth, table=vocabulary, order="desc_first", settings=settings)

    predicted = parse_rollout(ids, vocabulary).shapes
    tokenizer = vocabulary.tokenizer
    iou = match_objects(predicted, shapes, SETTINGS).iou
    feasible = iou >= SETTINGS.maskiou_gate
    parsing = {
        "json_us": partial(json.loads, text),
        "decode_us": partial(tokenizer.decode, ids, skip_special_tokens=False),
        "parse_us": partial(parse_rollout, ids, vocabulary),
    }
    matching = {
        "bare_us": partial(match_bare, predicted, shapes),
        "match_us": partial(match_objects, predicted, shapes, SETTINGS),
        "assign_us": partial(assign, iou, feasible, SETTINGS.fp_cost + SETTINGS.fn_cost),
        "total_us": partial(correct_answer, SETTINGS, ids),
        "specified_us": partial(correct_answer, SETTINGS, repeating),
        "policy_us": partial(correct_answer, DEAREST, repeating),
    }
    return {"objects": count, "tokens": len(ids), **medians_us(parsing), **medians_us(matching)}


def measure_engine_us_per_token() -> float:
    """Return the time per generated token of vLLM's CPU engine, with a tiny model that has the real vocabulary."""
    from tests.engines import drawing, prompt, start_vllm, stop_vllm

    from coordexp.demo.model import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "m", "qwen", spread=6.0)
        from transformers import AutoProcessor
        from vllm import SamplingParams

        question = prompt(AutoProcessor.from_pretrained(model))
        engine = start_vllm(model)
        requests = [{"prompt": question, "multi_modal_data": {"image": drawing(seed)}} for seed in range(8)]
        greedy = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
        engine.generate(requests, greedy, use_tqdm=False)
        began = time.perf_counter()
        outputs = engine.generate(requests, greedy, use_tqdm=False)
        seconds = time.perf_counter() - began
        stop_vllm(engine)
    return seconds * 1e6 / sum(len(output.outputs[0].token_ids) for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-engine", action="store_true", help="leave out the share of generation time")
    options = parser.parse_args()
    rows = [measure(count, table("qwen")) for count in SIZES]
    per_token = None if options.no_engine else measure_engine_us_per_token()
    results: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = f"{row['objects']} objects"
        results[f"parse / json.loads, {name}"] = _goal(row["parse_us"] / row["json_us"], 5.0)
        results[f"match / bare, {name}"] = _goal(row["match_us"] / row["bare_us"], 1.5)
        results[f"policy / specified, {name}"] = _goal(row["policy_us"] / row["specified_us"], 2.0)
        if per_token:
            results[f"total / generation, {name}"] = _goal(row["total_us"] / (per_token * row["tokens"]), 0.01)
    small, large = rows[1], rows[2]
    growth = (large["total_us"] - large["assign_us"]) / (small["total_us"] - small["assign_us"])
    results["growth 60 to 500 objects without the assignment, per object"] = _goal(growth / (500 / 60), 1.2)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for row in rows:
        print("  ".join(f"{key} {value:,.0f}" for key, value in row.items()))
    if per_token:
        print(f"vLLM on this CPU: {per_token:,.0f} us per token")
    for name, result in results.items():
        verdict = "ok" if result["ok"] else "not reached"
        print(f"{name:<62} {result['value']:>8.4g}  goal <= {result['goal']:<5g} {verdict}")


def _goal(value: float, goal: float) -> dict[str, Any]:
    return {"value": round(value, 5), "goal": goal, "ok": value <= goal}


if __name__ == "__main__":
    main()
