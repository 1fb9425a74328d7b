"""Make runs that end at a certain write, or whose files are damaged afterwards, and resume them.

This is started as its own process, which forks a child for every run, so that a run takes about a second. It
writes one JSON object per file and fault. Each fault hits one file, and comes from the kernel:

- no room: from the moment the file is opened for writing, RLIMIT_FSIZE is in the middle of it, so that the write
  is short and the next one fails with EFBIG, as on a full disk with ENOSPC. C++ and Rust code sees the same.
- killed: the same, with the default action of SIGXFSZ, which ends the process inside that write.
- unrenamed: SIGKILL when the finished file is about to be renamed to its final name.
- cut, zeroed, flipped: damage that a disk can do to the file afterwards.
"""

import atexit
import json
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

STEPS, SAVED = 3, 2  # a run of so many steps that saves each; faults hit one that has done so many of them
FAULTS_OF_WRITES = ("no room", "killed", "unrenamed")
FAULTS_AFTERWARDS = ("cut", "zeroed", "flipped")
EVENTS = re.compile(r"^runs/.*events\.out\.tfevents.*$")


def key(path: Path, run: Path) -> str:
    """Return a name for the file that is the same in every run. TensorBoard puts the time into its names."""
    return EVENTS.sub("runs/events", str(path.relative_to(run)))


def files_of(run: Path) -> dict[str, Path]:
    return {key(path, run): path for path in sorted(run.rglob("*")) if path.is_file()}


class Watch:
    """Writes, when a run has ended, which of its files were renamed to their final names."""

    def __init__(self, run: Path, report: Path) -> None:
        self.run, self.report, self.renamed = run, report, []

    def install(self) -> None:
        sys.addaudithook(self._audit)
        atexit.register(lambda: self.report.write_text(json.dumps(self.renamed)))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and Path(os.fspath(arguments[1])).is_relative_to(self.run):
            self.renamed.append(key(Path(os.fspath(arguments[1])), self.run))


