"""Puts a run together from its settings, trains, and leaves a folder with all of it."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, PrinterCallback, Qwen3VLForConditionalGeneration, TrainingArguments
from transformers.trainer_utils import set_seed

from coordexp.config import Loaded, Settings
from coordexp.config.rules import max_length
from coordexp.data import RecordFile, read_records
from coordexp.objective import Objective
from coordexp.pack import CarryBuffer, Example
from coordexp.pack.attention import attention_for
from coordexp.pack.collate import Collator
from coordexp.rollout.prompt import PromptBuilder
from coordexp.train.adapter import with_adapter
from coordexp.train.callbacks import Bar, MetricsFile, StopOnSignal
from coordexp.train.encode import GroundTruth
from coordexp.train.evaluation import AnswerEvaluation
from coordexp.train.folder import fingerprint, write_run_folder
from coordexp.train.stream import Order, RowStream, Stage
from coordexp.train.trainer import RowTrainer
from coordexp.vocab import VocabularyTable

OURS = ("packing", "packing_buffer", "packing_min_fill_ratio", "packing_drop_last")


@dataclass(frozen=True)
class Outcome:
    steps: int
    stopped_by: int | None  # a signal
    folder: Path


def prepare(loaded: Loaded, resume: bool) -> tuple[Callable[[], Outcome], Path | None]:
    """Loads and checks all that a stage-1 run needs. What comes back runs it, and says from which checkpoint: with
    `resume`, the newest of the run folder, if there is one."""
    settings = loaded.settings
    folder = Path(settings.training.output_dir)
    train = RecordFile(Path(settings.custom.train_jsonl))
    held_out = RecordFile(Path(settings.custom.val_jsonl)) if settings.custom.val_jsonl else None
    arguments = training_arguments(settings, len(train))
    checkpoint = _checkpoint(folder, resume)
    if checkpoint is not None and _step(checkpoint) >= arguments.max_steps:
        return (lambda: Outcome(_step(checkpoint), stopped_by=None, folder=folder)), checkpoint
    set_seed(settings.training.seed)
    trainer, stop = _trainer(settings, arguments, train, held_out)
    if checkpoint is not None:
        trainer.stream.load(checkpoint)
    if trainer.is_world_process_zero():
        data = {"train": train} | ({"val": held_out} if held_out else {})
        write_run_folder(folder, loaded, data, trainer.objective.manifest())

    def run() -> Outcome:
        stop.listen()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return Outcome(trainer.state.global_step, stop.stopped_by, folder)

    return run, checkpoint


def training_arguments(settings: Settings, samples: int) -> TrainingArguments:
    """transformers' own checks run here, before a model is loaded."""
    given: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.training
        if name not in OURS
    }
    if given["max_steps"] <= 0:
        per_step = settings.training.per_device_train_batch_size * settings.training.gradient_accumulation_steps
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        given["max_steps"] = math.ceil(given["num_train_epochs"] * samples / (ranks * per_step))
    # Rows are no dict of columns; the stream finds its own place after a resume; the bar is ours.
    ours = {"remove_unused_columns": False, "ignore_data_skip": True, "disable_tqdm": True}
    arguments = TrainingArguments(**(given | ours))
    if arguments.n_gpu > 1:
        raise ValueError(
            f"one process sees {arguments.n_gpu} GPUs\n"
            f"  start one process a GPU (torchrun --nproc_per_node {arguments.n_gpu} -m src.sft ...), or show it "
            "one only (CUDA_VISIBLE_DEVICES=0)"
        )
    return arguments


def _trainer(
    settings: Settings, arguments: TrainingArguments, train: RecordFile, held_out: RecordFile | None
) -> tuple[RowTrainer, StopOnSignal]:
    folder = Path(settings.model.path)
    table = VocabularyTable.from_folder(folder)
    processor = AutoProcessor.from_pretrained(folder)
    base = Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=getattr(torch, settings.model.dtype), attn_implementation=attention_for(arguments.device)
    )
    objective = Objective(settings, table.first_coord)
    prompts = PromptBuilder(processor, settings.custom.prompt)
    collate = Collator.for_model(base, prompts.pixels, objective.roles())
    model = with_adapter(base, settings.model.adapter, table.first_coord)
    evaluation = None
    if held_out is not None and arguments.eval_strategy != "no":
        evaluation = AnswerEvaluation(
            held_out, prompts, table, settings.rollout_matching, Path(arguments.output_dir)
        )
    stop = StopOnSignal()
    trainer = RowTrainer(
        model=model,
        args=arguments,
        processing_class=processor,
        eval_dataset=held_out,
        callbacks=[MetricsFile(Path(arguments.output_dir) / "metrics.jsonl"), Bar(), stop],
        objective=objective,
        stream=_stream(settings, arguments, GroundTruth(train, prompts, table, settings)),
        collate=collate,
        evaluation=evaluation,
        about={"prompt": settings.custom.prompt},
        image_threads=settings.training.dataloader_num_workers,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, stop


def _stream(settings: Settings, arguments: TrainingArguments, encode: GroundTruth) -> RowStream:
    training, length = settings.training, max_length(settings)
    assert length is not None
    order = Order(
        len(encode.records),
        arguments.process_index,
        arguments.world_size,
        seed=training.data_seed if training.data_seed is not None else training.seed,
        shuffled=training.train_sampling_strategy == "random",
        stages=_stages(settings, encode.records),
    )
    buffer: CarryBuffer[Example] | None = None
    if training.packing:
        buffer = CarryBuffer(length, training.packing_buffer, training.packing_min_fill_ratio)
    about = {
        "data": fingerprint(encode.records)["sha256"],
        "accumulation": training.gradient_accumulation_steps,
        "prompt": settings.custom.prompt,
        "object_field_order": settings.custom.object_field_order,
    }
    batch = training.per_device_train_batch_size
    return RowStream(order, encode, batch, buffer, max_length=length, about=about)


def _stages(settings: Settings, records: RecordFile) -> list[Stage]:
    """Reads all records once, if there is a curriculum."""
    if not settings.custom.curriculum:
        return []
    counts = [len(record.objects) for _, record in read_records(records.path)]
    stages = []
    for k, stage in enumerate(settings.custom.curriculum):
        fitting = tuple(index for index, count in enumerate(counts) if count <= stage.objects)
        if not fitting:
            raise ValueError(
                f"custom.curriculum[{k}]: no record of {records.path} has at most {stage.objects} objects\n"
                "  raise objects, or leave the stage out"
            )
        stages.append(Stage(stage.samples, fitting))
    return stages


def _checkpoint(folder: Path, resume: bool) -> Path | None:
    """The newest one that is whole: the stream's state is written last."""
    whole = [path for path in folder.glob("checkpoint-*") if (path / "stream_0.json").is_file()]
    newest = max(whole, key=_step, default=None)
    if newest and not resume:
        raise FileExistsError(
            f"{folder} already holds {newest.name}\n"
            "  add --resume to go on from there, or set training.output_dir to a new folder"
        )
    if newest:
        missing = [
            name for name in ("optimizer*", "scheduler.pt", "trainer_state.json") if not any(newest.glob(name))
        ]
        if missing:
            raise FileNotFoundError(
                f"{newest} has no {' and no '.join(missing)}: going on from it would not be exact\n"
                "  copy the checkpoint again, or remove it to resume from the one before"
            )
    return newest


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))
