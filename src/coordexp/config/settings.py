"""All settings of a run, as one frozen tree. Every key a file may have is a field here or below."""

from typing import Annotated, Literal

from pydantic import Field

from coordexp.config.pipeline import Channel, Pipeline
from coordexp.config.rollout import RolloutContract, RolloutMatching
from coordexp.config.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    Text,
    from_list,
    from_null,
)
from coordexp.config.training_arguments import TransformersArguments

Variant = Literal["stage1_sft", "stage2_rollout_aligned", "stage2_two_channel"]

CHANNELS_OF: dict[Variant, frozenset[Channel]] = {
    "stage1_sft": frozenset({"A"}),
    "stage2_rollout_aligned": frozenset({"B"}),
    "stage2_two_channel": frozenset({"A", "B"}),
}


class Adapter(Section):
    type: Literal["lora"] = Field("lora", description="Kind of adapter.")
    rank: PositiveInt = Field(32, description="Rank of the low-rank update.")
    alpha: PositiveInt = Field(64, description="The update is scaled by alpha / rank.")
    dropout: Fraction = Field(0.0, description="Dropout on the adapter's input.")
    dora: bool = Field(False, description="Weight-decomposed LoRA. Syncs to vLLM as merged weights only.")
    targets: Text = Field(
        "all-linear", description="Modules to adapt: `all-linear`, or a regular expression on module names."
    )
    train_coord_rows: bool = Field(
        True,
        description="Train the rows of the coordinate tokens beside the adapter. false trains the adapter alone, "
        "for a checkpoint whose rows have been trained before; only so can adapters be sent alone (`sync.mode`).",
    )


class Model(Section):
    path: Text = Field(
        description="A Hugging Face folder with a Qwen3-VL whose tokenizer has the 1,000 coordinate tokens.",
        examples=["checkpoints/qwen3-vl-4b-coord"],
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Type of the weights in the learner and in the rollout engine."
    )
    adapter: Adapter | None = Field(
        None,
        description="Train an adapter instead of all weights. null: all weights.",
        examples=[{"type": "lora", "rank": 32, "alpha": 64}],
    )


class CurriculumStage(Section):
    objects: PositiveInt = Field(description="Only records with at most so many objects.", examples=[1])
    samples: PositiveInt = Field(description="For so many samples, over all ranks.", examples=[8000])


class Custom(Section):
    trainer_variant: Variant = Field(
        "stage1_sft",
        description="Which trainer runs: supervised on ground truth, on corrected rollouts, or both in turn.",
    )
    train_jsonl: Text = Field(
        description="Training records, one JSON object a line.", examples=["data/train.jsonl"]
    )
    val_jsonl: Text | None = Field(
        None, description="Held-out records, for evaluation during training.", examples=["data/val.jsonl"]
    )
    eval_samples: PositiveInt | None = Field(
        None,
        description="Evaluate on at most so many of the held-out records: evenly spaced over the file, the same "
        "ones every time. null: all.",
        examples=[500],
    )
    prompt: Text = Field(
        "Detect all objects.", description="The question that goes with every picture, in training and after it."
    )
    curriculum: Annotated[tuple[CurriculumStage, ...], from_list] = Field(
        (),
        description="What training begins with, one stage after the other; after them, all records.",
        examples=[[{"objects": 1, "samples": 8000}]],
    )
    object_field_order: Literal["desc_first", "geometry_first"] = Field(
        "desc_first", description="Order of the two fields of an object in what the model is taught to write."
    )


