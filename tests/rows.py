"""Real examples for the tiny Qwen3-VL: drawn images, partly right rollouts, and their corrected answers."""

import functools
import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.config import RolloutMatching, Settings, parse_settings
from coordexp.correction import build_segment, match_objects, parse_rollout
from coordexp.data import Geometry, TrueObject
from coordexp.demo.generate import drawing, prompt
from coordexp.objective import Objective
from coordexp.pack import Example
from coordexp.pack.attention import attention_for
from coordexp.pack.collate import Collator, Row
from coordexp.vocab import VocabularyTable
from tests.rollouts import random_shape, random_truth
from tests.unit.config.trees import BBOX_GEO, COORD_DIAG, COORD_REG, TOKEN_CE, stage2

MATCHING = RolloutMatching()
SIDES = (64, 96, 128)


def settings(*objective: dict[str, Any], diagnostics: Sequence[dict[str, Any]] = (), **changes: Any) -> Settings:
    """Stage-2 settings for both channels, with these modules, or with all of them."""
    modules = objective or (every(TOKEN_CE, desc_ce_weight=0.5), every(COORD_REG), every(BBOX_GEO))
    pipeline = {"objective": list(modules), "diagnostics": list(diagnostics)}
    both = {"custom__trainer_variant": "stage2_two_channel", "stage2__b_ratio": 0.5}
    return parse_settings(stage2(rollout_matching__pipeline=pipeline, **(both | changes))).settings


def every(module: dict[str, Any], **config: Any) -> dict[str, Any]:
    """The module on both channels, with changes to its config."""
    found = deepcopy(module) | {"channels": ["A", "B"]}
    found["config"] |= config
    return found


DIAGNOSTICS = (every(COORD_DIAG),)


def _partly_right(chooser: random.Random, truth: Sequence[TrueObject]) -> str:
    """The last true object a little off, some of the others, and one that is not there."""
    found = [true.geometry for true in truth[:-1] if chooser.random() < 0.5]
    found += [Geometry("bbox_2d", (110, 205, 395, 480)), random_shape(chooser)]
    entries = []
    for k, shape in enumerate(found, start=1):
        coords = ", ".join(f"<|coord_{bin}|>" for bin in shape.bins)
        entries.append(f'"object_{k}": {{"desc": "thing", "{shape.kind}": [{coords}]}}')
    return "{" + ", ".join(entries) + "}"


class Tiny:
    """A tiny model with its processor, and examples made for it."""

    def __init__(self, folder: Path, objective_settings: Settings | None = None, attention: Any = None) -> None:
        torch.manual_seed(0)
        attention = attention or attention_for(torch.device("cpu"))
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )
        self.processor = AutoProcessor.from_pretrained(folder)
        self.table = VocabularyTable.from_folder(folder)
        self.objective = Objective(
            objective_settings or settings(diagnostics=DIAGNOSTICS), first_coord=self.table.first_coord
        )
        self.collate = Collator.for_model(self.model, self.pixels, self.objective.roles())

    @functools.cache  # noqa: B019
    def _encoded(self, image: str) -> Any:
        seed, side = map(int, image.split("x"))
        picture = drawing(seed, side).resize((side, side + 32 * (seed % 3)))
        return self.processor(text=[prompt(self.processor)], images=[picture], return_tensors="pt")

    def pixels(self, image: str, size: tuple[int, int] = (0, 0)) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = self._encoded(image)
        return encoded["pixel_values"], encoded["image_grid_thw"]

    def prompt_ids(self, image: str) -> list[int]:
        return self._encoded(image)["input_ids"][0].tolist()

    def example(self, seed: int, channel: str = "B") -> Example:
        chooser = random.Random(seed)
        image = f"{seed}x{SIDES[seed % 3]}"
        truth = [*random_truth(chooser), TrueObject("cup", Geometry("bbox_2d", (100, 200, 400, 500 + seed)))]
        text = "" if channel == "A" else _partly_right(chooser, truth)
        ids = self.table.tokenizer.encode(text, add_special_tokens=False).ids
        parsed = parse_rollout(ids, self.table)
        match = match_objects([o.geometry for o in parsed.valid], [o.geometry for o in truth], MATCHING)
        segment = build_segment(
            self.prompt_ids(image), parsed, match, truth, table=self.table, order="desc_first", settings=MATCHING
        )
        return Example(segment, image, (0, 0), channel)

    def padded(self, examples: Sequence[Example]) -> dict[str, Any]:
        """The batch as transformers has it, padded on the right: nothing of our collation."""
        ids = torch.full((len(examples), max(map(len, examples))), self.table.end_of_turn)
        mask = torch.zeros_like(ids)
        for k, one in enumerate(examples):
            ids[k, : len(one)] = torch.from_numpy(one.segment.ids)
            mask[k, : len(one)] = 1
        images = [self.pixels(one.image) for one in examples]
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": (ids == self.model.config.image_token_id).int(),
            "pixel_values": torch.cat([patches for patches, _ in images]),
            "image_grid_thw": torch.cat([grid for _, grid in images]),
            "use_cache": False,
        }

    def logits(self, row: Row) -> torch.Tensor:
        return self.model(**row.inputs).logits[0]

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {name: weight.grad.clone() for name, weight in self.model.named_parameters()}
        self.model.zero_grad()
        return found
