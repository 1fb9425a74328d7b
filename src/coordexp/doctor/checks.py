"""The checks themselves: training, and rollouts with real engines, on a server or on the learner's own device."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

from coordexp.doctor.learner import TinyLearner, Workspace, read_settings
from coordexp.doctor.machine import CheckOutcome
from coordexp.doctor.outcome import (
    REPORT,
    format_rate,
    judge_detection,
    judge_guard,
    judge_health,
    judge_losses,
    judge_parity,
)
from coordexp.doctor.server import DoctorServer, quote_lines
from coordexp.errors import EngineError
from coordexp.launch.parts import ANSWER_S, health_client, is_ready
from coordexp.launch.plan import device_variables
from coordexp.rollout.backend import Decode
from coordexp.servers.backend import ServerBackend
from coordexp.tasks import Task

STEPS = 2  # of training
LAST_LINES = 12  # of a training run that failed
GUARD_TOKENS = 64  # the limit of an answer that would repeat itself for ever
LONG = 400
HEALTH_REQUESTS = 50
BEFORE_KILL_S = 0.5
NOTICE_S = 15.0  # in this time a learner must notice that a server is gone
PRECISION = (
    "check that no dtype, attention or TF32 setting is forced on one of the two (VLLM_*, NVIDIA_TF32_OVERRIDE); "
    + REPORT
)


class TrainingChecks:
    """Training as users start it, with a process of its own for each run."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.machine = workspace, workspace.machine

    def check_stage1(self) -> CheckOutcome:
        """Train whole weights in mixed precision on packed rows, with gradient checkpointing and deterministic
        operations."""
        config = self.workspace.write_training_config("stage1", steps=STEPS, stage=1)
        return self._train("training", config, steps=STEPS)

    def check_resume(self) -> CheckOutcome:
        """Continue the run of Stage 1 from its checkpoint."""
        config = self.workspace.write_training_config("stage1", steps=STEPS + 1, stage=1)
        return self._train("training resumed", config, "--resume", steps=STEPS + 1)

    def check_stage2(self) -> CheckOutcome:
        """Train an adapter and the coordinate rows on rollouts that transformers makes."""
        config = self.workspace.write_training_config("stage2", steps=STEPS, stage=2)
        return self._train("adapter, rollouts", config, steps=STEPS)

    def check_ranks(self) -> CheckOutcome:
        """Train with two processes, each on a GPU of its own."""
        config = self.workspace.write_training_config("ranks", steps=STEPS, stage=1)
        return self._train("training, two ranks", config, steps=STEPS, ranks=2)

    def _train(self, check: str, config: Path, *options: str, steps: int, ranks: int = 1) -> CheckOutcome:
        """Run `coordexp train` and read its losses."""
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
        launcher = torchrun if ranks > 1 else ()
        command = [sys.executable, *launcher, "-m", "coordexp", "train", "--config", str(config), *options]
        variables = os.environ | device_variables(self.machine.training_gpus[:ranks])
        since, most = time.monotonic(), self.machine.deadlines.start
        with subprocess.Popen(  # noqa: S603
            command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, encoding="utf-8", errors="replace", env=variables
        ) as process:
            try:
                output, _ = process.communicate(timeout=most)
            except subprocess.TimeoutExpired:
                process.kill()
                raise EngineError(f"coordexp train was not done after {most:g} s") from None
        seconds = time.monotonic() - since
        if process.returncode:
            problem = f"coordexp train ended with exit code {process.returncode}"
            raise EngineError(quote_lines(problem, output.splitlines()[-LAST_LINES:]))
        folder = Path(read_settings(config).training.output_dir)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return judge_losses(check, [line["loss"] for line in lines if "loss" in line], steps, seconds)


