"""All settings of a run, as one frozen tree. Every key that a file may have is a field here or in a section."""

import importlib.util
import math
from collections.abc import Sequence
from fractions import Fraction as Ratio
from typing import Annotated, Literal

from pydantic import Field

from coordexp.config.rollout import RolloutContract, RolloutMatching
from coordexp.config.sections import (
    Channel,
    Fraction,
    NonNegativeInt,
    Pipeline,
    PositiveFloat,
    PositiveInt,
    SettingsSection,
    Text,
    from_list,
    from_null,
)
from coordexp.config.training import PACKING_KEYS, Training

AnswerFormatName = Literal["coord_tokens", "native"]
Variant = Literal["stage1_sft", "stage2_rollout_aligned", "stage2_two_channel"]

CHANNELS_OF: dict[Variant, frozenset[Channel]] = {
    "stage1_sft": frozenset({"A"}),
    "stage2_rollout_aligned": frozenset({"B"}),
    "stage2_two_channel": frozenset({"A", "B"}),
}


class Adapter(SettingsSection):
    type: Literal["lora"] = "lora"
    """Kind of adapter."""
    rank: PositiveInt = 32
    """Rank of the low-rank update."""
    alpha: PositiveInt = 64
    """The update is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    dora: bool = False
    """Use DoRA, weight-decomposed LoRA. It can be sent to vLLM only as merged weights."""
    targets: Text = "all-linear"
    """Modules that get an adapter: `all-linear`, or a regular expression for module names."""
    train_coord_rows: bool = True
    """Train the embeddings of the coordinate tokens together with the adapter. false: only the adapter, if the
    checkpoint has trained embeddings already. Only then can a weight sync send adapters alone (`sync.mode`)."""


class Model(SettingsSection):
    path: Text = Field(examples=["checkpoints/qwen3-vl-4b-coord"])
    """Folder of a model in Hugging Face format, or its name on the hub. Its tokenizer has the 1,000 coordinate
    tokens, unless `custom.answer_format` is native."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the weights in the rollout engine, and of those that an adapter is trained on. Weights that are
    trained themselves are float32; `training.bf16` lets the learner compute with 16 bits."""
    max_pixels: PositiveInt | None = Field(None, examples=[1048576])
    """Largest number of pixels of an image. A larger image is scaled down, in training, rollouts and
    evaluation. A vLLM engine reserves memory for an image of this size. Unset: the limit of the checkpoint, which
    is 16,777,216 for Qwen3-VL."""
    min_pixels: PositiveInt | None = Field(None, examples=[65536])
    """Smallest number of pixels of an image. A smaller image is scaled up. Unset: the limit of the checkpoint."""
    freeze: Annotated[tuple[Literal["vision", "aligner"], ...], from_list] = Field((), examples=[["vision"]])
    """Parts that are not trained: `vision`, the vision tower, and `aligner`, the layers that map its output to the
    language model (mergers). With an adapter, these parts get none. `[]`: train all."""
    adapter: Adapter | None = Field(None, examples=[{"type": "lora", "rank": 32, "alpha": 64}])
    """Train an adapter instead of all weights. null: all weights."""

    @property
    def image_limits(self) -> dict[str, int]:
        """Return the limits that replace those of the checkpoint, by their names in an image processor."""
        limits = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        return {name: pixels for name, pixels in limits.items() if pixels is not None}


# A path, a glob pattern, or a list of these.
DataFiles = Annotated[Text | Annotated[tuple[Text, ...], Field(min_length=1)], from_list]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class TrainingData(SettingsSection):
    path: DataFiles = Field(examples=["data/part-*.jsonl"])
    """Files of this data set: a path, a glob pattern, or a list of these."""
    weight: PositiveFloat = 1.0
    """Share of the samples that come from this data set, in proportion to the other weights, whatever its size."""
    name: SetName | None = Field(None, examples=["shelves"])
    """Name of the data set in metrics and charts. Unset: `set_0`, `set_1` and so on, by its place in the list."""
    prompt: Text | None = None
    """Replaces `custom.prompt` for the records of this data set, in training and not in evaluation."""
    class_prompt: Text | None = None
    """Replaces `custom.class_prompt` for the records of this data set, in training."""
    expression_prompt: Text | None = None
    """Replaces `custom.expression_prompt` for the records of this data set, in training."""


class EvaluationData(SettingsSection):
    path: DataFiles = Field(examples=["questions/val.jsonl"])
    """Held-out chat records: a path, a glob pattern, or a list of these."""
    name: SetName | None = Field(None, examples=["questions"])
    """Name of the data set in its metric, `eval_accuracy_NAME`. Unset: `set_0`, `set_1` and so on."""
    max_new_tokens: PositiveInt = 32
    """Maximum number of tokens of an answer."""


class CurriculumStage(SettingsSection):
    objects: PositiveInt = Field(examples=[1])
    """Use only records with at most this many objects."""
    samples: PositiveInt = Field(examples=[8000])
    """Length of this stage in samples, over all ranks."""


ObjectOrder = Literal["file", "reading", "left_to_right", "large_first", "asked", "random"]


class ClassRequests(SettingsSection):
    rate: Fraction = 0.0
    """Share of the training samples without a request of their own that ask for a list of their classes
    (`class_prompt`) instead of all objects. The list is drawn anew in every step."""
    keep: Fraction = 0.5
    """Probability with which a class of the record is on the list. It has at least one."""


class Negatives(SettingsSection):
    rate: Fraction = 0.0
    """Share of the training samples with a list of classes that also ask for classes which the image does not
    show. They are drawn from the record's `exhaustive` classes, or else from the classes of other records,
    frequent ones often. Every object of a record must be labelled, at least of its `exhaustive` classes."""
    alone: Fraction = 0.25
    """Share of these samples that ask for nothing else. The answer is then empty."""
    most: PositiveInt = 3
    """Largest number of absent classes in a request."""
    seed: NonNegativeInt = 0
    """Seed of the draws of this section and of `class_requests`."""


class Custom(SettingsSection):
    trainer_variant: Variant = "stage1_sft"
    """What the model is trained on: the ground truth, corrected rollouts, or both in turn."""
    train_jsonl: DataFiles | None = Field(None, examples=["data/train.jsonl"])
    """Training records, one JSON object per line: a path, a glob pattern such as `data/part-*.jsonl`, or a list of
    these. Several files are one data set, in this order. This or `train_data` is required."""
    train_data: Annotated[tuple[TrainingData, ...], from_list] = Field(
        (), examples=[[{"path": "data/part-*.jsonl", "weight": 0.75}, {"path": "new.jsonl", "weight": 0.25}]]
    )
    """Several data sets, mixed by weight, instead of `train_jsonl`."""
    val_jsonl: DataFiles | None = Field(None, examples=["data/val.jsonl"])
    """Held-out records, for evaluation during training, in one or more files as in `train_jsonl`."""
    val_labels: Literal["complete", "incomplete"] = "complete"
    """Whether every object of the held-out images has a label. incomplete: a report calls no F1, precision or rate
    that takes an object without a label for a mistake better or worse."""
    eval_data: Annotated[tuple[EvaluationData, ...], from_list] = Field(
        (), examples=[[{"name": "questions", "path": "questions/val.jsonl"}]]
    )
    """Held-out chat records, for evaluation in training. `eval_accuracy_NAME` is the share of right answers."""
    eval_samples: PositiveInt | None = Field(None, examples=[500])
    """Evaluate on at most this many of the held-out records of `val_jsonl` and of each set of `eval_data`, the
    same every time. null: all."""
    eval_images: NonNegativeInt = 8
    """Images that each evaluation shows in TensorBoard and Weights & Biases (`training.report_to`), with true and
    predicted objects. They are the same every time. 0: none."""
    prompt: Text = "Detect all objects."
    """Text of the user's message beside every image that has no request of its own, in training and in prediction.
    In this and the other prompts, `{order}` stands for the words for `object_order`."""
    class_prompt: Text = "Detect all objects of these classes: {classes}."
    """Text for a record with `classes`, which replace `{classes}`."""
    expression_prompt: Text = "Detect {expression}."
    """Text for a record with an `expression`, which replaces `{expression}`."""
    class_requests: ClassRequests = Field(default_factory=ClassRequests)
    """Lists of classes that training draws for samples without one."""
    negatives: Negatives = Field(default_factory=Negatives)
    """Absent classes that training adds to lists of classes."""
    object_order: ObjectOrder = "file"
    """Order of the objects in the answers that the model learns to write: that of the file, `reading` (by the top
    edge, then the left one), `left_to_right`, `large_first`, `asked` (that of the classes that the record asks
    for, and that of the file among objects of one class), or `random`, which is drawn anew in every step."""
    broken_images: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, examples=[0.01])
    """Share of the training images that may be broken: missing, not decodable, or of another size than their
    records say. `quarantine.jsonl` in the run folder lists them. All images are then decoded twice. 0: the first
    broken image ends the run."""
    curriculum: Annotated[tuple[CurriculumStage, ...], from_list] = Field(
        (), examples=[[{"objects": 1, "samples": 8000}]]
    )
    """Stages that training begins with, one after the other. All records are used after the last one."""
    object_field_order: Literal["desc_first", "geometry_first"] = "desc_first"
    """Order of the two fields of an object in the answers that the model learns to write."""
    answer_format: AnswerFormatName = "coord_tokens"
    """How answers are written: with the 1,000 coordinate tokens, or as Qwen3-VL itself writes them (native), with
    numbers from 0 to 1000 in ordinary tokens, which only Stage 1 can train."""

    @property
    def train_sets(self) -> dict[str, tuple[str, ...]]:
        """Return the paths and glob patterns of each training data set, by the setting that has them."""
        if self.train_jsonl is not None:
            return {"custom.train_jsonl": _as_tuple(self.train_jsonl)}
        return {f"custom.train_data[{k}].path": _as_tuple(data.path) for k, data in enumerate(self.train_data)}

    @property
    def data_sets(self) -> dict[str, tuple[str, ...]]:
        """Return the paths and glob patterns of all data sets, by the setting that has them."""
        held_out = {} if self.val_jsonl is None else {"custom.val_jsonl": _as_tuple(self.val_jsonl)}
        chat = {f"custom.eval_data[{k}].path": _as_tuple(data.path) for k, data in enumerate(self.eval_data)}
        return self.train_sets | held_out | chat

    @property
    def set_names(self) -> tuple[str, ...]:
        """Return the names of the data sets of a mixture in metrics. A single data set has none."""
        return _name_sets(self.train_data) if len(self.train_data) > 1 else ()

    @property
    def eval_names(self) -> tuple[str, ...]:
        """Return the names of the sets of `eval_data`."""
        return _name_sets(self.eval_data)

    @property
    def shares(self) -> tuple[int, ...]:
        """Return the weights of `train_data` as whole numbers without a common divisor."""
        weights = [Ratio(str(data.weight)) for data in self.train_data]  # 0.1 is a tenth, not its nearest float
        scale = math.lcm(*(weight.denominator for weight in weights))
        numbers = [int(weight * scale) for weight in weights]
        return tuple(number // math.gcd(*numbers) for number in numbers)


def _name_sets(sets: Sequence[TrainingData | EvaluationData]) -> tuple[str, ...]:
    return tuple(data.name or f"set_{k}" for k, data in enumerate(sets))


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


class Template(SettingsSection):
    max_length: PositiveInt | None = Field(None, examples=[16000])
    """The same as `global_max_length`, under the name that other tools use."""


class Stage1(SettingsSection):
    pipeline: Pipeline | None = None
    """The declared objective of `stage1_sft`. Required in Stage 1: there is no default."""
    eval_backend: Literal["auto", "hf", "vllm"] = "auto"
    """Engine that answers the held-out images in Stage 1: transformers (hf), or vLLM as `rollout_matching.vllm`
    describes it. auto: vLLM if something is written there and vLLM is installed, else transformers. A colocated
    engine keeps its share of the GPU memory while the learner trains, unless `vllm.sleep` is true."""


class Stage2(SettingsSection):
    b_ratio: Fraction | None = Field(None, examples=[0.5])
    """Share of steps that train on rollouts (channel B). Required by `stage2_two_channel`."""
    max_staleness: Literal[0, 1, 2] = 0
    """The rollouts of a step may come from weights that are up to this many updates old. 0: servers and learner
    wait for each other in every step. 1 or 2: rollout servers make those of the next 1 or 2 steps meanwhile."""
    dump_every: PositiveInt | None = 100
    """Dump examples once in this many steps, at the first step with rollouts, for `coordexp inspect` and
    `coordexp replay`. null: never."""
    dump_samples: PositiveInt = 4
    """Maximum number of examples per dump."""


class Settings(SettingsSection):
    model: Model
    """The model that is trained."""
    custom: Custom
    """The kind of training and its data."""
    global_max_length: PositiveInt | None = Field(None, examples=[16000])
    """Maximum number of tokens in a sequence and in a row. This or `template.max_length` is required."""
    template: Annotated[Template, from_null] = Field(default_factory=Template)
    """Encoding of conversations."""
    training: Training
    """The arguments of `transformers.TrainingArguments` that have an effect, and packing."""
    stage1: Annotated[Stage1, from_null] = Field(default_factory=Stage1)
    """Supervised training on the ground truth."""
    stage2: Annotated[Stage2, from_null] = Field(default_factory=Stage2)
    """Training on rollouts: their share of the steps, and dumps."""
    rollout_matching: Annotated[RolloutMatching, from_null] = Field(default_factory=RolloutMatching)
    """Rollouts: generation, matching and objective."""

    @property
    def uses_rollouts(self) -> bool:
        return self.custom.trainer_variant != "stage1_sft"

    @property
    def evaluates(self) -> bool:
        """Return whether the held-out images are answered during training."""
        return self.custom.val_jsonl is not None and self.training.eval_strategy != "no"

    @property
    def evaluates_chat(self) -> bool:
        """Return whether held-out questions are answered during training."""
        return bool(self.custom.eval_data) and self.training.eval_strategy != "no"

    @property
    def backend(self) -> str:
        """Return the name of the engine that answers images in this run. In Stage 1, only evaluation asks it."""
        if self.uses_rollouts:
            return self.rollout_matching.rollout_backend
        chosen = self.stage1.eval_backend if self.evaluates else "hf"
        if chosen == "auto":
            return "vllm" if self.describes_engine and importlib.util.find_spec("vllm") is not None else "hf"
        return chosen

    @property
    def describes_engine(self) -> bool:
        """True if something is written under `rollout_matching.vllm`."""
        rollout = self.rollout_matching
        return "vllm" in rollout.model_fields_set and bool(rollout.vllm.model_fields_set)

    @property
    def backend_setting(self) -> str:
        """Return the path of the setting that chooses the engine."""
        return "rollout_matching.rollout_backend" if self.uses_rollouts else "stage1.eval_backend"

    @property
    def learner_dtype(self) -> str:
        """Return the data type that the learner's weights are loaded in. Weights that are trained are float32:
        most updates are too small to change a weight of 16 bits. peft does the same with adapters."""
        return "float32" if self.model.adapter is None else self.model.dtype

    @property
    def pipeline_path(self) -> str:
        """Return the path at which the objective of this run is declared."""
        return "rollout_matching.pipeline" if self.uses_rollouts else "stage1.pipeline"

    @property
    def pipeline(self) -> Pipeline | None:
        return self.rollout_matching.pipeline if self.uses_rollouts else self.stage1.pipeline

    @property
    def rollout_matching_cfg(self) -> RolloutContract:
        """Return all settings that a trainer with rollouts reads. Only settings from the loader have it."""
        assert self.global_max_length is not None, "the loader derives global_max_length"
        packing = {name: getattr(self.training, name) for name in PACKING_KEYS}
        return RolloutContract(**dict(self.rollout_matching), **packing, packing_length=self.global_max_length)

    @property
    def channels(self) -> frozenset[Channel]:
        """Return the channels that get at least one step."""
        running = CHANNELS_OF[self.custom.trainer_variant]
        without = {0.0: "B", 1.0: "A"}.get(self.stage2.b_ratio) if self.stage2.b_ratio is not None else None
        return running - {without} if len(running) > 1 else running