class FaultAtWrite:
    """Arms a fault whenever the file is about to be written, and disarms it when another one is."""

    def __init__(self, run: Path, name: str, fault: str, size: int) -> None:
        self.run, self.name, self.fault, self.size = run, name, fault, size
        self.unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.fired = False

    def install(self) -> None:
        import safetensors.numpy
        import safetensors.torch
        import torch
        from transformers import PreTrainedTokenizerFast

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if self.fault == "killed" else signal.SIG_IGN)
        sys.addaudithook(self._audit)
        for module, function, position in (
            (torch, "save", 1),
            (safetensors.torch, "serialize_file", 1),
            (safetensors.numpy, "serialize_file", 1),
        ):
            setattr(module, function, self._before(getattr(module, function), position))
        plain = PreTrainedTokenizerFast._save_pretrained

        def save_tokenizer(tokenizer: Any, save_directory: Any, *others: Any, **options: Any) -> Any:
            self._written(str(Path(save_directory) / "tokenizer.json"))
            return plain(tokenizer, save_directory, *others, **options)

        PreTrainedTokenizerFast._save_pretrained = save_tokenizer

    def _before(self, function: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            target = (
                arguments[position] if len(arguments) > position else options.get("f", options.get("filename"))
            )
            if isinstance(target, str | os.PathLike):
                self._written(os.fspath(target))
            return function(*arguments, **options)

        return call

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self._written(os.fsdecode(arguments[0]))
        elif (
            event == "os.rename" and self.fault == "unrenamed" and self._key(os.fspath(arguments[1])) == self.name
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    def _written(self, path: str) -> None:
        name = self._key(path)
        if name is None or self.fault == "unrenamed":
            return
        if name != self.name:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.unlimited)
        if name != self.name or self.fired:  # the first time only: the run may go on
            return
        self.fired = True
        grows = name.endswith(".jsonl") or name == "runs/events"
        before = Path(path).stat().st_size if grows and Path(path).exists() else 0
        limit = before + 9 if grows else self.size // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, self.unlimited[1]))

    def _key(self, path: str) -> str | None:
        whole = Path(path.removesuffix(".partial")).absolute()
        return key(whole, self.run) if whole.is_relative_to(self.run) else None


def damage(path: Path, fault: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    if fault == "cut":
        path.write_bytes(
            content[: max(middle, len(content) - 40)] if path.suffix == ".jsonl" else content[:middle]
        )
    elif fault == "zeroed":
        kept = max(middle, len(content) - 40)
        path.write_bytes(content[:kept] + bytes(len(content) - kept))
    else:
        path.write_bytes(
            content[:middle] + bytes(255 - byte for byte in content[middle : middle + 8]) + content[middle + 8 :]
        )


def forked(work: Callable[[], None]) -> tuple[int, str]:
    """Run in a child, and return how it ended (negative by a signal) and what it printed. It prints to a pipe,
    because a file would be under the limit too."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ours)
            os.dup2(theirs, 1)
            os.dup2(theirs, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001, the child must not go on as its parent
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        shown = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), shown


def train(config: Path, run: Path, steps: int, fault: FaultAtWrite | Watch | None = None) -> tuple[int, str]:
    """Start or resume a run in `run` with the settings of `config`."""
    tree = yaml.safe_load(config.read_text())
    tree["training"] |= {"output_dir": str(run), "max_steps": steps}
    own = run.with_suffix(".yaml")
    own.write_text(yaml.safe_dump(tree))

    def work() -> None:
        if fault:
            fault.install()
        from coordexp.cli import main

        main(["train", "--config", str(own), "--resume"])

    return forked(work)


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


class Undisturbed:
    """The run to compare with, and the state that faults start from."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.begun, whole = folder / "begun", folder / "whole"
        report = folder / "report.json"
        for steps in (SAVED, STEPS):
            code, shown = train(config, whole, steps, Watch(whole, report))
            assert code == 0, shown
            self.renamed = json.loads(report.read_text())
            if steps == SAVED:
                shutil.copytree(whole, self.begun)
        self.losses = losses(whole)
        self.weights = (whole / f"checkpoint-{STEPS}/model.safetensors").read_bytes()
        self.before = {name: path.stat().st_size for name, path in files_of(self.begun).items()}
        self.sizes = {name: path.stat().st_size for name, path in files_of(whole).items()}

    def written(self) -> list[str]:
        """Return the files that the second half of the run writes. Each of them is hit by faults."""
        old = set(self.before)
        again = {"resolved.yaml", "run.json", "metrics.jsonl", "runs/events"}
        return [name for name in self.sizes if name not in old or name in again]

    def latest(self) -> list[str]:
        """Return the files that the run has when faults begin, without those of earlier steps."""
        step = re.compile(r"(?:checkpoint-|step-|trained-)0*(\d+)")
        places = {name: step.search(name) for name in self.before}
        newest = {"checkpoint": SAVED, "evaluations": SAVED, "dumps": SAVED - 1}
        return [
            name
            for name, place in places.items()
            if place is None or int(place[1]) == next(at for kind, at in newest.items() if name.startswith(kind))
        ]

    def outcome_of_resume(self, run: Path, name: str) -> str:
        code, shown = train(self.config, run, STEPS)
        if "Traceback" in shown:
            return f"FAILED: traceback\n{shown}"
        if code:
            named = Path(name).name in shown and len(shown.strip().splitlines()) > 1
            return f"named, exit {code}" if named and code == 1 else f"FAILED: exit {code}\n{shown}"
        logged = losses(run)
        wrong = {step for step, loss in logged.items() if loss != self.losses[step]}
        lost = set(self.losses) - set(logged)
        if wrong or (lost and name != "metrics.jsonl"):
            return f"FAILED: losses differ at {sorted(wrong)}, missing are {sorted(lost)}\n{shown}"
        if (run / f"checkpoint-{STEPS}/model.safetensors").read_bytes() != self.weights:
            return f"FAILED: weights differ\n{shown}"
        passed = re.search(r"resuming from \S*(checkpoint-\d+)", shown)
        start = passed[1] if passed else "the beginning"
        return f"exact from {start}" + (f", {len(lost)} line lost" if lost else "")

    def hit_write(self, run: Path, name: str, fault: str) -> str:
        armed = FaultAtWrite(run, name, fault, self.sizes[name])
        code, shown = train(self.config, run, STEPS, armed)
        if code != {"killed": -signal.SIGXFSZ, "unrenamed": -signal.SIGKILL}.get(fault, code):
            return f"FAILED: the fault did not hit: exit {code}\n{shown}"
        how = "killed"
        if fault == "no room":
            if "Traceback" in shown or code not in (0, 1):
                return f"FAILED: exit {code}\n{shown}"
            if Path(name).name not in shown and Path(name).parent.name not in shown and "TensorBoard" not in shown:
                return f"FAILED: the file is not named: exit {code}\n{shown}"
            how = "error" if code else "warning"
        left = [path.name for path in run.glob("checkpoint-*")]
        if f"checkpoint-{SAVED}" not in left:
            return f"FAILED: the older checkpoint is gone: {left}"
        return f"{how}; {self.outcome_of_resume(run, name)}"

    def hit_afterwards(self, run: Path, name: str, fault: str) -> str:
        damage(files_of(run)[name], fault)
        return self.outcome_of_resume(run, name)

    def matrix(self, part: int, parts: int) -> None:
        """Write the outcome of every `parts`-th pair of a file and a fault."""
        pairs = [
            (name, fault)
            for name in self.written()
            for fault in FAULTS_OF_WRITES
            if fault != "unrenamed" or name in self.renamed
        ]
        pairs += [(name, fault) for name in self.latest() for fault in FAULTS_AFTERWARDS]
        for name, fault in pairs[part::parts]:
            run = self.folder / "run"
            shutil.copytree(self.begun, run)
            outcome = (self.hit_write if fault in FAULTS_OF_WRITES else self.hit_afterwards)(run, name, fault)
            with (self.folder / "outcomes.jsonl").open("a") as outcomes:
                outcomes.write(json.dumps({"file": name, "fault": fault, "outcome": outcome}) + "\n")
            shutil.rmtree(run)


if __name__ == "__main__":
    config, folder, part, parts = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    Undisturbed(config, folder).matrix(part, parts)
