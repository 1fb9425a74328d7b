"""Assemble a run from its settings: data, learner, rollout backend, objective, trainer."""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PrinterCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback, WandbCallback
from transformers.trainer_utils import set_seed

from coordexp.answers.formats import load_format
from coordexp.config import Loaded, RolloutContract, Settings
from coordexp.config.rollout import BACKENDS
from coordexp.config.rules import trains_chat
from coordexp.config.settings import Custom
from coordexp.config.training import PACKING_KEYS, REFUSED
from coordexp.data import Questions, Record, Records, RecordSet, find_wrong_kind, open_data
from coordexp.data.doctor.examine import SMALL, Sizes
from coordexp.data.sets import locate_image
from coordexp.dumps import CORRECTION_SETTINGS, FOLDER, DumpFolder, DumpWriter, remove_from_step
from coordexp.errors import DataError, UserError
from coordexp.evaluate import read_truth
from coordexp.extensions import find_extensions, load_extension
from coordexp.files import find_data_files
from coordexp.objective.carry import CarryBuffer, Example
from coordexp.objective.collate import Collator
from coordexp.objective.pipeline import Objective
from coordexp.ranks import gather_texts, together
from coordexp.rollout import check_vllm
from coordexp.rollout.backend import PROBED_IMAGES, RolloutBackend
from coordexp.rollout.colocate import ColocateBackend
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder, load_processor, read_image_size
from coordexp.rollout.start import EngineSetup
from coordexp.tasks import ignore
from coordexp.train.callbacks import Bar, FillWarning, FirstSync, MetricsFile, TensorBoard, Wandb, say
from coordexp.train.chat_evaluation import ChatEvaluation, QuestionSet
from coordexp.train.checkpoint_hook import CheckpointHook, load_hook
from coordexp.train.checkpoints import step_of
from coordexp.train.encode import Encoder, TrainingSet
from coordexp.train.evaluation import AnswerEvaluation, evenly_spaced
from coordexp.train.folder import RolloutFacts, ServerLog, describe_rollouts, fingerprint, write_run_folder
from coordexp.train.learner import Learner
from coordexp.train.metrics import StepMetrics, TraceWriter
from coordexp.train.mixture import Mixture
from coordexp.train.pictures import EvaluationPictures
from coordexp.train.prometheus import LearnerMetrics
from coordexp.train.rollouts import RolloutSource
from coordexp.train.stopping import StopOnSignal, Stopped
from coordexp.train.stream import RowStream, SampleOrder, StageRecords
from coordexp.train.trainer import Evaluation, RowTrainer

EXACT = 1000  # side of the mask IoU canvas on which every box is exact
METRICS = "metrics.jsonl"
FIRST_RECORDS = 10  # of each data set, whose kind is checked at the start of a run
REQUESTS = {"class_prompt", "expression_prompt", "class_requests", "negatives", "object_order"}  # of `custom`
MEASURED = 1000  # records whose objects are measured at the start of a run


@dataclass(frozen=True)
class RunOutcome:
    steps: int
    stopped_by: int | None  # a signal
    folder: Path
    saved: bool = True  # the last step is in a checkpoint


@dataclass(frozen=True)
class PreparedRun:
    """A run that is loaded and checked, but has not begun. `checkpoint` is the one that it resumes from.
    `trainer` is None if that checkpoint is already at the last step."""

    folder: Path
    checkpoint: Path | None
    trainer: RowTrainer | None
    bar: Bar

    def run(self) -> RunOutcome:
        """Train until the last step, or until a signal stops the run."""
        trainer = self.trainer
        if trainer is None:
            return RunOutcome(_step_of(self.checkpoint), stopped_by=None, folder=self.folder)
        trainer.stop.listen()
        with (
            closing(trainer.stop),
            closing(trainer.checkpoint_hook),
            closing(trainer.backend),
            closing(self.bar),
            suppress(Stopped),
        ):
            trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        steps = trainer.state.global_step
        return RunOutcome(steps, trainer.stop.stopped_by, self.folder, saved=trainer.saved == steps)


