"""Compare the cost of the objective and of packing with simpler alternatives, on this machine.

python benchmarks/objective.py            a table
python benchmarks/objective.py --json     {name: {"value": x, "goal": y, "ok": true}}

There are five comparisons, each a ratio within one run:

- The loss with logits at supervised positions only, compared with the same loss from the logits of all positions:
  bfloat16, 16,000 tokens, 7 % supervised, vocabulary 152,704. Each run is a process of its own. Its memory is the
  growth of its peak resident size.
- The loss with logits in chunks, compared with the same loss from the logits of all supervised positions in
  float32, which is what accelerate makes of a model's outputs: 16,000 tokens, 4,000 supervised, the rest as above.
- A training step on a packed row, compared with a padded batch of transformers with the same segments and loss.
- A training step with the whole objective, compared with the same step with `cross_entropy` at the same positions.
- The fill of rows from a stream of rollout lengths, compared with first in, first out.
"""

import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from ratios import at_least, at_most, main, medians, without_goal
from rich.progress import Progress
from tests.rows import DIAGNOSTICS, MATCHING, Tiny, on_both_channels, settings
from tests.streams import closed_when_full, first_in_first_out, rollout_lengths, stream
from tests.unit.config.trees import COORD_REG, TOKEN_CE

from coordexp.answers.correct import correct
from coordexp.answers.segment import Role
from coordexp.data import Geometry, TrueObject
from coordexp.demo.model import Size, make_model
from coordexp.objective.carry import Example, select
from coordexp.objective.collate import Row, Supervision
from coordexp.objective.pipeline import Objective
from coordexp.objective.split import Split, SplittingHead

VOCABULARY, TOKENS, SUPERVISED, HIDDEN = 152_704, 16_000, 0.07, 64
MANY_SUPERVISED = 0.25
PROJECTIONS = {"all": 1, "supervised": 1, "float32": 3, "chunks": 3}  # how often each is measured
FIRST_COORD = VOCABULARY - 1_061
DECLARED = (on_both_channels(TOKEN_CE, desc_ce_weight=1.0), on_both_channels(COORD_REG))


class Projection(torch.nn.Module):
    """A vocabulary projection without a model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def measure_projection(where: str) -> dict[str, float]:
    """Compute one loss with its backward pass in this process: from the logits of all positions, from those of the
    supervised ones, from these in float32, or in chunks. The last two have more supervised positions."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    model = Projection()
    share = SUPERVISED if where in ("all", "supervised") else MANY_SUPERVISED
    kept = torch.randperm(TOKENS)[: int(TOKENS * share)].sort().values
    s, objective = _supervision(len(kept)), Objective(settings(*DECLARED), FIRST_COORD)
    splitting, request = SplittingHead(model), objective.request_split(s)
    counts = torch.full((5,), len(kept))
    memory_before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if where == "chunks":
        with splitting.splitting(request):
            split = Split(model.head(hidden[kept][None])[0], request.temperatures)
    else:
        logits = model.head(hidden)[kept] if where == "all" else model.head(hidden[kept])
        split = Split.of_logits(logits.float() if where == "float32" else logits, request)
    objective.loss(objective.measure(split, s), counts).backward()
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before
    return {"seconds": seconds, "gigabytes": memory / 1e6}


def _supervision(count: int) -> Supervision:
    """Return supervision with one third coordinates and the rest text, as in corrected answers."""
    generator = torch.Generator().manual_seed(1)
    coord = torch.rand(count, generator=generator) < 0.33
    bins = torch.randint(0, 1000, (count,), generator=generator)
    text = torch.randint(0, FIRST_COORD, (count,), generator=generator)
    return Supervision(
        ids=torch.where(coord, FIRST_COORD + bins, text),
        roles=torch.where(coord, int(Role.tail_coord), int(Role.tail_structure)).to(torch.int8),
        sides=torch.zeros(count, dtype=torch.int8),
        coord_targets=torch.where(coord, bins.float(), torch.nan),
        weights=torch.ones(count),
        channels=torch.ones(count, dtype=torch.int8),
    )


def run_projection(where: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--projection", where]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return json.loads(result.stdout)


def make_long_example(tiny: Tiny, length: int, seed: int) -> Example:
    """Return a segment of about `length` tokens: a rollout with false positives, and boxes that it missed."""
    chooser = random.Random(seed)
    image = f"{seed}x128"
    prompt_ids = tiny.prompt_ids(image)
    text, ids = "{", []
    for number in range(1, 10_000):
        x, y = chooser.randrange(500, 900), chooser.randrange(500, 900)
        coords = ", ".join(f"<|coord_{bin}|>" for bin in (x, y, x + 50, y + 50))
        text += f'"object_{number}": {{"desc": "thing", "bbox_2d": [{coords}]}}, '
        if number % 8 == 0:
            ids = tiny.table.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) + len(prompt_ids) >= length:
                break
    missed = max(1, int(length * SUPERVISED / 30))  # an object is about 30 tokens
    truth = [TrueObject("cup", Geometry("bbox_2d", (10 + k, 20, 40 + k, 50))) for k in range(missed)]
    correction = correct(prompt_ids, ids, truth, table=tiny.table, order="desc_first", settings=MATCHING)
    return Example(correction.segment, image, (128, 128), "B")