class ServerChecks:
    """The checks of a rollout server, in order. Each leaves server and learner as the next one needs them."""

    def __init__(self, learner: TinyLearner, server: DoctorServer, config: Path) -> None:
        self.learner, self.server = learner, server
        self.guard_settings = read_settings(config).rollout_matching.repeat_terminate
        self.events: list[dict[str, Any]] = []
        self.message_times: list[float] = []  # when the backend said something
        self.backend: ServerBackend = learner.connect_servers(config, self._note_message, self.events.append)
        self.version = 0

    def check_start(self) -> CheckOutcome:
        """Start the server."""
        return CheckOutcome("rollout server", f"ready after {self.server.start():.0f} s at {self.server.url}")

    def check_parity(self) -> CheckOutcome:
        """Compare the server's answers with the learner's."""
        self._sync()
        return judge_parity("parity", self.learner.compare(self.backend), PRECISION)

    def check_sync(self) -> CheckOutcome:
        """Send other weights. The first sync has set up the connection that later ones use."""
        self.learner.change(seed=1)
        self._sync()
        event = self.events[-1]
        group = self.backend.links.open[0].group
        transport = type(group).__name__.strip("_").lower()
        rate = format_rate(event["seconds"], event["bytes"])
        measured = f"{rate} with {transport}, version {self.version} committed"
        reported = self.backend.clients[0].weight_version()
        if not str(reported).startswith(f"{self.version}-"):
            problem = f"version {self.version} was sent, but the server has {reported}"
            return CheckOutcome("sync", measured, problem, REPORT)
        return CheckOutcome("sync", measured)

    def check_answers_after_sync(self) -> CheckOutcome:
        """Compare the answers with the new weights, which differ from those before the sync."""
        return judge_parity("answers after sync", self.learner.compare(self.backend), _advise_stale(self.version))

    def check_health(self) -> CheckOutcome:
        """Measure how quickly the server reports its health while it answers."""
        milliseconds: list[float] = []
        ended = threading.Event()

        def poll() -> None:
            while not ended.wait(0.01):
                since = time.perf_counter()
                if not is_ready(client, self.server.url):
                    raise EngineError(f"{self.server.url}/health/ did not answer in {ANSWER_S:g} s")
                milliseconds.append(1000 * (time.perf_counter() - since))

        with health_client(None) as client:
            polling = Task(poll)
            while len(milliseconds) < HEALTH_REQUESTS and not polling.done.is_set():
                self.backend.generate(self.learner.requests(Decode.greedy(LONG // 4), times=2))
            ended.set()
            polling.result(deadline=time.monotonic() + 2 * ANSWER_S)
        return judge_health("health in answers", milliseconds)

    def check_detection(self) -> CheckOutcome:
        """Change only the learner's weights, and compare answers that must now differ."""
        self.learner.make_repetitive()
        return judge_detection("other weights noticed", self.learner.compare_by_image(self.backend))

    def check_guard(self) -> CheckOutcome:
        """Let the server answer with weights that repeat one token."""
        self._sync()
        decode = Decode(GUARD_TOKENS, guard=self.guard_settings)
        guarded = self.backend.generate(self.learner.requests(decode))
        free = self.backend.generate(self.learner.requests(Decode.greedy(GUARD_TOKENS))[:1])
        return judge_guard("repeat guard", guarded, free, GUARD_TOKENS)

    def check_kill(self) -> CheckOutcome:
        """Kill the server while it answers. The learner must say so, wait for `server.timeout_s`, and end with one
        error."""
        self.learner.restore()
        self._sync()
        asking = Task(self._ask_until_lost)
        time.sleep(BEFORE_KILL_S)
        killed, messages = time.monotonic(), len(self.message_times)
        self.server.kill()
        back = self.learner.workspace.machine.deadlines.back
        try:
            asking.result(deadline=killed + back + NOTICE_S)
        except EngineError as error:
            ended, message = time.monotonic() - killed, str(error).splitlines()[0]
        except TimeoutError:
            problem = f"the learner still waits for a server that was killed {back + NOTICE_S:g} s ago"
            return CheckOutcome("server killed", "no error", problem, REPORT)
        self.server.wait_gone()
        noticed = min(self.message_times[messages:], default=killed + ended) - killed
        measured = f"noticed in {noticed:.1f} s; ended after {ended:.0f} s with: {message}"
        if noticed > NOTICE_S:
            problem = f"the learner did not notice within {NOTICE_S:g} s that the server was gone"
            return CheckOutcome("server killed", measured, problem, REPORT)
        return CheckOutcome("server killed", measured)

    def check_restart(self) -> CheckOutcome:
        """Start the server again. It has the weights of the checkpoint until it gets the learner's."""
        seconds = self.server.start()
        self.learner.change(seed=2)
        since = time.monotonic()
        self._sync()
        agreement = self.learner.compare(self.backend)
        outcome = judge_parity("server restarted", agreement, _advise_stale(self.version))
        times = f"ready after {seconds:.0f} s, in use {time.monotonic() - since:.1f} s later"
        return replace(outcome, measured=f"{times}: {outcome.measured}")

    def close(self) -> None:
        self.backend.close()

    def _note_message(self, text: str) -> None:
        self.message_times.append(time.monotonic())

    def _sync(self) -> None:
        self.version += 1
        self.backend.sync(self.learner.weights, self.version)

    def _ask_until_lost(self) -> None:
        while True:
            self.backend.generate(self.learner.requests(Decode.greedy(LONG), times=4))


class ColocateChecks:
    """The checks of an engine on the learner's own device, in their order."""

    def __init__(self, learner: TinyLearner, config: Path) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        self.learner = learner
        self.backend = learner.start_colocated(config)

    def check_start(self) -> CheckOutcome:
        """Start the engine, send it the weights of the checkpoint, and compare its answers."""
        self.learner.restore()
        since = time.monotonic()
        with self.backend.session():
            self.backend.sync(self.learner.weights, 1)
        seconds = time.monotonic() - since
        with self.backend.session():
            agreement = self.learner.compare(self.backend)
        outcome = judge_parity("colocated engine", agreement, PRECISION)
        return replace(outcome, measured=f"has weights after {seconds:.0f} s: {outcome.measured}")

    def check_sync(self) -> CheckOutcome:
        """Send other weights, and compare the answers again."""
        self.learner.change(seed=1)
        since = time.monotonic()
        with self.backend.session():
            self.backend.sync(self.learner.weights, 2)
            seconds = time.monotonic() - since
            agreement = self.learner.compare(self.backend)
        size = sum(weight.nbytes for _, weight in self.learner.weights())
        outcome = judge_parity("colocated sync", agreement, _advise_stale(2))
        return replace(outcome, measured=f"{format_rate(seconds, size)}: {outcome.measured}")

    def close(self) -> None:
        self.backend.close()


def _advise_stale(version: int) -> str:
    return f"weights of version {version} were sent, and may not be in use, or only in part; {REPORT}"
