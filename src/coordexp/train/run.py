"""Puts a run together from its settings, trains, and leaves a folder with all of it."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import AutoProcessor, PrinterCallback, Qwen3VLForConditionalGeneration, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import set_seed

from coordexp.config import Loaded, RolloutContract, Settings
from coordexp.config.capacity import describe_evaluation
from coordexp.config.settings import PACKING_KEYS
from coordexp.data import RecordFile, read_records
from coordexp.data.doctor.measures import SMALL, Sizes
from coordexp.dump_files import FOLDER
from coordexp.dumps import READ
from coordexp.evaluate import read_truth
from coordexp.objective import Objective
from coordexp.pack import CarryBuffer, Example
from coordexp.pack.attention import attention_for
from coordexp.pack.collate import Collator
from coordexp.ranks import gather_texts, together
from coordexp.rollout.backend import RolloutBackend, Weights
from coordexp.rollout.prompt import PromptBuilder
from coordexp.train.adapter import with_adapter
from coordexp.train.backends import backend_for, described
from coordexp.train.callbacks import Bar, FillWarning, FirstSync, MetricsFile, TensorBoard, cut_metrics, say
from coordexp.train.checkpoints import checkpoints, is_finished, newest_intact, step_of
from coordexp.train.counters import Ledger
from coordexp.train.dump import Dumps
from coordexp.train.dump_folder import DumpFolder, forget_from
from coordexp.train.encode import Alternate, Casebook, CorrectedRollouts, Encode, GroundTruth
from coordexp.train.evaluation import AnswerEvaluation
from coordexp.train.folder import fingerprint, write_run_folder
from coordexp.train.stopping import StopOnSignal, Stopped
from coordexp.train.stream import Order, RowStream, Stage
from coordexp.train.trace import Traces
from coordexp.train.trainer import RowTrainer
from coordexp.train.weights import learner_weights
from coordexp.vocab import VocabularyTable

EXACT = 1000  # side of the mask IoU canvas on which every box is exact
METRICS = "metrics.jsonl"
MEASURED = 1000  # records whose objects are measured at the start of a run


@dataclass(frozen=True)
class Outcome:
    steps: int
    stopped_by: int | None  # a signal
    folder: Path
    saved: bool = True  # the last step


def prepare(loaded: Loaded, resume: bool) -> tuple[Callable[[], Outcome], Path | None]:
    """Loads and checks all that a run needs. What comes back runs it, and says from which checkpoint: with
    `resume`, the newest of the run folder, if there is one."""
    settings = loaded.settings
    folder = Path(settings.training.output_dir)
    train = RecordFile(Path(settings.custom.train_jsonl))
    held_out = RecordFile(Path(settings.custom.val_jsonl)) if settings.custom.val_jsonl else None
    arguments = training_arguments(settings, len(train))
    if arguments.process_index == 0:
        if settings.uses_rollouts:
            _say_if_canvas_is_coarse(train, settings.rollout_matching.maskiou_resolution)
        if held_out is not None and (cost := describe_evaluation(settings, len(held_out))):
            say(cost)
    if (
        held_out is not None and arguments.eval_strategy != "no"
    ):  # a fault is told now, not at the first evaluation
        together(lambda: read_truth(held_out) if arguments.process_index == 0 else None)
    checkpoint = _checkpoint(folder, resume)
    step = (step_of(checkpoint) or 0) if checkpoint else 0
    if checkpoint is not None and step >= arguments.max_steps:
        return (lambda: Outcome(step, stopped_by=None, folder=folder)), checkpoint
    set_seed(settings.training.seed)
    trainer, stop, bar = _trainer(settings, arguments, train, held_out)
    if checkpoint is not None:
        trainer.stream.load(checkpoint)
        trainer.saved, trainer.rotation_is_due = step_of(checkpoint), True

    def begin() -> None:
        data = {"train": train} | ({"val": held_out} if held_out else {})
        rollouts = described(settings, trainer.backend) if settings.uses_rollouts else None
        write_run_folder(folder, loaded, data, trainer.objective.manifest(), rollouts)
        cut_metrics(folder / METRICS, step)
        forget_from(folder / FOLDER, step)

    together(lambda: begin() if trainer.is_world_process_zero() else None)

    def run() -> Outcome:
        stop.listen()
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except Stopped:  # before the first step
            pass
        finally:
            bar.close()
            with closing(stop):
                trainer.backend.close()
        steps = trainer.state.global_step
        return Outcome(steps, stop.stopped_by, folder, saved=trainer.saved == steps)

    return run, checkpoint


def _say_if_canvas_is_coarse(records: RecordFile, resolution: int) -> None:
    """Print a note if the median object of the first records is too small for the mask IoU canvas (D16)."""
    if resolution >= EXACT:
        return
    sizes = Sizes()
    with suppress(ValueError):  # a record that cannot be read is reported, on all ranks, when it is trained on
        for _, record in islice(read_records(records.path), MEASURED):
            sizes.add(record)
    if sizes.median is not None and sizes.median < SMALL:
        say(
            f"note: the median side of the objects in {records.path} is {sizes.median} bins (of the first "
            f"{MEASURED:,} records), and rollout_matching.maskiou_resolution is {resolution}, which is coarse for "
            f"objects under {SMALL} bins\n  {EXACT} is exact for boxes, and matching costs about 2.5 times as much"
        )


def training_arguments(settings: Settings, samples: int) -> TrainingArguments:
    """transformers' own checks run here, before a model is loaded."""
    given: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.training
        if name not in PACKING_KEYS
    }
    if given["max_steps"] <= 0:
        per_step = settings.training.per_device_train_batch_size * settings.training.gradient_accumulation_steps
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        given["max_steps"] = math.ceil(given["num_train_epochs"] * samples / (ranks * per_step))
    half = next((name for name in ("bf16", "fp16") if given[name]), None)
    if half and not given["use_cpu"] and not torch.accelerator.is_available():
        raise ValueError(
            f"training.{half}: true needs a GPU, and torch sees none\n"
            f"  to train on a CPU, set training.use_cpu: true and training.{half}: false, as "
            "configs/demo/stage1-cpu.yaml does; `coordexp doctor` says what torch sees"
        )
    # Rows are not dicts of columns; the stream finds its own place after a resume; the bar is ours; NaN is logged.
    ours = {
        "remove_unused_columns": False,
        "ignore_data_skip": True,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
    }
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
) -> tuple[RowTrainer, StopOnSignal, Bar]:
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
    contract = settings.rollout_matching_cfg
    cases = Casebook(train, prompts, table, settings.custom.object_field_order, contract)
    backend = backend_for(settings, arguments, cases, lambda: trainer)

    def weights() -> Iterator[tuple[str, Tensor]]:
        return learner_weights(trainer.model)

    stop, bar = StopOnSignal(), Bar()
    evaluation = None
    if held_out is not None and arguments.eval_strategy != "no":
        evaluation = AnswerEvaluation(
            held_out,
            backend,
            weights,
            table,
            contract,
            Path(arguments.output_dir),
            settings.custom.eval_samples,
            stop.agreed,
            bar.evaluating,
        )
    ledger = Ledger()
    dumps = _dump_folder(settings, arguments)
    encode = _encode(settings, contract, arguments, cases, backend, weights, ledger, dumps)
    trainer = RowTrainer(
        model=model,
        args=arguments,
        processing_class=processor,
        eval_dataset=held_out,
        callbacks=[
            FirstSync(backend, weights, stop),
            MetricsFile(Path(arguments.output_dir) / METRICS),
            bar,
            *([FillWarning(contract.packing_min_fill_ratio)] if contract.packing else []),
            stop,
        ],
        objective=objective,
        stream=_stream(settings, contract, arguments, train, encode, ledger),
        collate=collate,
        evaluation=evaluation,
        backend=backend,
        stop=stop,
        about={"prompt": settings.custom.prompt},
        rollout_matching_cfg=contract,
        image_threads=settings.training.dataloader_num_workers,
        trace=Traces(objective, dumps) if dumps else lambda *_: None,
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(TensorBoardCallback):
        trainer.add_callback(TensorBoard)
        trainer.remove_callback(stop)
        trainer.add_callback(stop)  # which has to be the last one
    return trainer, stop, bar


def _dump_folder(settings: Settings, arguments: TrainingArguments) -> DumpFolder | None:
    """Of rank 0, in runs with rollouts."""
    if not settings.stage2.dump_every or "B" not in settings.channels or arguments.process_index != 0:
        return None
    return DumpFolder(Path(arguments.output_dir) / FOLDER, Path(settings.model.path))


def _encode(
    settings: Settings,
    contract: RolloutContract,
    arguments: TrainingArguments,
    cases: Casebook,
    backend: RolloutBackend,
    weights: Weights,
    ledger: Ledger,
    dumps: DumpFolder | None,
) -> Encode:
    """Channel A, channel B, or both in turn."""
    ground_truth = GroundTruth(cases)
    if settings.channels == {"A"}:
        return ground_truth
    stage2 = settings.stage2
    rollouts = CorrectedRollouts(
        cases,
        backend,
        weights,
        contract,
        settings.training.seed,
        arguments.process_index,
        ledger,
        watch=Dumps(dumps, cases, stage2.dump_every, stage2.dump_samples)
        if dumps and stage2.dump_every
        else lambda *_: "",
    )
    if settings.channels == {"B"}:
        return rollouts
    return Alternate(ground_truth, rollouts, Fraction(str(stage2.b_ratio)))


def _stream(
    settings: Settings,
    contract: RolloutContract,
    arguments: TrainingArguments,
    records: RecordFile,
    encode: Encode,
    ledger: Ledger,
) -> RowStream:
    training = settings.training
    order = Order(
        len(records),
        arguments.process_index,
        arguments.world_size,
        seed=training.data_seed if training.data_seed is not None else training.seed,
        shuffled=training.train_sampling_strategy == "random",
        stages=_stages(settings, records),
    )
    buffer: CarryBuffer[Example] | None = None
    if contract.packing:
        buffer = CarryBuffer(contract.packing_length, contract.packing_buffer, contract.packing_min_fill_ratio)
    return RowStream(
        order,
        encode,
        training.per_device_train_batch_size,
        buffer,
        max_length=contract.packing_length,
        accumulation=training.gradient_accumulation_steps,
        ledger=ledger,
        about=_identity(settings, records),
    )


def _identity(settings: Settings, records: RecordFile) -> dict[str, Any]:
    """What must be the same after a resume, besides order and sizes."""
    found = {
        "data": fingerprint(records)["sha256"],
        "prompt": settings.custom.prompt,
        "object_field_order": settings.custom.object_field_order,
        "channels": sorted(settings.channels),
    }
    if "B" in settings.channels:
        rollout = settings.rollout_matching.model_dump(mode="json")
        kept = (*READ, "max_new_tokens", "decoding", "decode_mode", "num_beams", "repeat_terminate")
        found |= {"training.seed": settings.training.seed, "stage2.b_ratio": settings.stage2.b_ratio}
        found |= {f"rollout_matching.{name}": rollout[name] for name in kept}
    return found


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
    """Return the checkpoint to go on from, the same on every rank: rank 0 verifies, the others follow."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    chosen = together(lambda: _choose(folder, resume) if first else None)
    name = gather_texts(chosen.name if chosen else "")[0]
    return folder / name if name else None


def _choose(folder: Path, resume: bool) -> Path | None:
    if resume:
        return newest_intact(folder, say)
    existing = next(filter(is_finished, checkpoints(folder)), None)
    if existing:
        raise FileExistsError(
            f"{folder} already holds {existing.name}\n"
            "  add --resume to go on from there, or set training.output_dir to a new folder"
        )
    return None