def fill_row(tiny: Tiny, capacity: int) -> list[Example]:
    lengths = [length for length in rollout_lengths(40, seed=2) if length < capacity]
    return [make_long_example(tiny, lengths[i], i) for i in select(lengths, capacity)]


def run_packed_step(tiny: Tiny, row: Row) -> None:
    measures = tiny.measure(tiny.logits(row), row.supervision)
    tiny.objective.loss(measures, sum(span.counts for span in row.spans)).backward()
    tiny.model.zero_grad()


def run_bare_step(tiny: Tiny, row: Row) -> None:
    torch.nn.functional.cross_entropy(tiny.logits(row), row.supervision.ids).backward()
    tiny.model.zero_grad()


def run_padded_step(tiny: Tiny, examples: list[Example], inputs: dict[str, Any], row: Row) -> None:
    """Compute the same loss at the same positions. Only the batch is different."""
    hidden = tiny.model.model(**inputs).last_hidden_state
    flat = torch.cat([hidden[k, : len(example)] for k, example in enumerate(examples)])
    logits = tiny.model.lm_head(flat[row.inputs["logits_to_keep"]])
    tiny.objective.loss(tiny.measure(logits, row.supervision), sum(span.counts for span in row.spans)).backward()
    tiny.model.zero_grad()


def measure(progress: Progress) -> dict[str, dict[str, Any]]:
    task = progress.add_task("projection", total=4)
    runs = {where: [run_projection(where) for _ in range(repeats)] for where, repeats in PROJECTIONS.items()}
    middle = {
        where: {key: statistics.median(result[key] for result in results) for key in ("seconds", "gigabytes")}
        for where, results in runs.items()
    }
    results = {
        f"all positions / supervised ones, {key}": at_least(middle["all"][key] / middle["supervised"][key], goal)
        for key, goal in (("gigabytes", 6.0), ("seconds", 4.0))
    }
    results |= {
        f"in chunks / float32 at once, 4,000 positions, {key}": at_most(
            middle["chunks"][key] / middle["float32"][key], goal
        )
        for key, goal in (("gigabytes", 0.2), ("seconds", 1.2))
    }
    progress.update(task, advance=1, description="packed against padded")
    with tempfile.TemporaryDirectory() as folder:
        size = Size(max_positions=TOKENS)
        small = Tiny(make_model(Path(folder) / "small", "small", size=size), settings(*DECLARED))
        padded = Tiny(Path(folder) / "small", settings(*DECLARED), attention="sdpa")
        examples = fill_row(small, TOKENS)
        row, inputs = small.collate(examples), padded.pad(examples)
        share = len(row.supervision.ids) / row.inputs["input_ids"].shape[1]
        times = medians(
            {
                "packed": partial(run_packed_step, small, row),
                "padded": partial(run_padded_step, padded, examples, inputs, row),
            },
            repeats=3,
        )
        name = f"padded / packed step, {len(examples)} segments, {share:.0%} supervised"
        results[name] = at_least(times["padded"] / times["packed"], 1.5)
        progress.update(task, advance=1, description="objective against cross_entropy")
        whole = settings(*DECLARED, diagnostics=DIAGNOSTICS)
        large = Tiny(make_model(Path(folder) / "qwen", "qwen", size=size), whole)
        row = large.collate(fill_row(large, TOKENS))
        times = medians({"ours": partial(run_packed_step, large, row), "bare": partial(run_bare_step, large, row)})
        results["whole objective / cross_entropy, step"] = at_most(times["ours"] / times["bare"], 1.1)
    progress.update(task, advance=1, description="rows from a stream")
    lengths = rollout_lengths(10_000, seed=4)
    ours, fifo = stream(lengths, select), stream(lengths, first_in_first_out)
    results["fill"] = at_least(float(np.mean(ours.fills)), 0.97)
    results["fill by first in first out with the same buffer"] = without_goal(float(np.mean(fifo.fills)))
    results["fill by first in first out without a buffer"] = without_goal(
        float(np.mean(closed_when_full(lengths)))
    )
    results["rows that a segment waits at most"] = at_most(max(ours.waits), 64)
    progress.update(task, advance=1)
    return results


if __name__ == "__main__":
    main(
        __doc__,
        measure,
        "--projection",
        {where: partial(measure_projection, where) for where in PROJECTIONS},
    )