def prepare(loaded: Loaded, checkpoint: Path | None = None) -> PreparedRun:
    """Load and check everything that a run needs. It continues from the checkpoint that rank 0 gives, if any."""
    settings = loaded.settings
    folder = Path(settings.training.output_dir)
    train = _open_records(*settings.custom.train_sets.values())
    val_names = settings.custom.data_sets.get("custom.val_jsonl")
    held_out = HeldOut(_open_records(val_names) if val_names else None, _open_questions(settings))
    arguments = training_arguments(settings, len(train))
    together(partial(_check_data, settings, arguments, train, held_out))
    name = gather_texts(checkpoint.name if checkpoint else "")[0]
    checkpoint = folder / name if name else None
    step, bar = _step_of(checkpoint), Bar()
    if checkpoint is not None and step >= arguments.max_steps:
        return PreparedRun(folder, checkpoint, None, bar)
    set_seed(settings.training.seed)
    metrics_file = MetricsFile(folder / METRICS)
    trainer = _make_trainer(settings, arguments, train, held_out, metrics_file, bar)
    if checkpoint is not None:
        trainer.stream.load(checkpoint)
        trainer.rollouts.load(checkpoint)
        trainer.saved, trainer.rotation_is_due = step, True
    data = {"train": train} | held_out.files
    together(partial(_begin_folder, folder, loaded, data, trainer, metrics_file, step))
    return PreparedRun(folder, checkpoint, trainer, bar)


@dataclass(frozen=True)
class HeldOut:
    """The data of evaluation: records with objects, and sets of questions by name."""

    records: Records | None
    questions: dict[str, QuestionSet]

    @property
    def files(self) -> dict[str, Records]:
        """All held-out data, by names for `run.json`."""
        files = {} if self.records is None else {"val": self.records}
        return files | {f"eval_data.{name}": data.records for name, data in self.questions.items()}


def _open_questions(settings: Settings) -> dict[str, QuestionSet]:
    custom = settings.custom
    return {
        name: QuestionSet(_open_records(custom.data_sets[f"custom.eval_data[{k}].path"]), data.max_new_tokens)
        for k, (name, data) in enumerate(zip(custom.eval_names, custom.eval_data, strict=True))
    }


def _open_records(*sets: Sequence[str]) -> Records:
    """Open data sets, each of which is a list of paths and glob patterns."""
    notify = say if os.environ.get("RANK", "0") == "0" else ignore
    return open_data([find_data_files(names) for names in sets], notify)


def _step_of(checkpoint: Path | None) -> int:
    return (step_of(checkpoint) or 0) if checkpoint else 0


def _check_data(settings: Settings, arguments: TrainingArguments, train: Records, held_out: HeldOut) -> None:
    """Report on rank 0 what the data means for the run. Raise now, and not at the first evaluation, if the
    records to evaluate on cannot be read."""
    if arguments.process_index != 0:
        return
    _check_first_records(settings, train)
    if settings.uses_rollouts:
        _note_coarse_canvas(train, settings.rollout_matching.maskiou_resolution)
    if held_out.records is not None and arguments.eval_strategy != "no":
        read_truth(held_out.records)
    for data in held_out.questions.values() if settings.evaluates_chat else ():
        for index in evenly_spaced(len(data.records), settings.custom.eval_samples):
            data.read(index)


def _check_first_records(settings: Settings, train: Records) -> None:
    """Raise DataError if the first records of a data set are chat records, and the objective has no loss for
    them. Others are refused when they are trained on."""
    for part in train.parts if isinstance(train, RecordSet) else (train,):
        records = []
        with suppress(ValueError):  # a broken record is reported, on all ranks, when it is trained on
            for index in range(min(FIRST_RECORDS, len(part))):
                records.append(part.read(index))
        if wrong := find_wrong_kind("custom.train_data", records, trains_chat(settings)):
            raise DataError(f"{part}: {wrong[0]}", wrong[1])


def find_requests(custom: Custom, train: Records) -> list[str]:
    """Return which kinds of requests the run trains, `classes` and `expression`: those that it draws, and those of
    the first records of each data set."""
    kinds = {"classes"} if custom.class_requests.rate else set[str]()
    for part in train.parts if isinstance(train, RecordSet) else (train,):
        with suppress(ValueError):  # a broken record is reported, on all ranks, when it is trained on
            for index in range(min(MEASURED, len(part))):
                record = part.read(index)
                kinds |= {kind for kind in ("classes", "expression") if getattr(record, kind, None) is not None}
    return sorted(kinds)


