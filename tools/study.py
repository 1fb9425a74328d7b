"""Compare Stage 2 with Stage 1 continued on several kinds of data, with seeds, and print tables of the results.

    python tools/study.py headline --out STUDY

    python tools/study.py data  --out STUDY --regime missing-50
    python tools/study.py start --out STUDY --regime missing-50
    python tools/study.py run   --out STUDY --regime missing-50 --variant continued stage2 --seeds 0 1 2 --jobs 2
    python tools/study.py answer --out STUDY --regime missing-50 --of stage2 --name dedup --predict '--dedup 0.5'
    python tools/study.py table --out STUDY --regime missing-50

Run it from the root of the repository. `headline` makes the main result of docs/results.md from nothing: two
starts, the model before them, Stage 1 continued, Stage 2, and their table. The other commands make what they need
and do not find: `run` makes the start, and `start` the data. What is complete is never repeated, and what was
interrupted is resumed when the same command is given again. Everything is kept:

    STUDY/sources/, STUDY/REGIME/data/             images and records (`tools/study_data.py`)
    STUDY/REGIME/before-start/                     the model that the start is trained from, and its answers
    STUDY/REGIME/start/                            Stage 1 on the labels of the regime; all runs begin with it
    STUDY/REGIME/steps-STEPS/VARIANT-SEED/         a run folder of `coordexp train`
    STUDY/REGIME/steps-STEPS/VARIANT-SEED/test/    its answers to test.jsonl, and what `coordexp evaluate` says

During a run, val.jsonl is evaluated. Choose settings there (`table --split val`) and report test.jsonl (`table`).
"""

import argparse
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import yaml
from study_data import REGIMES, find_complete, make_data
from study_table import draw_curves, write_tables

from coordexp.errors import UserError
from coordexp.files import write_whole
from coordexp.train.checkpoints import checkpoints, is_finished

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples/stage2-cpu/model"
STAGE1_CONFIG = ROOT / "configs/demo/stage2-start-cpu.yaml"
STAGE2_CONFIG = ROOT / "configs/demo/stage2-hf.yaml"
START_STEPS = 700
SAVE_EVERY = 50
PREDICT_BATCH = 64
FIRST_SEED = 100  # training.seed of seed 0
POLL_S = 0.2
EXPONENT = re.compile(r"[-+]?\d+e[-+]?\d+")  # a number for us, but text for PyYAML

Settings = dict[str, Any]  # by dotted key

# Up to 40 objects take 1,400 tokens. A step has half as many images as in other regimes, and more objects.
LONG_ANSWERS: Settings = {
    "global_max_length": 4096,
    "rollout_matching.max_new_tokens": 1450,
    "training.per_device_train_batch_size": 8,
}
SHORT_ANSWERS: Settings = {"rollout_matching.max_new_tokens": 400}
ANSWERS = {"crowded": LONG_ANSWERS, "digits": LONG_ANSWERS}  # by source

START: Settings = {
    "custom.curriculum": [],
    "training.learning_rate": 1e-3,
    "training.warmup_steps": 20,
}
ALONE: Settings = {"custom.trainer_variant": "stage2_rollout_aligned", "stage2.b_ratio": None}
TWO_CHANNELS: Settings = {"custom.trainer_variant": "stage2_two_channel", "stage2.b_ratio": 0.5}
SLOW: Settings = {"training.learning_rate": 1e-4}
FAST: Settings = {"training.learning_rate": 3e-4}
FASTEST: Settings = {"training.learning_rate": 1e-3}  # that of the starts
CORRECTION = "rollout_matching.correction"
AS_SPECIFIED: Settings = {
    f"{CORRECTION}.duplicates": "keep",
    f"{CORRECTION}.extras": "keep",
    f"{CORRECTION}.insertion": "append",
    f"{CORRECTION}.supervise": "missed",
}
IN_ORDER: Settings = {
    f"{CORRECTION}.duplicates": "remove",
    f"{CORRECTION}.extras": "keep",
    f"{CORRECTION}.insertion": "reading_order",
    f"{CORRECTION}.supervise": "matched",
}
SAMPLED: Settings = {"rollout_matching.decoding.temperature": 0.7}
BEST_OF_4: Settings = SAMPLED | {"rollout_matching.rollouts_per_sample": 4}

