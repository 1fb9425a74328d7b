"""Compare Stage 2 with other ways to train on incomplete labels, with paired seeds, and print tables.

    python tools/study.py headline --out STUDY
    python tools/study.py run --out STUDY [--regimes missing-50 complete] [--seeds 0 1 2] [--arms ...] [--jobs 2]
    python tools/study.py table --out STUDY [--regimes missing-50]

Run it from the root of the repository. `run` makes all arms of all regimes, in the order in which they answer the
main question, or a part of them, and whatever they need. `headline` makes the main result of docs/results.md from
nothing: two starts, the model before them, Stage 1 continued, Stage 2, and their table. What is complete is never
repeated, and what was interrupted is resumed when the same command is given again. Everything is kept:

    STUDY/scenes/, STUDY/base/        images and labels (`tools/study_data.py`), and the model before all starts
    STUDY/before/                     the answers of that model
    STUDY/REGIME/SEED/start/          Stage 1 on the labels of the regime; all arms of the seed begin with it
    STUDY/REGIME/SEED/ARM/            config.yaml, run/ of `coordexp train`, log.txt, seconds.jsonl
    STUDY/REGIME/SEED/ARM/test/       its answers to test.jsonl

A seed chooses the labels that are removed, the order of the start and the order of the arms. All starts are
trained from one model: that of `--from`, or a base that learns from random weights on other images with half of
their labels. The headline takes the model of examples/stage2-cpu, which has seen complete labels.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import frozen_rollouts
from study_arms import (
    ARMS,
    BUILDS_ON,
    COMPLETE_ARMS,
    OPTIONAL_ARMS,
    SELF_TRAINING,
    Settings,
    describe_arms,
    parse_setting,
    write_config,
)
from study_data import (
    LESSONS,
    REGIMES,
    SIZES,
    THINNED,
    Lesson,
    Size,
    make_lesson,
    make_scenes,
    thin_labels,
)
from study_jobs import Command, Job, run_jobs
from study_table import write_tables

from coordexp.errors import UserError
from coordexp.train.checkpoints import MANIFEST

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs/demo"
EXAMPLE = ROOT / "examples/stage2-cpu/model"
MAX_NEW_TOKENS = 400
PREDICT = ("--batch", "64", "--max-new-tokens", str(MAX_NEW_TOKENS))
# How self-training labels images: four answers, which close late. Two of them must have an object.
ANSWERS = 4
LABELLING = ("--stop-bias", "2", "--dedup", "0.5", "--samples", str(ANSWERS - 1), "--temperature", "0.7")
TWO_AGREE = "0.26"  # the score of one answer is at most 1 / 4
GRPO = ("--images-per-step", "2", "--group", "8", "--learning-rate", "3e-4", "--ignore-unmatched")
START: Settings = {"custom.curriculum": [], "training.learning_rate": 1e-3, "training.warmup_steps": 20}


@dataclass(frozen=True)
class Study:
    """The folder of a study, its size, the model before all starts unless that is the base, and the Python that
    has TRL, if any."""

    folder: Path
    size: Size
    source: Path | None = None
    trl: Path | None = None

    @property
    def scenes(self) -> Path:
        return self.folder / "scenes"

    @property
    def before(self) -> Path:
        """The model that all starts are trained from."""
        *_, (name, lesson) = LESSONS.items()
        return self.source or self.folder / "base" / name / f"run/checkpoint-{self.count_steps(lesson)}"

    @property
    def before_is_made(self) -> Path:
        """The file that is there when that model is."""
        return self.before / ("config.json" if self.source else MANIFEST)

    def count_steps(self, lesson: Lesson) -> int:
        return max(2, round(self.size.lesson_scale * lesson.steps))

    def plan_base(self) -> Iterator[Job]:
        """Yield the jobs that train the base: each lesson goes on with the model of the one before."""
        if self.source:
            return
        model, ready = self.folder / "base/model", self.folder / "base/model/processor_config.json"
        make = Command(coordexp("demo", "model", "--out", str(model), "--scenes"), ready, leftover=model)
        yield Job("base, random weights", model.with_name("random"), (make,))
        for name, lesson in LESSONS.items():
            folder, steps = self.folder / "base" / name, self.count_steps(lesson)
            make_lesson(folder / "scenes", lesson, self.size.lesson_scale)
            settings = describe_run(folder, model, folder / "scenes" / THINNED, steps, seed=0)
            job = Job(f"base, lesson {name}", folder, (), (ready,))
            yield plan_training(job, DEMO / lesson.config, settings | {"custom.curriculum": []})
            model = folder / f"run/checkpoint-{steps}"
            ready = model / MANIFEST

    def plan_before(self, splits: Sequence[str]) -> Job:
        """Return the job that answers with the model before all starts."""
        job = Job("the model before", self.folder / "before", (), (self.before_is_made,))
        return self.add_answers(job, self.before, splits)

    def add_answers(self, job: Job, model: Path, splits: Sequence[str]) -> Job:
        """Return the job with commands that answer the images of these splits with its result."""
        commands = job.commands
        for split in splits:
            preds = job.folder / split / "preds.json"
            words = predict(model, self.scenes / f"{split}.jsonl", preds)
            commands += (Command(words, preds.with_suffix(".answers.jsonl")),)
        return replace(job, commands=commands)


@dataclass(frozen=True)
class Cell:
    """The runs of a regime and a seed."""

    study: Study
    regime: str
    seed: int

    @property
    def folder(self) -> Path:
        return self.study.folder / self.regime / str(self.seed)

    def count_steps(self, arm: str) -> int:
        size = self.study.size
        if arm == "start":
            return size.start_steps
        return int(describe_arms(self.regime, size.steps).get(arm, {}).get("training.max_steps", size.steps))

    def find_model(self, arm: str) -> Path:
        if arm == "interpolated":
            return self.folder / arm / "model"
        return self.folder / arm / f"run/checkpoint-{self.count_steps(arm)}"

    def plan(self, arm: str, splits: Sequence[str], changes: Settings | None = None, name: str = "") -> Job:
        """Return the job that makes an arm and lets it answer the images of these splits. `changes` are further
        settings of an arm with a name of its own."""
        plans = {"start": self.plan_start, "interpolated": self.plan_interpolated, "grpo": self.plan_grpo}
        job = plans[arm]() if arm in plans else self.plan_arm(arm, changes or {}, name or arm)
        return self.study.add_answers(job, job.commands[-1].makes.parent, splits)

    def plan_start(self) -> Job:
        model, steps = self.study.before, self.count_steps("start")
        settings = describe_run(self.folder / "start", model, self.make_labels(), steps, self.seed) | START
        job = self.begin("start", self.study.before_is_made)
        return plan_training(job, DEMO / "stage2-start-cpu.yaml", settings)

    def plan_arm(self, arm: str, changes: Settings, name: str) -> Job:
        """Return the job that trains an arm with further changes of its settings, under a name of its own."""
        folder, start, labels = self.folder / name, self.find_model("start"), self.make_labels()
        job = self.begin(name, start / MANIFEST)
        if arm in SELF_TRAINING:
            teacher = self.find_model(BUILDS_ON.get(arm, "start"))
            job = replace(job, needs=(*job.needs, teacher / MANIFEST))
            job = replace(job, commands=tuple(complete_labels(folder, teacher, labels)))
            labels = folder / "completed.jsonl"
        settings = describe_run(folder, start, labels, self.study.size.steps, seed=100 + self.seed)
        settings |= describe_arms(self.regime, self.study.size.steps)[arm] | changes
        return plan_training(job, DEMO / "stage2-hf.yaml", settings)

    def plan_interpolated(self) -> Job:
        model, continued = self.find_model("interpolated"), self.find_model("continued")
        words = (sys.executable, str(ROOT / "tools/average_weights.py"))
        words += (str(continued), str(self.study.before), str(model))
        job = self.begin("interpolated", continued / MANIFEST)
        return replace(job, commands=(Command(words, model / "model.safetensors", leftover=model),))

    def plan_grpo(self) -> Job:
        """Return the job that trains with GRPO. It cannot resume."""
        start, model = self.find_model("start"), self.find_model("grpo")
        words = (str(self.study.trl), str(ROOT / "tools/grpo.py"), "--model", str(start), *GRPO)
        words += ("--train", str(self.make_labels()), "--out", str(model.parent))
        words += ("--steps", str(self.study.size.steps), "--seed", str(self.seed))
        job = self.begin("grpo", start / MANIFEST)
        return replace(job, commands=(Command(words, model / "coordexp.json", leftover=model.parent),))

    def begin(self, arm: str, *needs: Path) -> Job:
        return Job(f"{self.regime}, seed {self.seed}, {arm}", self.folder / arm, (), needs)

    def make_labels(self) -> Path:
        return thin_labels(self.study.scenes, self.regime, self.seed)


def describe_run(folder: Path, model: Path, labels: Path, steps: int, seed: int) -> Settings:
    """Return the settings of a run that are not those of its arm."""
    return {
        "model.path": str(model),
        "custom.train_jsonl": str(labels),
        "custom.val_jsonl": None,
        "training.output_dir": str(folder / "run"),
        "training.seed": seed,
        "training.max_steps": steps,
        "training.eval_strategy": "no",
        "training.save_steps": 50,
        "training.save_total_limit": 1,
        "training.report_to": "none",
        "rollout_matching.max_new_tokens": MAX_NEW_TOKENS,
    }


def plan_training(job: Job, base: Path, settings: Settings) -> Job:
    """Return the job with a command that trains with these settings."""
    config = write_config(job.folder / "config.yaml", base, settings)
    made = job.folder / f"run/checkpoint-{settings['training.max_steps']}" / MANIFEST
    words = coordexp("train", "--resume", "--config", str(config))
    return replace(job, commands=(*job.commands, Command(words, made)))


def complete_labels(folder: Path, teacher: Path, labels: Path) -> Iterator[Command]:
    """Yield the commands with which a model completes labels: objects that two of its answers agree on."""
    preds, found, completed = folder / "found.json", folder / "found", folder / "completed.jsonl"
    yield Command(predict(teacher, labels, preds, *LABELLING), preds.with_suffix(".samples.jsonl"))
    words = ("--data", str(labels), "--preds", str(preds), "--samples", str(ANSWERS - 1), "--page-limit", "1")
    page = found / "complete.html"
    yield Command(coordexp("data", "suggest", *words, "--out", str(found)), page, leftover=found)
    words = ("--data", str(labels), "--suggestions", str(found / "suggestions.jsonl"))
    words += ("--accept-above", TWO_AGREE, "--out", str(completed))
    yield Command(coordexp("data", "complete", *words), completed)


def predict(model: Path, data: Path, preds: Path, *options: str) -> tuple[str, ...]:
    words = ("--model", str(model), "--data", str(data), "--out", str(preds))
    return coordexp("predict", "--resume", *words, *PREDICT, *options)


def coordexp(*words: str) -> tuple[str, ...]:
    return sys.executable, "-m", "coordexp", *words


def list_cells(study: Study, regimes: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return the cells: all seeds of the first regime and of complete labels, then one seed after the other."""
    first = {regimes[0], "complete"}
    pairs = [(regime, seed) for seed in seeds for regime in regimes]
    return [Cell(study, *pair) for pair in sorted(pairs, key=lambda pair: pair[0] not in first)]