class Training(TransformersArguments):
    # Required here; optional in transformers, which would write to `trainer_output`.
    output_dir: Text = Field(
        description="Folder for checkpoints, metrics and the resolved settings.", examples=["runs/stage2"]
    )
    # Bounds that transformers checks late or not at all.
    per_device_train_batch_size: PositiveInt = Field(8, description="Samples per device and micro-step.")
    per_device_eval_batch_size: PositiveInt = Field(
        8,
        description="Without effect: `rollout_matching.decode_batch_size` sets how many answers evaluation "
        "generates at once.",
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="Micro-steps per optimizer step.")
    learning_rate: NonNegativeFloat = Field(5e-05, description="The initial learning rate for the optimizer.")
    dataloader_num_workers: NonNegativeInt = Field(
        0, description="Threads per rank that read images. 0: images are read one after the other."
    )
    include_num_input_tokens_seen: bool | Literal["all", "non_padding", "no"] = Field(
        "no", description="Log the number of tokens trained on; true, all and non_padding are the same on rows."
    )
    hub_private_repo: bool | None = Field(
        None, description="Whether the Space of `trackio_space_id` is private. null: the default of its owner."
    )
    packing: bool = Field(False, description="Join several answers into one row of up to `global_max_length`.")
    packing_buffer: PositiveInt = Field(
        256,
        description="Segments that may wait for a row, per rank. With `packing`, at least "
        "`per_device_train_batch_size`; the run stops when more would wait.",
    )
    packing_min_fill_ratio: Fraction = Field(
        0.85,
        description="Warn when the rows between two log lines are filled less than this on average; once, until "
        "they are filled enough again.",
    )
    packing_drop_last: bool = Field(
        True, description="Leave what still waits at the end untrained. Must be true with `packing`."
    )


# The keys of `training` that are not transformers'.
PACKING_KEYS = ("packing", "packing_buffer", "packing_min_fill_ratio", "packing_drop_last")


class Template(Section):
    max_length: PositiveInt | None = Field(
        None, description="The same as `global_max_length`, under the name other tools use.", examples=[16000]
    )


class Stage1(Section):
    pipeline: Pipeline | None = Field(
        None, description="The declared objective of `stage1_sft`, which has no default one."
    )


class Stage2(Section):
    b_ratio: Fraction | None = Field(
        None,
        description="Share of rollout steps (channel B) in `stage2_two_channel`, which requires it.",
        examples=[0.5],
    )
    dump_every: PositiveInt | None = Field(
        100,
        description="Of every so many steps, write whole examples of the first one with rollouts to `dumps` in "
        "the run folder, with what the model said of them when it was trained on them, for people and for "
        "`coordexp replay`. The pictures of the first dump are followed: every later answer to them is written "
        "too. null: never.",
    )
    dump_samples: PositiveInt = Field(
        4, description="Examples of a step that are dumped, and pictures that are followed, at most."
    )


class Settings(Section):
    model: Model = Field(description="The model that is trained.")
    custom: Custom = Field(description="What is trained on which data.")
    global_max_length: PositiveInt | None = Field(
        None,
        description="Longest sequence, and the most tokens of one row, packed or not. Unset: "
        "`template.max_length`. One of the two is required.",
        examples=[16000],
    )
    template: Annotated[Template, from_null] = Field(
        default_factory=Template, description="Encoding of conversations."
    )
    training: Training = Field(
        description="The `transformers.TrainingArguments` that have an effect, by their own names, and packing."
    )
    stage1: Annotated[Stage1, from_null] = Field(
        default_factory=Stage1, description="Supervised training on ground truth."
    )
    stage2: Annotated[Stage2, from_null] = Field(
        default_factory=Stage2, description="The mix of ground-truth and rollout steps."
    )
    rollout_matching: Annotated[RolloutMatching, from_null] = Field(
        default_factory=RolloutMatching, description="Rollouts: generation, matching, objective."
    )

    @property
    def uses_rollouts(self) -> bool:
        return self.custom.trainer_variant != "stage1_sft"

    @property
    def pipeline_path(self) -> str:
        """Where the objective of the variant that runs is declared."""
        return "rollout_matching.pipeline" if self.uses_rollouts else "stage1.pipeline"

    @property
    def pipeline(self) -> Pipeline | None:
        return self.rollout_matching.pipeline if self.uses_rollouts else self.stage1.pipeline

    @property
    def rollout_matching_cfg(self) -> RolloutContract:
        """The contract of rollout-aware trainers. Needs settings from the loader, which has derived the length."""
        assert self.global_max_length is not None, "settings that did not come from the loader"
        packing = {name: getattr(self.training, name) for name in PACKING_KEYS}
        return RolloutContract(**dict(self.rollout_matching), **packing, packing_length=self.global_max_length)

    @property
    def channels(self) -> frozenset[Channel]:
        """The channels that get any step."""
        running = CHANNELS_OF[self.custom.trainer_variant]
        without = {0.0: "B", 1.0: "A"}.get(self.stage2.b_ratio) if self.stage2.b_ratio is not None else None
        return running - {without} if len(running) > 1 else running
