"""Assemble a run from its settings: data, learner, rollout backend, objective, trainer."""

import math
import os
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import set_seed

from coordexp.answers.formats import AnswerFormat, load_format
from coordexp.config import Loaded, Settings
from coordexp.config.rollout import BACKENDS
from coordexp.config.rules import trains_chat
from coordexp.config.training import PACKING_KEYS, REFUSED
from coordexp.data import Questions
from coordexp.data.sets import locate_image
from coordexp.dumps import FOLDER, DumpFolder, DumpWriter, remove_from_step
from coordexp.errors import UserError
from coordexp.extensions import find_extensions, load_extension
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
from coordexp.train.checkpoints import step_of
from coordexp.train.data import RunData, describe_identity, make_order
from coordexp.train.encode import Encoder, TrainingSet
from coordexp.train.evaluation import AnswerEvaluation, Asking, ChatEvaluation
from coordexp.train.folder import ServerLog, describe_rollouts, record_rollouts, write_run_folder
from coordexp.train.learner import Learner
from coordexp.train.metrics import StepMetrics, TraceWriter
from coordexp.train.quarantine import Quarantine
from coordexp.train.rollouts import RolloutSource
from coordexp.train.sinks import MetricsFile, PrometheusFile, Sink, Sinks, TensorBoard, Wandb
from coordexp.train.step import OptimizerSteps, RowLoader
from coordexp.train.stopping import StopOnSignal, Stopped
from coordexp.train.stream import RowStream
from coordexp.train.terminal import AnswerWarning, Bar, FillWarning
from coordexp.train.trainer import Evaluation, FirstSync, RowTrainer

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunOutcome:
    steps: int
    stopped_by: int | None  # a signal
    folder: Path
    saved: bool = True  # the last step is in a checkpoint


def _step_of(checkpoint: Path | None) -> int:
    return (step_of(checkpoint) or 0) if checkpoint else 0


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
        stop = trainer.stop
        stop.listen()
        with closing(stop), closing(trainer.backend), closing(self.bar), suppress(Stopped):
            trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        steps = trainer.state.global_step
        return RunOutcome(steps, stop.stopped_by, self.folder, saved=trainer.saved == steps)


def prepare(loaded: Loaded, checkpoint: Path | None = None) -> PreparedRun:
    """Load and check everything that a run needs. It continues from the checkpoint that rank 0 gives, if any."""
    settings = loaded.settings
    folder = Path(settings.training.output_dir)
    data = RunData.open(settings.custom)
    arguments = training_arguments(settings, len(data.train))
    together(partial(data.check, settings) if arguments.process_index == 0 else ignore)
    name = gather_texts(checkpoint.name if checkpoint else "")[0]
    checkpoint = folder / name if name else None
    step = _step_of(checkpoint)
    if checkpoint is not None and step >= arguments.max_steps:
        return PreparedRun(folder, checkpoint)
    set_seed(settings.training.seed)
    parts = Assembly(settings, arguments, data)
    trainer = parts.trainer
    if checkpoint is not None:
        parts.rollouts.load(checkpoint)
        trainer.saved, trainer.rotation_is_due = step, True
    together(partial(_begin_folder, parts, loaded, step))
    return PreparedRun(folder, checkpoint, trainer, parts.bar)


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

    def __init__(self, settings: Settings, arguments: TrainingArguments, data: RunData) -> None:
        self.settings, self.arguments, self.data = settings, arguments, data
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
        files = [file for records in self.data.files.values() for file in records.files]
        processor = load_processor(Path(model.path), model.image_limits)
        return PromptBuilder(processor, self.questions.of_run, partial(locate_image, files))

    @cached_property
    def training_set(self) -> TrainingSet:
        return TrainingSet(
            self.data.train,
            self.prompts,
            self.answers,
            self.contract,
            self.settings.custom,
            trains_chat(self.settings),
        )

    # The model and its loss

    @cached_property
    def learner(self) -> Learner:
        requests = self.data.find_requests(self.settings.custom)
        note = asdict(self.questions) | {"answer_format": self.answers.name, "requests": requests}
        return Learner(self.settings, self.arguments, self.answers.table.coord_start, note)

    @cached_property
    def objective(self) -> Objective:
        return Objective(self.settings, self.answers.table.coord_start)

    # From records to examples

    @cached_property
    def stream(self) -> RowStream:
        training, contract = self.settings.training, self.contract
        order = make_order(self.settings, self.data.train, self.rank, self.arguments.world_size)
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
            identity=describe_identity(self.settings, self.data.train),
            measure_truth=self.training_set.measure_truth,
            quarantine=self.quarantine,
        )

    @cached_property
    def quarantine(self) -> Quarantine | None:
        most = self.settings.custom.broken_images
        return Quarantine(self.data.train, self.folder, most) if most else None

    @cached_property
    def encoder(self) -> Encoder:
        settings = self.settings
        if settings.channels == {"A", "B"}:
            b_ratio = Fraction(str(settings.stage2.b_ratio))
        else:
            b_ratio = Fraction("B" in settings.channels)
        return Encoder(
            self.training_set,
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
            record=partial(record_rollouts, self.folder) if self.rank == 0 else ignore,
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
        if not self.contract.noise.enabled:  # such answers have as many mistakes as the settings say
            sinks.append(AnswerWarning())
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
            stage2.dump_every,
            stage2.dump_samples,
        )

    # Training and evaluation

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        custom, data = self.settings.custom, self.data
        asking = Asking(self.folder, custom.eval_samples, self.stop.agree_to_stop, self.bar.show_evaluation)
        evaluations: list[Evaluation] = []
        if data.held_out is not None and self.settings.evaluates:
            evaluations.append(
                AnswerEvaluation(
                    data.held_out,
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
            evaluations.append(ChatEvaluation(data.questions, self.own_backend, asking))
        return evaluations

    @cached_property
    def steps(self) -> OptimizerSteps:
        contract, threads = self.contract, self.settings.training.dataloader_num_workers
        collate = Collator.for_model(self.learner.base, self.prompts.pixels, self.objective.roles())
        return OptimizerSteps(
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
            steps=self.steps,
            evaluations=self.evaluations,
            stop=self.stop,
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
    write_run_folder(parts.folder, loaded, parts.data.files, parts.objective.manifest(), rollouts)
    parts.metrics_file.cut(step)
    remove_from_step(parts.folder / FOLDER, step)
