"""Runs the checks of a machine one after another, each within its deadline, and ends all that it started."""

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.doctor.machine import Machine, use_only
from coordexp.doctor.outcome import REPORT, Outcome
from coordexp.doctor.server import MARK, Served, left_for_long
from coordexp.errors import EngineError
from coordexp.rollout.tasks import Task
from coordexp.rollout.wire import TOKEN

Step = Callable[[str], AbstractContextManager[object]]
LOG = "server.log"
CLOSE_S = 30.0


@dataclass(frozen=True)
class Check:
    what: str
    doing: str
    seconds: float
    run: Callable[[], Outcome]


@dataclass(frozen=True)
class Report:
    """`kept` is the folder of a check that failed. After one that `hung`, this process must not wait for its own
    threads."""

    outcomes: tuple[Outcome, ...]
    kept: Path | None
    hung: bool

    @property
    def ok(self) -> bool:
        return not any(one.problem for one in self.outcomes)


class Late(EngineError):
    pass


class Examination:
    """`step` shows what is being done, for as long as it is."""

    def __init__(self, machine: Machine, step: Step) -> None:
        self.machine, self.step = machine, step
        self.outcomes: list[Outcome] = []
        self.hung = False

    def run(self) -> Report:
        use_only(self.machine)
        folder = Path(tempfile.mkdtemp(prefix="coordexp-doctor-"))
        with _environment({MARK: secrets.token_hex(8), TOKEN: secrets.token_urlsafe(16)}):
            try:
                self._run(folder)
            finally:
                self._nothing_left()
        failed = any(one.problem for one in self.outcomes)
        if not failed:
            shutil.rmtree(folder)
        return Report(tuple(self.outcomes), folder if failed else None, self.hung)

    def _run(self, folder: Path) -> None:
        machine, made = self.machine, []
        self.outcomes += [Outcome(what, why, checked=False) for what, why in machine.notes.items()]

        def make() -> Outcome:
            from coordexp.doctor.learner import TinyLearner
            from coordexp.doctor.workplace import Workplace

            made.append(TinyLearner(Workplace.make(folder, machine)))
            weights = sum(weight.numel() for weight in made[0].model.parameters())
            return Outcome("learner", f"Qwen3-VL, {weights / 1e6:.1f} million random weights, {machine.described}")

        self._series([Check("learner", "making a tiny model and some scenes", machine.deadlines.check, make)])
        if made and machine.servers:
            self._server(made[0])
        if made and machine.colocates and not self.hung:
            self._colocated(made[0])

    def _server(self, learner: Any) -> None:
        from coordexp.doctor.checks import ServerChecks
        from coordexp.doctor.workplace import settings_of

        config = learner.place.config("server")
        url = settings_of(config).rollout_matching.vllm.server.servers[0].base_url
        served = Served(config, self.machine, learner.place.folder / LOG, url)
        checks = ServerChecks(learner, served, config)
        start, check = self.machine.deadlines.start, self.machine.deadlines.check
        minute = "(vLLM takes about a minute)"
        try:
            self._series(
                [
                    Check("rollout server", f"starting a rollout server {minute}", start + check, checks.start),
                    Check("parity", "comparing answers with the learner's", check, checks.parity),
                    Check("sync", "sending other weights", check, checks.sync),
                    Check("answers after sync", "comparing answers again", check, checks.follows),
                    Check("health in answers", "asking for health during answers", check, checks.health),
                    Check("other weights noticed", "changing the learner alone", check, checks.notices),
                    Check("repeat guard", "looping answers", check, checks.guard),
                    Check("server killed", "killing the server while it answers", 2 * check, checks.killed),
                    Check("server restarted", f"starting the server again {minute}", start + check, checks.back),
                ]
            )
            with self.step("ending the server"):
                self._ended(checks, served)
        finally:
            served.close()

    def _ended(self, checks: Any, served: Served) -> None:
        with suppress(Exception):
            self._bounded(checks.close, CLOSE_S)
        if self.outcomes[-1].state == "ok":
            seconds = served.end()
            problem = f"the server did not end in order when it was told to (SIGTERM)\n  {REPORT}"
            found = "killed" if seconds is None else f"in order, in {seconds:.1f} s"
            self.outcomes.append(Outcome("server ended", found, problem if seconds is None else ""))

    def _colocated(self, learner: Any) -> None:
        from coordexp.doctor.checks import ColocateChecks

        checks = ColocateChecks(learner, learner.place.config("colocate"))
        start, check = self.machine.deadlines.start, self.machine.deadlines.check
        doing = "starting an engine beside the learner (vLLM takes about a minute)"
        try:
            self._series(
                [
                    Check("colocated engine", doing, start + check, checks.start),
                    Check("colocated sync", "sending it other weights", check, checks.sync),
                ]
            )
        finally:
            with suppress(Exception):
                self._bounded(checks.close, CLOSE_S)

    def _series(self, checks: Sequence[Check]) -> None:
        """Each needs those before it: after an error, the rest are not made. What is merely found wrong does not
        keep the next from being looked at."""
        for number, check in enumerate(checks):
            try:
                with self.step(check.doing):
                    self.outcomes.append(self._bounded(check.run, check.seconds))
            except Exception as error:  # noqa: BLE001 - whatever it is, the user must read it
                told = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
                self.outcomes.append(Outcome(check.what, "an error", told))
                why = f"since {check.what} failed"
                self.outcomes += [Outcome(rest.what, why, checked=False) for rest in checks[number + 1 :]]
                return

    def _bounded(self, work: Callable[[], Any], seconds: float) -> Any:
        task = Task(work)
        if not task.done.wait(seconds):
            self.hung = True
            raise Late(
                f"it was not done after {seconds:g} s, and was given up\n"
                f"  see whether the machine is busy (CPU, GPU, memory), and try again; else {REPORT}"
            )
        return task.result()

    def _nothing_left(self) -> None:
        found = left_for_long()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        told = "; ".join(f"{pid} {command[:80]}" for pid, command in found.items())
        problem = f"processes were left, and have been killed: {told}\n  {REPORT}" if found else ""
        self.outcomes.append(Outcome("nothing left", f"{len(found)} processes", problem))


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