def _note_coarse_canvas(records: Records, resolution: int) -> None:
    """Print a note if the median object of the first records is too small for the mask IoU canvas."""
    if resolution >= EXACT:
        return
    sizes = Sizes()
    with suppress(ValueError):  # a broken record is reported, on all ranks, when it is trained on
        for index in range(min(MEASURED, len(records))):
            if isinstance(record := records.read(index), Record):
                sizes.add(record)
    if sizes.median is not None and sizes.median < SMALL:
        say(
            f"note: the median side of the objects in {records} is {sizes.median} bins (of the first "
            f"{MEASURED:,} records), and rollout_matching.maskiou_resolution is {resolution}, which is coarse for "
            f"objects under {SMALL} bins; {EXACT} is exact for boxes, and matching costs about 2.5 times as much"
        )


def _begin_folder(
    folder: Path,
    loaded: Loaded,
    data: dict[str, Records],
    trainer: RowTrainer,
    metrics_file: MetricsFile,
    step: int,
) -> None:
    """On rank 0, write what is run to the run folder, and drop the metrics and dumps that the run will repeat."""
    if not trainer.is_world_process_zero():
        return
    settings = loaded.settings
    asks_engine = settings.uses_rollouts or settings.backend == "vllm"
    rollouts = describe_rollouts(settings, trainer.backend) if asks_engine else None
    write_run_folder(folder, loaded, data, trainer.objective.manifest(), rollouts)
    metrics_file.begin(step)
    remove_from_step(folder / FOLDER, step)


def training_arguments(settings: Settings, samples: int) -> TrainingArguments:
    """Return the arguments of the Hugging Face Trainer. transformers checks them here, before a model is
    loaded."""
    given: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.training
        if name not in PACKING_KEYS
    }
    if given["max_steps"] <= 0:
        per_step = settings.training.per_device_train_batch_size * settings.training.gradient_accumulation_steps
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        given["max_steps"] = math.ceil(given["num_train_epochs"] * samples / (ranks * per_step))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "0").lower() not in ("0", "false"):  # set by `accelerate launch`
        raise UserError("ACCELERATE_USE_DEEPSPEED is set: DeepSpeed is not supported", REFUSED["deepspeed"][1])
    ours = {
        "remove_unused_columns": False,  # rows are not dicts of columns
        "ignore_data_skip": True,  # the stream restores its own place after a resume
        "disable_tqdm": True,  # `Bar` shows the progress
        "logging_nan_inf_filter": False,  # the loss is logged as it is, even if it is not finite
    }
    arguments = TrainingArguments(**(given | ours))
    if arguments.n_gpu > 1:
        raise UserError(
            f"one process sees {arguments.n_gpu} GPUs",
            f"start one process per GPU (torchrun --nproc_per_node {arguments.n_gpu} -m coordexp train ...), or "
            "let it see only one (CUDA_VISIBLE_DEVICES=0)",
        )
    return arguments