# A key `objective.MODULE.KEY` sets the weight, or a key of the config, of a module of the objective.
VARIANTS: dict[str, Settings] = {
    "continued": TWO_CHANNELS | FASTEST | {"stage2.b_ratio": 0.0},
    "stage2": ALONE | SLOW | AS_SPECIFIED,
    "two-channel": TWO_CHANNELS | FAST | AS_SPECIFIED,
    "append-clean": ALONE | SLOW | IN_ORDER | {f"{CORRECTION}.insertion": "append"},
    "in-order": ALONE | SLOW | IN_ORDER,
    "in-order-fast": ALONE | FAST | IN_ORDER,
    "in-order-duplicates": ALONE
    | SLOW
    | IN_ORDER
    | {f"{CORRECTION}.duplicates": "keep", f"{CORRECTION}.supervise": "missed"},
    "in-order-desc": ALONE | SLOW | IN_ORDER | {f"{CORRECTION}.supervise": "matched_with_desc"},
    "in-order-no-extras": ALONE | SLOW | IN_ORDER | {f"{CORRECTION}.extras": "remove"},
    "in-order-two-channel": TWO_CHANNELS | FAST | IN_ORDER,
    "in-order-sampled": ALONE | SLOW | IN_ORDER | SAMPLED,
    "in-order-best-of-4": ALONE | SLOW | IN_ORDER | BEST_OF_4,
    "in-order-union": ALONE | SLOW | IN_ORDER | BEST_OF_4 | {"rollout_matching.choice.rule": "union"},
    "in-order-pseudo-labels": ALONE
    | SLOW
    | IN_ORDER
    | BEST_OF_4
    | {"rollout_matching.choice.rule": "union", "rollout_matching.choice.pseudo_labels": True},
    "noise": ALONE | SLOW | IN_ORDER | {"rollout_matching.noise.enabled": True},
    # What docs/correction.md recommends. The rest depends on the share of objects that are labelled.
    "recommended": ALONE | FASTEST | IN_ORDER | {f"{CORRECTION}.supervise": "matched_with_desc"},
}
HEADLINE = ("continued", "recommended")
HEADLINE_REGIME = "missing-50"
HEADLINE_STEPS = 200
DEDUP = ("--dedup", "0.5")


@dataclass(frozen=True)
class Job:
    """Commands that run one after the other, and the file that gets their output."""

    name: str
    log: Path
    commands: tuple[tuple[str, ...], ...]


class RunningJob:
    """A job that has begun. Its log is locked as long as a process of it lives, so nobody else makes the run."""

    def __init__(self, job: Job, log: TextIO) -> None:
        self.job, self._log = job, log
        self._commands = deque(job.commands)
        self._process = self._begin_next()

    def poll(self) -> int | None:
        """Return the exit code of the job if it has ended. Begin its next command if the last one succeeded."""
        code = self._process.poll()
        if code == 0 and self._commands:
            self._process = self._begin_next()
            return None
        if code is not None:
            self._log.close()
        return code

    def stop(self) -> None:
        """Let the current command save what it has, and wait for its end."""
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _begin_next(self) -> subprocess.Popen[bytes]:
        command = self._commands.popleft()
        print(f"{time.strftime('%H:%M:%S')} {self.job.name}: {command[0]}", file=sys.stderr, flush=True)
        return subprocess.Popen(
            [sys.executable, "-m", "coordexp", *command],
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the job
        )


