"""Real examples for a tiny model: drawn images, partly right rollouts, and their corrections."""

import functools
import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor

from coordexp.answers.correct import correct
from coordexp.answers.segment import build_chat_segment
from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching, Settings, parse_settings
from coordexp.data import Geometry, TrueObject
from coordexp.families import load_model
from coordexp.objective.attention import attention_for
from coordexp.objective.carry import Example
from coordexp.objective.collate import Collator, Row, Supervision
from coordexp.objective.modules import Measure
from coordexp.objective.pipeline import Objective
from coordexp.objective.split import Split
from coordexp.rollout.prompt import PromptBuilder
from tests.engines import drawing, prompt
from tests.rollouts import random_shape, random_truth
from tests.unit.config.trees import BBOX_GEO, CHAT_CE, COORD_DIAG, COORD_REG, TOKEN_CE, stage2

MATCHING = RolloutMatching()
SIDES = (64, 96, 128)


def settings(*objective: dict[str, Any], diagnostics: Sequence[dict[str, Any]] = (), **changes: Any) -> Settings:
    """Return Stage 2 settings for both channels with these modules, or with all modules if none is given."""
    modules = objective or (
        on_both_channels(TOKEN_CE, desc_ce_weight=0.5),
        on_both_channels(COORD_REG),
        on_both_channels(BBOX_GEO),
    )
    pipeline = {"objective": list(modules), "diagnostics": list(diagnostics)}
    both = {"custom__trainer_variant": "stage2_two_channel", "stage2__b_ratio": 0.5}
    return parse_settings(stage2(rollout_matching__pipeline=pipeline, **(both | changes))).settings


def on_both_channels(module: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Return the declaration of a module on both channels, with changes to its config."""
    declared = deepcopy(module) | {"channels": ["A", "B"]}
    declared["config"] |= config
    return declared


def chat_settings() -> Settings:
    """Return settings with all modules, and the one for chat records."""
    detection = (on_both_channels(TOKEN_CE, desc_ce_weight=0.5), on_both_channels(COORD_REG))
    return settings(*detection, on_both_channels(BBOX_GEO), CHAT_CE, diagnostics=DIAGNOSTICS)


DIAGNOSTICS = (on_both_channels(COORD_DIAG),)


def _write_partly_right(chooser: random.Random, truth: Sequence[TrueObject]) -> str:
    """Return an answer with the last true object slightly shifted, some of the others, and a false positive."""
    shapes = [true.geometry for true in truth[:-1] if chooser.random() < 0.5]
    shapes += [Geometry("bbox_2d", (110, 205, 395, 480)), random_shape(chooser)]
    entries = []
    for k, shape in enumerate(shapes, start=1):
        coords = ", ".join(f"<|coord_{bin}|>" for bin in shape.bins)
        entries.append(f'"object_{k}": {{"desc": "thing", "{shape.kind}": [{coords}]}}')
    return "{" + ", ".join(entries) + "}"


def measure_logits(objective: Objective, logits: torch.Tensor, supervision: Supervision) -> dict[str, Measure]:
    """Return the measures of an objective from whole logits."""
    return objective.measure(Split.of_logits(logits, objective.request_split(supervision)), supervision)


class Tiny:
    """A tiny model with its processor, its objective, and examples for it."""

    def __init__(self, folder: Path, objective_settings: Settings | None = None, attention: Any = None) -> None:
        torch.manual_seed(0)
        attention = attention or attention_for(torch.device("cpu"), "float32")
        self.model = load_model(folder, dtype=torch.float32, attn_implementation=attention)
        self.processor = AutoProcessor.from_pretrained(folder)
        self.table = VocabularyTable.from_folder(folder)
        self.objective = Objective(
            objective_settings or settings(diagnostics=DIAGNOSTICS), first_coord=self.table.first_coord
        )
        self.collate = Collator.for_model(self.model, self.pixels, self.objective.roles())

    @functools.cache  # noqa: B019
    def _encode(self, image: str) -> Any:
        seed, side = map(int, image.split("x"))
        drawn = drawing(seed, side).resize((side, side + 32 * (seed % 3)))
        return self.processor(text=[prompt(self.processor)], images=[drawn], return_tensors="pt")

    def pixels(self, image: str, size: tuple[int, int] = (0, 0)) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = self._encode(image)
        return encoded["pixel_values"], encoded["image_grid_thw"]

    def prompt_ids(self, image: str) -> list[int]:
        return self._encode(image)["input_ids"][0].tolist()

    def example(self, seed: int, channel: str = "B") -> Example:
        chooser = random.Random(seed)
        image = f"{seed}x{SIDES[seed % 3]}"
        truth = [*random_truth(chooser), TrueObject("cup", Geometry("bbox_2d", (100, 200, 400, 500 + seed)))]
        text = "" if channel == "A" else _write_partly_right(chooser, truth)
        ids = self.table.tokenizer.encode(text, add_special_tokens=False).ids
        prompt_ids = self.prompt_ids(image)
        correction = correct(prompt_ids, ids, truth, table=self.table, order="desc_first", settings=MATCHING)
        return Example(correction.segment, image, (0, 0), channel)

    def chat(self, seed: int, *, has_image: bool) -> Example:
        """Return the example of a question and its answer."""
        image = f"{seed}x{SIDES[seed % 3]}" if has_image else None
        question = f"How many cups are on table {seed}?"
        prompts = PromptBuilder(self.processor, question)
        prompt_ids = self.prompt_ids(image) if image else prompts.text_ids(question)
        return Example(build_chat_segment(prompt_ids, f"there are {seed}", self.table), image, (0, 0), "A")

    def pad(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Return the batch in the form of transformers, padded on the right, without our collation."""
        ids = torch.full((len(examples), max(map(len, examples))), self.table.end_of_turn)
        mask = torch.zeros_like(ids)
        for k, example in enumerate(examples):
            ids[k, : len(example)] = torch.from_numpy(example.segment.ids)
            mask[k, : len(example)] = 1
        images = [self.pixels(example.image) for example in examples if example.image is not None]
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

    def measure(self, logits: torch.Tensor, supervision: Supervision) -> dict[str, Measure]:
        """Return the measures of the objective from whole logits."""
        return measure_logits(self.objective, logits, supervision)

    def gradients(self) -> dict[str, torch.Tensor]:
        gradients = {name: weight.grad.clone() for name, weight in self.model.named_parameters()}
        self.model.zero_grad()
        return gradients