def list_needed(arms: Sequence[str]) -> list[str]:
    """Return the arms and those that they build on, in the order in which they are made."""
    needed = {"start", *arms}
    while missing := {BUILDS_ON[arm] for arm in needed if arm in BUILDS_ON} - needed:
        needed |= missing
    return [arm for arm in (*ARMS, *OPTIONAL_ARMS) if arm in needed]


def make(study: Study, plans: Sequence[tuple[Cell, Sequence[str]]], side_by_side: int, **of_arm: Any) -> None:
    """Make arms of cells, and what they need. `of_arm` are the arguments of `Cell.plan`; changes are for the arms
    that are named, and not for what they need."""
    study.folder.mkdir(parents=True, exist_ok=True)
    make_scenes(study.scenes, study.size)
    plugin = study.folder / "plugin"
    frozen_rollouts.install(plugin)
    splits = of_arm["splits"]
    jobs = [*study.plan_base(), study.plan_before(splits)]
    for cell, arms in plans:
        jobs += [cell.plan(arm, **of_arm) if arm in arms else cell.plan(arm, splits) for arm in list_needed(arms)]
    paths = (str(plugin.resolve()), os.environ.get("PYTHONPATH", ""))
    run_jobs(jobs, side_by_side, {"PYTHONPATH": os.pathsep.join(filter(None, paths))})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, required=True, metavar="STUDY", help="The folder of the study.")
    making = argparse.ArgumentParser(add_help=False)
    making.add_argument("--jobs", type=int, default=2, help="Runs side by side, with one thread each.")
    making.add_argument("--size", choices=SIZES, help="Unset: small; full for the headline.")
    making.add_argument("--from", type=Path, dest="source", metavar="MODEL", help="The model before all starts.")

    commands.add_parser("headline", parents=[shared, making], help="Make the main result, with one seed.")
    run = commands.add_parser("run", parents=[shared, making], help="Make the study, or a part of it.")
    run.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--arms", nargs="+", choices=(*ARMS, *OPTIONAL_ARMS), help="Unset: all, without `long`.")
    run.add_argument("--splits", nargs="+", choices=("test", "val"), default=["test"], help="Images to answer.")
    run.add_argument("--base-scale", type=float, help="Of the images and steps of the base. Unset: 1.")
    run.add_argument("--trl", type=Path, metavar="PYTHON", help="A Python with TRL, for `grpo`.")
    run.add_argument("--name", help="What to call an arm with other settings.")
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="Another setting; needs --name."
    )
    table = commands.add_parser("table", parents=[shared], help="Print the results as Markdown.")
    table.add_argument("--regimes", nargs="+", choices=REGIMES, help="Unset: all that were made.")
    table.add_argument("--split", choices=("test", "val"), default="test")
    table.add_argument("--against", default="continued", metavar="ARM", help="What the others are compared with.")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Make the study, or the part of it that the options ask for."""
    if bool(options.set) != bool(options.name) or (options.name and len(options.arms or ()) != 1):
        raise UserError("--set and --name belong together, with one arm", "give the changed arm a --name")
    if options.name in (*ARMS, *OPTIONAL_ARMS):
        raise UserError(f"--name {options.name} is an arm", "give another --name")
    if options.set and options.arms[0] not in describe_arms("complete", 1):
        raise UserError(f"--set: {options.arms[0]} is not trained with `coordexp train`", "change another arm")
    if options.trl is None and "grpo" in (options.arms or ()):
        raise UserError("grpo needs TRL, which is not part of the environment", "give --trl PYTHON")
    size = SIZES[options.size or "small"]
    size = replace(size, lesson_scale=options.base_scale or size.lesson_scale)
    study = Study(options.out, size, options.source, options.trl)
    arms = options.arms or [arm for arm in ARMS if arm != "grpo" or options.trl]
    plans = [
        (cell, [arm for arm in arms if arm in COMPLETE_ARMS or cell.regime != "complete"])
        for cell in list_cells(study, options.regimes, options.seeds)
    ]
    changes = dict(parse_setting(text) for text in options.set)
    make(study, plans, options.jobs, splits=options.splits, changes=changes, name=options.name or "")


def make_headline(options: argparse.Namespace) -> str:
    """Make the main result from nothing, with one seed, and return its table."""
    study = Study(options.out, SIZES[options.size or "full"], options.source or Path(os.path.relpath(EXAMPLE)))
    plans = [(Cell(study, "missing-50", 0), COMPLETE_ARMS), (Cell(study, "complete", 0), ("start",))]
    make(study, plans, options.jobs, splits=("test",))
    return write_tables(options.out, ["missing-50"], "test", "continued")


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, exit_on_signal)
    if options.command == "headline":
        print(make_headline(options))
    elif options.command == "run":
        run(options)
    else:
        print(write_tables(options.out, options.regimes, options.split, options.against))


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