def lock_log(file: Path) -> TextIO | None:
    """Open a log to write to, or return None if another process makes the run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    log = file.open("a")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        return None
    return log


def run_jobs(plans: Sequence[Job | None], side_by_side: int) -> None:
    """Run all jobs; None stands for nothing left to do. If some fail, or another process runs them, run the others
    all the same, and raise UserError at the end."""
    jobs = [job for job in plans if job]
    waiting, running = deque(jobs), list[RunningJob]()
    failed, busy = list[Job](), list[Job]()
    try:
        while waiting or running:
            while waiting and len(running) < side_by_side:
                job = waiting.popleft()
                if log := lock_log(job.log):
                    running.append(RunningJob(job, log))
                else:
                    busy.append(job)
            time.sleep(POLL_S)
            ended = [(process, code) for process in running if (code := process.poll()) is not None]
            failed += [process.job for process, code in ended if code != 0]
            for process, _ in ended:
                running.remove(process)
    finally:
        for process in running:
            process.stop()
    if busy:
        names = "; ".join(job.name for job in busy)
        raise UserError(f"another process makes {names}", "wait until it ends, and give this command again")
    if failed:
        logs = ", ".join(str(job.log) for job in failed)
        raise UserError(f"{len(failed)} of {len(jobs)} failed", f"see the end of {logs}")


@dataclass(frozen=True)
class Study:
    """The folder of a study and one of its regimes."""

    folder: Path
    regime: str

    @property
    def data(self) -> Path:
        return self.folder / self.regime / "data"

    @property
    def start(self) -> Path:
        return self.folder / self.regime / "start"

    def choose_settings(self, variant: str) -> Settings:
        """Return the settings of a variant for the labels of this regime."""
        if variant != "recommended":
            return VARIANTS[variant]
        share = REGIMES[self.regime].labelled_share
        extras = "remove" if share == 1 else "keep"
        return VARIANTS[variant] | {f"{CORRECTION}.extras": extras, f"{CORRECTION}.closing_weight": share}

    @property
    def answers(self) -> Settings:
        """The settings that depend on the length of the answers."""
        return ANSWERS.get(REGIMES[self.regime].source, SHORT_ANSWERS)

    def make_data(self, train: int | None = None, held_out: int | None = None) -> None:
        if not (self.data / "train.jsonl").is_file():
            make_data(self.folder, self.regime, train, held_out)

    def find_start(self) -> Path | None:
        """Return the model that all runs of the regime begin with, or None if it is not complete."""
        if self.regime == "few":
            return MODEL
        return find_result(self.start)

    def plan_before_start(self) -> Job | None:
        """Return what is left to do for the model that the start is trained from: answer the test images. It has
        learned other scenes with all labels."""
        if self.regime == "few":  # that model is the start
            return None
        return self.make_job("before the start", self.data.with_name("before-start"), MODEL, (), test=True)

    def plan_start(self, steps: int, eval_every: int) -> Job | None:
        """Return what is left to do for the start: train it on the labels of the regime, and answer the test
        images."""
        if self.regime == "few":  # its start is the model of the example
            return self.make_job("start", self.start, MODEL, (), test=True)
        settings = (
            START | {"model.path": relative(MODEL)} | self.describe_run(self.start, steps, eval_every, seed=0)
        )
        config = write_config(self.start, STAGE1_CONFIG, settings)
        commands = () if find_result(self.start) else (train(config),)
        return self.make_job("start", self.start, self.start / f"checkpoint-{steps}", commands, test=True)

    def plan_run(
        self, name: str, seed: int, settings: Settings, *, steps: int, eval_every: int, test: bool = True
    ) -> Job | None:
        """Return what is left to do for a run, or None if it is complete."""
        folder = self.folder / self.regime / f"steps-{steps}" / f"{name}-{seed}"
        start = self.find_start()
        assert start is not None
        settings = self.describe_run(folder, steps, eval_every, seed) | settings
        config = write_config(folder, STAGE2_CONFIG, {"model.path": relative(start)} | settings)
        commands = () if find_result(folder) else (train(config),)
        return self.make_job(f"{name}, seed {seed}", folder, folder / f"checkpoint-{steps}", commands, test=test)

    def describe_run(self, folder: Path, steps: int, eval_every: int, seed: int) -> Settings:
        """Return the settings of a run that are not those of its variant."""
        return self.answers | {
            "custom.train_jsonl": str(self.data / "train.jsonl"),
            "custom.val_jsonl": str(self.data / "val.jsonl"),
            "training.output_dir": str(folder),
            "training.seed": FIRST_SEED + seed,
            "training.max_steps": steps,
            "training.eval_steps": eval_every,
            "training.save_steps": SAVE_EVERY,
            "training.save_total_limit": 1,
            "training.report_to": "none",
        }

    def make_job(
        self, name: str, folder: Path, model: Path, commands: tuple[tuple[str, ...], ...], *, test: bool
    ) -> Job | None:
        """Return the job that trains with `commands` and then answers and evaluates the test images, if it has
        anything to do."""
        if test:
            commands += tuple(self.list_answer_commands(model, folder, "test"))
        return Job(f"{self.regime}: {name}", add_suffix(folder, ".log"), commands) if commands else None

    def plan_answers(
        self, name: str, seed: int, of: str, *, steps: int, splits: Sequence[str], options: Sequence[str]
    ) -> Job | None:
        """Return the job that answers images with the result of a run, with other options than `run` has."""
        runs = self.folder / self.regime / f"steps-{steps}"
        folder, model = runs / f"{name}-{seed}", runs / f"{of}-{seed}" / f"checkpoint-{steps}"
        if not is_finished(model):
            raise UserError(f"{model} does not exist", f"make it with `study.py run --variant {of}` first")
        commands = [
            command for split in splits for command in self.list_answer_commands(model, folder, split, options)
        ]
        log = add_suffix(folder, ".log")
        return Job(f"{self.regime}: {name}, seed {seed}", log, tuple(commands)) if commands else None

    def list_answer_commands(
        self, model: Path, folder: Path, split: str, options: Sequence[str] = ()
    ) -> Iterator[tuple[str, ...]]:
        """Yield the commands that answer and evaluate the images of a split, if that has not been done."""
        preds, report = folder / split / "preds.json", folder / split / "report.json"
        if report.is_file():
            return
        data = str(self.data / f"{split}.jsonl")
        tokens = str(self.answers["rollout_matching.max_new_tokens"])
        limits = ("--batch", str(PREDICT_BATCH), "--max-new-tokens", tokens)
        yield "predict", "--resume", "--model", str(model), "--data", data, "--out", str(preds), *limits, *options
        yield "evaluate", "--data", data, "--preds", str(preds), "--out", str(report)


def train(config: Path) -> tuple[str, ...]:
    return "train", "--resume", "--config", str(config)


def find_result(folder: Path) -> Path | None:
    """Return the last checkpoint of a run that has reached its last step, or None."""
    config = add_suffix(folder, ".yaml")
    newest = next((path for path in checkpoints(folder) if is_finished(path)), None)
    if newest is None or not config.is_file():
        return None
    steps = yaml.safe_load(config.read_text())["training"]["max_steps"]
    return newest if newest.name == f"checkpoint-{steps}" else None


def write_config(folder: Path, base: Path, settings: Settings) -> Path:
    """Write the config of a run beside its folder. Raise UserError if the run has begun with other settings."""
    file = add_suffix(folder, ".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    tree: Settings = {}
    modules: dict[str, Settings] = {}
    for key, value in settings.items():
        if key.startswith("objective."):
            _, module, name = key.split(".")
            modules.setdefault(module, {})[name] = value
        else:
            put(tree, key, value)
    if modules:
        put(tree, "rollout_matching.pipeline", change_objective(base, modules))
    if file.is_file():
        before = yaml.safe_load(file.read_text())
        before.pop("extends")
        if before != tree:
            changed = ", ".join(list_differences(before, tree))
            raise UserError(
                f"{folder} has begun with other settings ({changed})", "give another --name, or remove that folder"
            )
    write_whole(file, yaml.safe_dump({"extends": [os.path.relpath(base, file.parent)]} | tree))
    return file


def change_objective(base: Path, modules: Mapping[str, Settings]) -> Settings:
    """Return the pipeline of a config with other weights and settings of its modules. A new one sees rollouts."""
    from coordexp.config import World, load_settings

    pipeline: Settings = load_settings(base, World(1)).settings.model_dump(mode="json")["rollout_matching"][
        "pipeline"
    ]
    for name, settings in modules.items():
        module = next((module for module in pipeline["objective"] if module["name"] == name), None)
        if module is None:
            module = {"name": name, "enabled": True, "weight": 1.0, "channels": ["B"], "config": {}}
            pipeline["objective"].append(module)
        module["weight"] = settings.get("weight", module["weight"])
        module["config"] |= {key: value for key, value in settings.items() if key != "weight"}
    return pipeline


def put(tree: Settings, key: str, value: Any) -> None:
    """Set the value at a dotted key of a tree of settings."""
    *path, last = key.split(".")
    for name in path:
        tree = tree.setdefault(name, {})
    tree[last] = value


def list_differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys at which two trees of settings differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from list_differences(before.get(key), after.get(key), f"{path}.{key}".strip("."))
    elif before != after:
        yield path


def add_suffix(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}{suffix}")


def relative(path: Path) -> str:
    """Return a path as it is from here. Runs of different checkouts have then the same settings."""
    return os.path.relpath(path) if path.is_relative_to(ROOT) else str(path)


def parse_setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set {text}: no value", "write KEY=VALUE, e.g. training.learning_rate=3e-4")
    return key, float(value) if EXPONENT.fullmatch(value) else yaml.safe_load(value)


def make_start(study: Study, steps: int, eval_every: int) -> None:
    study.make_data()
    run_jobs([study.plan_before_start(), study.plan_start(steps, eval_every)], 1)


def make_runs(study: Study, options: argparse.Namespace) -> None:
    """Make all runs of the variants and seeds."""
    changes = dict(parse_setting(text) for text in options.set)
    if bool(changes) != bool(options.name) or (options.name and len(options.variant) > 1):
        raise UserError(
            "--set and --name belong together, with one --variant", "give the variant with these settings a --name"
        )
    if options.steps % options.eval_every:
        raise UserError(
            f"--steps {options.steps} is no multiple of --eval-every {options.eval_every}",
            "the last step has to be evaluated",
        )
    if study.find_start() is None:
        make_start(study, START_STEPS, START_STEPS)
    numbers = {"steps": options.steps, "eval_every": options.eval_every}
    plans = [
        study.plan_run(
            options.name or variant,
            seed,
            study.choose_settings(variant) | changes,
            **numbers,
            test=not options.no_test,
        )
        for seed in options.seeds
        for variant in options.variant
    ]
    run_jobs(plans, options.jobs)


def make_headline(folder: Path, options: argparse.Namespace) -> str:
    """Make the main result from nothing, with one seed, and return its table."""
    study = Study(folder, HEADLINE_REGIME)
    reference = Study(folder, find_complete(HEADLINE_REGIME))
    for one in (study, reference):
        one.make_data(options.train, options.held_out)
    starts = [one.plan_start(options.start_steps, options.start_steps) for one in (study, reference)]
    run_jobs([study.plan_before_start(), *starts], side_by_side=2)
    numbers = {"steps": options.steps, "eval_every": options.steps}
    runs = [study.plan_run(name, 0, study.choose_settings(name), **numbers) for name in HEADLINE]
    run_jobs(runs, side_by_side=2)
    answers = [
        study.plan_answers(f"{name}-dedup", 0, name, steps=options.steps, splits=["test"], options=DEDUP)
        for name in HEADLINE
    ]
    run_jobs(answers, side_by_side=2)
    return write_tables(folder, HEADLINE_REGIME, "test", [options.steps])


def answer_again(study: Study, options: argparse.Namespace) -> None:
    """Answer images with the results of runs, with other options of `coordexp predict`."""
    plans = [
        study.plan_answers(
            options.name,
            seed,
            options.of,
            steps=options.steps,
            splits=options.split,
            options=shlex.split(options.predict),
        )
        for seed in options.seeds
    ]
    run_jobs(plans, options.jobs)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, required=True, metavar="STUDY", help="The folder of the study.")
    shared.add_argument("--regime", choices=REGIMES, required=True)

    headline = commands.add_parser("headline", help="Make the main result from nothing, with one seed.")
    headline.add_argument("--out", type=Path, required=True, metavar="STUDY", help="The folder of the study.")
    headline.add_argument("--steps", type=int, default=HEADLINE_STEPS)
    headline.add_argument("--start-steps", type=int, default=START_STEPS)
    for option in ("--train", "--held-out"):
        headline.add_argument(option, type=int, help="Fewer images than usual, for a trial.")

    data = commands.add_parser("data", parents=[shared], help="Make the images and the records of a regime.")
    data.add_argument("--train", type=int, help="Training images; fewer than usual for a small study.")
    data.add_argument("--held-out", type=int, help="Held-out images; half of them are the test images.")

    start = commands.add_parser("start", parents=[shared], help="Train the model that all runs begin with.")
    start.add_argument("--steps", type=int, default=START_STEPS)
    start.add_argument("--eval-every", type=int, help="Steps between evaluations on val.jsonl. Unset: --steps.")
    start.add_argument(
        "--labels",
        choices=("regime", "complete"),
        default="regime",
        help="complete: the start of the regime that has the same images and all labels, for reference.",
    )

    run = commands.add_parser("run", parents=[shared], help="Train variants from the start and answer test.jsonl.")
    run.add_argument("--variant", nargs="+", choices=VARIANTS, required=True)
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--steps", type=int, default=100)
    run.add_argument("--eval-every", type=int, default=50, help="Steps between evaluations on val.jsonl.")
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="Another setting; needs --name."
    )
    run.add_argument("--name", help="What to call a variant with other settings.")
    run.add_argument("--jobs", type=int, default=1, help="Runs side by side, with one thread each.")
    run.add_argument("--no-test", action="store_true", help="Only evaluate on val.jsonl, to choose settings.")

    answer = commands.add_parser(
        "answer",
        parents=[shared],
        help="Answer with the results of runs again, with other options of `coordexp predict`.",
    )
    answer.add_argument("--of", required=True, metavar="VARIANT", help="The runs whose results answer.")
    answer.add_argument("--name", required=True, help="What to call these answers.")
    answer.add_argument("--predict", default="", metavar="OPTIONS", help="For example '--dedup 0.5'.")
    answer.add_argument("--split", nargs="+", choices=("test", "val"), default=["test"])
    answer.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    answer.add_argument("--steps", type=int, default=100)
    answer.add_argument("--jobs", type=int, default=1, help="Processes side by side, with one thread each.")

    table = commands.add_parser("table", parents=[shared], help="Print the results as Markdown.")
    table.add_argument("--split", choices=("test", "val"), default="test")
    table.add_argument("--steps", type=int, nargs="+", help="Runs of this many steps. Unset: all.")
    table.add_argument("--svg", type=Path, help="Draw results on val.jsonl over the steps; needs --steps.")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, exit_on_signal)
    if options.command == "headline":
        print(make_headline(options.out, options))
        return
    study = Study(options.out, options.regime)
    if options.command == "data":
        print(make_data(options.out, options.regime, options.train, options.held_out))
    elif options.command == "start":
        if options.labels == "complete":
            study = Study(options.out, find_complete(options.regime))
        make_start(study, options.steps, options.eval_every or options.steps)
    elif options.command == "run":
        make_runs(study, options)
    elif options.command == "answer":
        answer_again(study, options)
    else:
        print(write_tables(options.out, options.regime, options.split, options.steps))
        if options.svg and options.steps:
            options.svg.write_text(draw_curves(options.out, options.regime, options.steps[0]))


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