def _make_trainer(
    settings: Settings,
    arguments: TrainingArguments,
    train: Records,
    held_out: HeldOut,
    metrics_file: MetricsFile,
    bar: Bar,
) -> RowTrainer:
    contract = settings.rollout_matching_cfg
    answers = load_format(
        Path(settings.model.path),
        settings.custom.answer_format,
        order=settings.custom.object_field_order,
        settings=contract,
    )
    processor = load_processor(Path(settings.model.path), settings.model.image_limits)
    questions = Questions.of(settings.custom)
    files = [file for data in (train, *held_out.files.values()) for file in data.files]
    prompts = PromptBuilder(processor, questions.of_run, partial(locate_image, files))
    training_set = TrainingSet(train, prompts, answers, contract, settings.custom, trains_chat(settings))
    learner = Learner.load(settings, arguments, answers.table.coord_start)
    metrics, stop = StepMetrics(), StopOnSignal()
    stream = _make_stream(settings, contract, arguments, training_set, metrics)
    learner_metrics = LearnerMetrics(Path(arguments.output_dir), lambda: stream.taken)
    backend = backend_for(settings, arguments, training_set, learner, watch=learner_metrics.count)
    objective = Objective(settings, answers.table.coord_start)
    dumps = _make_dump_writer(settings, arguments, training_set)
    folder, samples = Path(arguments.output_dir), settings.custom.eval_samples
    shared = (folder, samples, stop.agree_to_stop, bar.show_evaluation)
    pictures = EvaluationPictures(settings.custom.eval_images)
    evaluations: list[Evaluation] = []
    if held_out.records is not None and settings.evaluates:
        add = pictures.add if settings.custom.eval_images else None
        evaluations.append(
            AnswerEvaluation(
                held_out.records, questions, backend, learner.weights, answers, contract, *shared, add
            )
        )
    if settings.evaluates_chat:
        own = HuggingFaceBackend(learner.current_model, prompts, answers.table, contract.decode_batch_size)
        evaluations.append(ChatEvaluation(held_out.questions, own, *shared))
    encoder = _make_encoder(settings, contract, arguments, training_set, metrics, dumps)
    trainer = RowTrainer(
        learner=learner,
        args=arguments,
        processing_class=processor,
        eval_dataset=next(iter(held_out.files.values()), None),
        callbacks=[
            FirstSync(backend, learner.weights, stop),
            metrics_file,
            learner_metrics,
            bar,
            pictures,
            *([FillWarning(contract.packing_min_fill_ratio)] if contract.packing else []),
            stop,
        ],
        objective=objective,
        stream=stream,
        encoder=encoder,
        rollouts=RolloutSource(
            stream,
            encoder,
            backend,
            learner.weights,
            metrics,
            settings.stage2.max_staleness,
            arguments.max_steps,
        ),
        collate=Collator.for_model(learner.base, prompts.pixels, objective.roles()),
        evaluations=evaluations,
        backend=backend,
        stop=stop,
        metrics=metrics,
        note=asdict(questions)
        | {"answer_format": answers.name, "requests": find_requests(settings.custom, train)},
        rollout_matching_cfg=contract,
        image_threads=settings.training.dataloader_num_workers,
        trace=TraceWriter(objective, dumps) if dumps else None,
        checkpoint_hook=CheckpointHook(load_hook(settings.custom.on_checkpoint)),
        set_names=settings.custom.set_names,
    )
    trainer.remove_callback(PrinterCallback)
    handler, trackers = trainer.callback_handler, {TensorBoardCallback: TensorBoard, WandbCallback: Wandb}
    handler.callbacks = [trackers[type(item)]() if type(item) in trackers else item for item in handler.callbacks]
    pictures.trackers = handler.callbacks
    return trainer


def _make_dump_writer(
    settings: Settings, arguments: TrainingArguments, training_set: TrainingSet
) -> DumpWriter | None:
    """Return the writer of dumps, or None on other ranks than rank 0, and in a run that dumps nothing."""
    stage2 = settings.stage2
    if not stage2.dump_every or "B" not in settings.channels or arguments.process_index != 0:
        return None
    folder = DumpFolder(Path(arguments.output_dir) / FOLDER, Path(settings.model.path))
    return DumpWriter(
        folder,
        training_set.order,
        training_set.settings,
        settings.training.seed,
        stage2.dump_every,
        stage2.dump_samples,
    )


def _make_encoder(
    settings: Settings,
    contract: RolloutContract,
    arguments: TrainingArguments,
    training_set: TrainingSet,
    metrics: StepMetrics,
    dumps: DumpWriter | None,
) -> Encoder:
    if settings.channels == {"A", "B"}:
        b_ratio = Fraction(str(settings.stage2.b_ratio))
    else:
        b_ratio = Fraction("B" in settings.channels)
    return Encoder(
        training_set,
        contract,
        settings.training.seed,
        arguments.process_index,
        metrics,
        b_ratio,
        watch=dumps.add if dumps else None,
        max_staleness=settings.stage2.max_staleness,
    )


def _make_stream(
    settings: Settings,
    contract: RolloutContract,
    arguments: TrainingArguments,
    training_set: TrainingSet,
    metrics: StepMetrics,
) -> RowStream:
    training, records = settings.training, training_set.records
    order = SampleOrder(
        len(records),
        arguments.process_index,
        arguments.world_size,
        seed=training.data_seed if training.data_seed is not None else training.seed,
        shuffled=training.train_sampling_strategy == "random",
        stages=_curriculum(settings, records),
        mixture=_mixture(settings, records),
    )
    buffer: CarryBuffer[Example] | None = None
    if contract.packing:
        buffer = CarryBuffer(contract.packing_length, contract.packing_buffer, contract.packing_min_fill_ratio)
    return RowStream(
        order,
        training.per_device_train_batch_size,
        buffer,
        max_length=contract.packing_length,
        accumulation=training.gradient_accumulation_steps,
        metrics=metrics,
        identity=_identity(settings, records),
        measure_truth=training_set.measure_truth,
    )


