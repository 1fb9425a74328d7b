"""Assemble a run from its settings: data, learner, rollout backend, objective, trainer."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PrinterCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import set_seed

from coordexp.answers.formats import AnswerFormat, load_format
from coordexp.config import Loaded, Settings
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
from coordexp.logs import say
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
from coordexp.train.checkpoints import CheckpointHook, step_of
from coordexp.train.encode import Encoder, TrainingSet
from coordexp.train.evaluation import AnswerEvaluation, Asking, ChatEvaluation, QuestionSet, evenly_spaced
from coordexp.train.folder import RolloutFacts, ServerLog, describe_rollouts, fingerprint, write_run_folder
from coordexp.train.learner import Learner
from coordexp.train.metrics import StepMetrics, TraceWriter
from coordexp.train.mixture import Mixture
from coordexp.train.quarantine import Quarantine
from coordexp.train.rollouts import RolloutSource
from coordexp.train.sinks import MetricsFile, PrometheusFile, Sink, Sinks, TensorBoard, Wandb
from coordexp.train.step import OptimizerStep, RowLoader
from coordexp.train.stopping import StopOnSignal, Stopped
from coordexp.train.stream import RowStream, SampleOrder, StageRecords
from coordexp.train.terminal import Bar, FillWarning
from coordexp.train.trainer import Evaluation, FirstSync, RowTrainer

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
    trainer: RowTrainer | None = None
    bar: Bar | None = None

    def run(self) -> RunOutcome:
        """Train until the last step, or until a signal stops the run."""
        trainer = self.trainer
        if trainer is None or self.bar is None:
            return RunOutcome(_step_of(self.checkpoint), stopped_by=None, folder=self.folder)
        stop, hook = trainer.stop, trainer.checkpoint_hook
        stop.listen()
        with closing(stop), closing(hook), closing(trainer.backend), closing(self.bar), suppress(Stopped):
            trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        steps = trainer.state.global_step
        return RunOutcome(steps, stop.stopped_by, self.folder, saved=trainer.saved == steps)


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
    step = _step_of(checkpoint)
    if checkpoint is not None and step >= arguments.max_steps:
        return PreparedRun(folder, checkpoint)
    set_seed(settings.training.seed)
    parts = Assembly(settings, arguments, train, held_out)
    trainer = parts.trainer
    if checkpoint is not None:
        parts.rollouts.load(checkpoint)
        trainer.saved, trainer.rotation_is_due = step, True
    together(partial(_begin_folder, parts, loaded, step))
    return PreparedRun(folder, checkpoint, trainer, parts.bar)


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
    for part in _find_parts(train):
        records = list(_read_first(part, FIRST_RECORDS))
        if wrong := find_wrong_kind("custom.train_data", records, trains_chat(settings)):
            raise DataError(f"{part}: {wrong[0]}", wrong[1])


def _find_parts(records: Records) -> Sequence[Records]:
    return records.parts if isinstance(records, RecordSet) else (records,)


def _read_first(records: Records, most: int) -> Iterator[Any]:
    """Yield the first records, until one is broken: that is reported, on all ranks, when it is trained on."""
    with suppress(ValueError):
        for index in range(min(most, len(records))):
            yield records.read(index)


def find_requests(custom: Custom, train: Records) -> list[str]:
    """Return which kinds of requests the run trains, `classes` and `expression`: those that it draws, and those of
    the first records of each data set."""
    kinds = {"classes"} if custom.class_requests.rate else set[str]()
    for part in _find_parts(train):
        for record in _read_first(part, MEASURED):
            kinds |= {kind for kind in ("classes", "expression") if getattr(record, kind, None) is not None}
    return sorted(kinds)


def _note_coarse_canvas(records: Records, resolution: int) -> None:
    """Print a note if the median object of the first records is too small for the mask IoU canvas."""
    if resolution >= EXACT:
        return
    sizes = Sizes()
    for record in _read_first(records, MEASURED):
        if isinstance(record, Record):
            sizes.add(record)
    if sizes.median is not None and sizes.median < SMALL:
        say(
            f"note: the median side of the objects in {records} is {sizes.median} bins (of the first "
            f"{MEASURED:,} records), and rollout_matching.maskiou_resolution is {resolution}, which is coarse for "
            f"objects under {SMALL} bins; {EXACT} is exact for boxes, and matching costs about 2.5 times as much"
        )


def find_trackers(settings: Settings) -> set[str]:
    """Return the names in `training.report_to`."""
    names = set(settings.training.trackers)
    return {*names, *get_available_reporting_integrations()} - {"all"} if "all" in names else names


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
        "report_to": sorted(find_trackers(settings) - {"tensorboard", "wandb"}),  # these two are a `Sink`
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


class Assembly:
    """The parts of a run. Each is made when it is first needed, and once."""

    def __init__(
        self, settings: Settings, arguments: TrainingArguments, train: Records, held_out: HeldOut
    ) -> None:
        self.settings, self.arguments, self.train, self.held_out = settings, arguments, train, held_out
        self.contract = settings.rollout_matching_cfg
        self.folder, self.rank = Path(arguments.output_dir), arguments.process_index
        self.questions = Questions.of(settings.custom)
        self.metrics, self.stop, self.bar = StepMetrics(), StopOnSignal(), Bar()
        self.metrics_file = MetricsFile(self.folder / METRICS)

    # What is asked, and how it is answered

    @cached_property
    def answers(self) -> AnswerFormat:
        custom = self.settings.custom
        return load_format(
            Path(self.settings.model.path),
            custom.answer_format,
            order=custom.object_field_order,
            settings=self.contract,
        )

    @cached_property
    def prompts(self) -> PromptBuilder:
        model = self.settings.model
        files = [file for data in (self.train, *self.held_out.files.values()) for file in data.files]
        processor = load_processor(Path(model.path), model.image_limits)
        return PromptBuilder(processor, self.questions.of_run, partial(locate_image, files))

    @cached_property
    def training_set(self) -> TrainingSet:
        custom = self.settings.custom
        return TrainingSet(
            self.train, self.prompts, self.answers, self.contract, custom, trains_chat(self.settings)
        )

    # The model and its loss

    @cached_property
    def learner(self) -> Learner:
        requests = find_requests(self.settings.custom, self.train)
        note = asdict(self.questions) | {"answer_format": self.answers.name, "requests": requests}
        return Learner.load(self.settings, self.arguments, self.answers.table.coord_start, note)

    @cached_property
    def objective(self) -> Objective:
        return Objective(self.settings, self.answers.table.coord_start)

    # From records to examples

    @cached_property
    def stream(self) -> RowStream:
        training, contract = self.settings.training, self.contract
        order = SampleOrder(
            len(self.train),
            self.rank,
            self.arguments.world_size,
            seed=training.data_seed if training.data_seed is not None else training.seed,
            shuffled=training.train_sampling_strategy == "random",
            stages=_curriculum(self.settings, self.train),
            mixture=_mixture(self.settings, self.train),
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
            metrics=self.metrics,
            identity=_identity(self.settings, self.train),
            measure_truth=self.training_set.measure_truth,
            quarantine=self.quarantine,
        )

    @cached_property
    def quarantine(self) -> Quarantine | None:
        most = self.settings.custom.broken_images
        return Quarantine(self.train, self.folder, most) if most else None

    @cached_property
    def encoder(self) -> Encoder:
        settings = self.settings
        if settings.channels == {"A", "B"}:
            b_ratio = Fraction(str(settings.stage2.b_ratio))
        else:
            b_ratio = Fraction("B" in settings.channels)
        return Encoder(
            self.training_set,
            self.contract,
            settings.training.seed,
            self.rank,
            self.metrics,
            b_ratio,
            watch=self.dumps.add if self.dumps else None,
            max_staleness=settings.stage2.max_staleness,
        )

    @cached_property
    def rollouts(self) -> RolloutSource:
        return RolloutSource(
            self.stream,
            self.encoder,
            self.backend,
            self.learner.weights,
            self.metrics,
            self.settings.stage2.max_staleness,
            self.arguments.max_steps,
        )

    # Engines

    @cached_property
    def own_backend(self) -> HuggingFaceBackend:
        """The learner itself, which generates with transformers."""
        model, table = self.learner.current_model, self.answers.table
        return HuggingFaceBackend(model, self.prompts, table, self.contract.decode_batch_size)

    @cached_property
    def backend(self) -> RolloutBackend:
        """The backend that the settings name. In a run without rollouts only evaluation needs one."""
        settings, rollout, learner = self.settings, self.contract, self.learner
        if settings.backend == "hf":
            return self.own_backend
        added = find_extensions("rollout_backends", taken=frozenset(BACKENDS))
        if settings.backend in added:
            backend: RolloutBackend = load_extension(added[settings.backend])(settings, self.training_set, learner)
            return backend
        setup = EngineSetup(
            Path(settings.model.path),
            learner.dtype,
            rollout,
            self.answers.table,
            learner.device,
            learner.precision,
            image_size=read_image_size(self.prompts.processor),
            has_image_limits=bool(settings.model.image_limits),
        )
        adapter = learner.adapter_weights if learner.has_plain_adapter else None
        probes = self.training_set.find_images(PROBED_IMAGES, self.quarantine)
        if rollout.vllm.mode == "server":
            from coordexp.servers.backend import ServerBackend  # httpx is needed only here

            if self.arguments.device.type == "cuda":
                check_vllm(settings.backend_setting)  # weights are sent over its NCCL
            return ServerBackend(
                setup,
                self.prompts,
                self.own_backend,
                probes=probes,
                notify=say,
                record=ServerLog(self.folder, self.rank, self.prometheus.count),
                adapter=adapter,
            )
        return ColocateBackend(
            setup,
            self.prompts,
            self.own_backend,
            probes=probes,
            room=learner.offload,
            notify=say if self.rank == 0 else ignore,
            adapter=adapter,
            record=RolloutFacts(self.folder) if self.rank == 0 else ignore,
        )

    # What the run reports

    @cached_property
    def prometheus(self) -> PrometheusFile:
        return PrometheusFile(self.folder, self.stream)

    @cached_property
    def sinks(self) -> Sinks:
        sinks: list[Sink] = [self.metrics_file, self.prometheus, self.bar]
        if self.contract.packing:
            sinks.append(FillWarning(self.contract.packing_min_fill_ratio))
        trackers = find_trackers(self.settings)
        if "tensorboard" in trackers:
            sinks.append(TensorBoard(self.folder))
        if "wandb" in trackers:
            sinks.append(Wandb(self.folder, self.arguments.run_name, self.settings.model_dump(mode="json")))
        return Sinks(sinks)

    @cached_property
    def dumps(self) -> DumpWriter | None:
        """The writer of dumps, or None on other ranks than rank 0, and in a run that dumps nothing."""
        stage2 = self.settings.stage2
        if not stage2.dump_every or "B" not in self.settings.channels or self.rank != 0:
            return None
        return DumpWriter(
            DumpFolder(self.folder / FOLDER, Path(self.settings.model.path)),
            self.training_set.order,
            self.training_set.settings,
            self.settings.training.seed,
            stage2.dump_every,
            stage2.dump_samples,
        )

    # Training and evaluation

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        custom, held_out = self.settings.custom, self.held_out
        asking = Asking(self.folder, custom.eval_samples, self.stop.agree_to_stop, self.bar.show_evaluation)
        evaluations: list[Evaluation] = []
        if held_out.records is not None and self.settings.evaluates:
            evaluations.append(
                AnswerEvaluation(
                    held_out.records,
                    self.questions,
                    self.backend,
                    self.learner.weights,
                    self.answers,
                    self.contract,
                    asking,
                    self.sinks.show,
                    custom.eval_images,
                )
            )
        if self.settings.evaluates_chat:
            evaluations.append(ChatEvaluation(held_out.questions, self.own_backend, asking))
        return evaluations

    @cached_property
    def step(self) -> OptimizerStep:
        contract, threads = self.contract, self.settings.training.dataloader_num_workers
        collate = Collator.for_model(self.learner.base, self.prompts.pixels, self.objective.roles())
        return OptimizerStep(
            rollouts=self.rollouts,
            objective=self.objective,
            head=self.learner.head,
            loader=RowLoader(collate, threads, self.arguments.device),
            rollout_matching_cfg=contract,
            trace=TraceWriter(self.objective, self.dumps) if self.dumps else None,
            set_names=self.settings.custom.set_names,
        )

    @cached_property
    def trainer(self) -> RowTrainer:
        trainer = RowTrainer(
            learner=self.learner,
            step=self.step,
            evaluations=self.evaluations,
            stop=self.stop,
            checkpoint_hook=CheckpointHook.load(self.settings.custom.on_checkpoint),
            args=self.arguments,
            processing_class=self.prompts.processor,
            callbacks=[FirstSync(self.backend, self.learner, self.stop), self.sinks, self.stop],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer


def _begin_folder(parts: Assembly, loaded: Loaded, step: int) -> None:
    """On rank 0, write what is run to the run folder, and drop the metrics and dumps that the run will repeat."""
    if parts.rank != 0:
        return
    settings = loaded.settings
    asks_engine = settings.uses_rollouts or settings.backend == "vllm"
    rollouts = describe_rollouts(settings, parts.backend) if asks_engine else None
    data = {"train": parts.train} | parts.held_out.files
    write_run_folder(parts.folder, loaded, data, parts.objective.manifest(), rollouts)
    parts.metrics_file.cut(step)
    remove_from_step(parts.folder / FOLDER, step)


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
