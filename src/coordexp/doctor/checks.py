"""The checks themselves, each on a real engine: of a rollout server, and of one beside the learner."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from coordexp.doctor import outcome
from coordexp.doctor.learner import TinyLearner
from coordexp.doctor.outcome import REPORT, Outcome
from coordexp.doctor.server import Served
from coordexp.errors import EngineError
from coordexp.launch import health
from coordexp.rollout.backend import Decode
from coordexp.rollout.server_backend import ServerBackend
from coordexp.rollout.tasks import Task

GUARDED = 64  # tokens of an answer that would loop for ever
LONG = 400
LOOKS = 50
BEFORE_KILL_S = 0.5
NOTICE_S = 15.0  # a server that is gone is to be noticed in this time
PRECISION = (
    "see that no dtype, attention or TF32 setting is forced on one of the two (VLLM_*, NVIDIA_TF32_OVERRIDE); "
    + REPORT
)


class ServerChecks:
    """In their order: each leaves the server and the learner as the next one needs them."""

    def __init__(self, learner: TinyLearner, served: Served, config: Path) -> None:
        self.learner, self.served = learner, served
        self.events: list[dict[str, Any]] = []
        self.told: list[tuple[float, str]] = []
        self.backend: ServerBackend = learner.servers(
            config, lambda text: self.told.append((time.monotonic(), text)), self.events.append
        )
        self.version = 0

    def start(self) -> Outcome:
        return Outcome("rollout server", f"ready after {self.served.start():.0f} s at {self.served.url}")

    def parity(self) -> Outcome:
        self._sync()
        return outcome.parity("parity", self.learner.agreement(self.backend), PRECISION)

    def sync(self) -> Outcome:
        """The first one has made what the later ones use."""
        self.learner.change(seed=1)
        self._sync()
        event = self.events[-1]
        group = self.backend.links.open[0].group
        transport = type(group).__name__.strip("_").lower()
        found = outcome.rate(event["seconds"], event["bytes"])
        shown = f"{found} by {transport}, version {self.version} committed"
        said = self.backend.clients[0].weight_version()
        if not str(said).startswith(f"{self.version}-"):
            return Outcome(
                "sync", shown, f"version {self.version} was sent, and the server has {said}\n  {REPORT}"
            )
        return Outcome("sync", shown)

    def follows(self) -> Outcome:
        """Answers after the sync, which are others than before it."""
        return outcome.parity("answers after sync", self.learner.agreement(self.backend), _stale(self.version))

    def health(self) -> Outcome:
        taken: list[float] = []
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(0.01):
                since = time.perf_counter()
                if not health.is_ready(client, self.served.url):
                    raise EngineError(f"{self.served.url}/health/ did not answer in {health.ANSWER_S:g} s")
                taken.append(1000 * (time.perf_counter() - since))

        with health.asking(None) as client:
            looking = Task(look)
            while len(taken) < LOOKS and not looking.done.is_set():
                self.backend.generate(self.learner.requests(Decode.greedy(LONG // 4), times=2))
            ended.set()
            looking.result(2 * health.ANSWER_S)
        return outcome.health("health in answers", taken)

    def notices(self) -> Outcome:
        """The learner goes on alone: what it answers now, the server does not."""
        self.learner.loop()
        return outcome.noticed("other weights noticed", 0, self.learner.agreements(self.backend))

    def guard(self) -> Outcome:
        """With the weights that repeat one token."""
        self._sync()
        guard = self.backend.about.settings.repeat_terminate
        guarded = self.backend.generate(self.learner.requests(Decode(GUARDED, guard=guard)))
        free = self.backend.generate(self.learner.requests(Decode.greedy(GUARDED))[:1])
        return outcome.guarded("repeat guard", guarded, free, GUARDED)

    def killed(self) -> Outcome:
        """While it answers. The learner says so, waits for `server.timeout_s`, and ends with one error."""
        self.learner.restore()
        self._sync()
        asking = Task(self._ask_until_lost)
        time.sleep(BEFORE_KILL_S)
        killed, told = time.monotonic(), len(self.told)
        self.served.kill()
        back = self.learner.place.machine.deadlines.back
        try:
            asking.result(back + NOTICE_S)
        except EngineError as error:
            ended, shown = time.monotonic() - killed, str(error).splitlines()[0]
        except TimeoutError:
            problem = f"the learner still waits for a server that was killed {back + NOTICE_S:g} s ago"
            return Outcome("server killed", "no error", f"{problem}\n  {REPORT}")
        self.served.wait_gone()
        noticed = min((at for at, _ in self.told[told:]), default=killed + ended) - killed
        found = f"noticed in {noticed:.1f} s; ended after {ended:.0f} s with: {shown}"
        if noticed > NOTICE_S:
            return Outcome("server killed", found, f"a server that is gone was not noticed in time\n  {REPORT}")
        return Outcome("server killed", found)

    def back(self) -> Outcome:
        """A new process, with the weights it was started with, until it gets the learner's."""
        seconds = self.served.start()
        self.learner.change(seed=2)
        since = time.monotonic()
        self._sync()
        agreement = self.learner.agreement(self.backend)
        found = f"ready after {seconds:.0f} s, in use {time.monotonic() - since:.1f} s later: "
        compared = outcome.parity("server restarted", agreement, _stale(self.version))
        return Outcome(compared.what, found + compared.found, compared.problem)

    def close(self) -> None:
        self.backend.close()

    def _sync(self) -> None:
        self.version += 1
        self.backend.sync(self.learner.weights, self.version)

    def _ask_until_lost(self) -> None:
        while True:
            self.backend.generate(self.learner.requests(Decode.greedy(LONG), times=4))


class ColocateChecks:
    def __init__(self, learner: TinyLearner, config: Path) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        self.learner = learner
        self.backend = learner.colocated(config)

    def start(self) -> Outcome:
        self.learner.restore()
        since = time.monotonic()
        with self.backend.session():
            self.backend.sync(self.learner.weights, 1)
        seconds = time.monotonic() - since
        with self.backend.session():
            agreement = self.learner.agreement(self.backend)
        compared = outcome.parity("colocated engine", agreement, PRECISION)
        return Outcome(compared.what, f"has weights after {seconds:.0f} s: {compared.found}", compared.problem)

    def sync(self) -> Outcome:
        self.learner.change(seed=1)
        since = time.monotonic()
        with self.backend.session():
            self.backend.sync(self.learner.weights, 2)
            seconds = time.monotonic() - since
            agreement = self.learner.agreement(self.backend)
        size = sum(weight.nbytes for _, weight in self.learner.weights())
        compared = outcome.parity("colocated sync", agreement, _stale(2))
        return Outcome(compared.what, f"{outcome.rate(seconds, size)}: {compared.found}", compared.problem)

    def close(self) -> None:
        self.backend.close()


def _stale(version: int) -> str:
    return f"weights of version {version} were sent, and may not be in use, or only in part; {REPORT}"