def _describe_prompts(custom: Custom) -> dict[str, Any]:
    """Return the prompts of data sets that have their own, by the number of the set."""
    names = {"prompt", "class_prompt", "expression_prompt"}
    own = {str(k): data.model_dump(include=names, exclude_none=True) for k, data in enumerate(custom.train_data)}
    return {number: texts for number, texts in own.items() if texts}


def _identity(settings: Settings, records: Records) -> dict[str, Any]:
    """Return what must be the same after a resume, besides order and sizes."""
    identity = {
        "data": fingerprint(records)["sha256"],
        "prompt": settings.custom.prompt,
        "object_field_order": settings.custom.object_field_order,
        "channels": sorted(settings.channels),
        "answer_format": settings.custom.answer_format,
        "model.max_pixels": settings.model.max_pixels,
        "model.min_pixels": settings.model.min_pixels,
        "requests": settings.custom.model_dump(mode="json", include=REQUESTS),
        "model.freeze": sorted(settings.model.freeze),
        "prompts": _describe_prompts(settings.custom),
    }
    if "B" in settings.channels:
        rollout = settings.rollout_matching.model_dump(mode="json")
        decoding = ("max_new_tokens", "decoding", "decode_mode", "num_beams", "repeat_terminate")
        names = (*decoding, "rollouts_per_sample", "noise", *CORRECTION_SETTINGS)
        identity |= {"training.seed": settings.training.seed, "stage2.b_ratio": settings.stage2.b_ratio}
        identity["stage2.max_staleness"] = settings.stage2.max_staleness
        identity |= {f"rollout_matching.{name}": rollout[name] for name in names}
    return identity


def _mixture(settings: Settings, records: Records) -> Mixture | None:
    """Return how the data sets are mixed, or None if there is only one."""
    if len(settings.custom.train_data) < 2:
        return None
    assert isinstance(records, RecordSet)
    return Mixture(settings.custom.shares, tuple(map(len, records.parts)))


def _curriculum(settings: Settings, records: Records) -> list[StageRecords]:
    """Return the stages of the curriculum."""
    stages = []
    for k, stage in enumerate(settings.custom.curriculum):
        fitting = np.flatnonzero(records.object_counts <= stage.objects)
        if not len(fitting):
            raise DataError(
                f"custom.curriculum[{k}]: no record of {records} has at most {stage.objects} objects",
                "raise objects, or remove the stage",
            )
        stages.append(StageRecords(stage.samples, fitting))
    return stages


def backend_for(
    settings: Settings,
    arguments: TrainingArguments,
    training_set: TrainingSet,
    learner: Learner,
    watch: Callable[[dict[str, Any]], None] = ignore,
) -> RolloutBackend:
    """Return the backend that the settings name. In a run without rollouts only evaluation needs one. `watch` gets
    the events of rollout servers."""
    rollout, prompts, table = settings.rollout_matching_cfg, training_set.prompts, training_set.table
    own = HuggingFaceBackend(learner.current_model, prompts, table, rollout.decode_batch_size)
    if settings.backend == "hf":
        return own
    added = find_extensions("rollout_backends", taken=frozenset(BACKENDS))
    if settings.backend in added:
        backend: RolloutBackend = load_extension(added[settings.backend])(settings, training_set, learner)
        return backend
    folder, rank = Path(arguments.output_dir), arguments.process_index
    setup = EngineSetup(
        Path(settings.model.path),
        learner.dtype,
        rollout,
        table,
        learner.device,
        learner.precision,
        image_size=read_image_size(prompts.processor),
        has_image_limits=bool(settings.model.image_limits),
    )
    adapter = learner.adapter_weights if learner.has_plain_adapter else None
    probes = training_set.find_images(PROBED_IMAGES)
    if rollout.vllm.mode == "server":
        from coordexp.servers.backend import ServerBackend  # httpx is needed only here

        if arguments.device.type == "cuda":
            check_vllm(settings.backend_setting)  # weights are sent over its NCCL
        return ServerBackend(
            setup,
            prompts,
            own,
            probes=probes,
            notify=say,
            record=ServerLog(folder, rank, watch),
            adapter=adapter,
        )
    return ColocateBackend(
        setup,
        prompts,
        own,
        probes=probes,
        room=learner.offload,
        notify=say if rank == 0 else ignore,
        adapter=adapter,
        record=RolloutFacts(folder) if rank == 0 else ignore,
    )
