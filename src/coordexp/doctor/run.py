"""Run the checks of a machine one after another, each within its deadline, and end all processes they started."""

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordexp.doctor.machine import CheckOutcome, Machine, use_only
from coordexp.doctor.outcome import REPORT
from coordexp.doctor.server import MARK, DoctorServer, find_left_processes
from coordexp.errors import EngineError, UserError
from coordexp.servers.protocol import TOKEN
from coordexp.tasks import Task

if TYPE_CHECKING:
    from coordexp.doctor.learner import TinyLearner

Step = Callable[[str], AbstractContextManager[object]]
LOG = "server.log"
CLOSE_S = 30.0


@dataclass(frozen=True)
class Check:
    """A check to run, what it is doing (for the user who waits), and how long it may take."""

    name: str
    doing: str
    seconds: float
    run: Callable[[], CheckOutcome]


@dataclass(frozen=True)
class DoctorReport:
    """The outcomes of an examination.

    If one failed, `folder` has the files of the examination; otherwise it is None. If a check hung, this process
    must not wait for its own threads."""

    outcomes: tuple[CheckOutcome, ...]
    folder: Path | None
    hung: bool

    @property
    def ok(self) -> bool:
        return not any(outcome.problem for outcome in self.outcomes)


class Examination:
    """All checks of a machine. `step` shows a message while the work inside it is done."""

    def __init__(self, machine: Machine, step: Step) -> None:
        self.machine, self.step = machine, step
        self.outcomes: list[CheckOutcome] = []
        self.hung = False

    def run(self) -> DoctorReport:
        """Run all checks. No process is left, whatever they find."""
        use_only(self.machine)
        folder = Path(tempfile.mkdtemp(prefix="coordexp-doctor-"))
        with _environment({MARK: secrets.token_hex(8), TOKEN: secrets.token_urlsafe(16)}), ExitStack() as cleanup:
            cleanup.callback(self._end_left_processes)
            self._run(folder)
        failed = any(outcome.problem for outcome in self.outcomes)
        if not failed:
            shutil.rmtree(folder)
        return DoctorReport(tuple(self.outcomes), folder if failed else None, self.hung)

    def _run(self, folder: Path) -> None:
        machine, learners = self.machine, list["TinyLearner"]()
        self.outcomes += [CheckOutcome(name, reason, checked=False) for name, reason in machine.notes.items()]

        def make_learner() -> CheckOutcome:
            from coordexp.doctor.learner import TinyLearner, Workspace

            learner = TinyLearner(Workspace.make(folder, machine))
            learners.append(learner)
            millions = sum(weight.numel() for weight in learner.model.parameters()) / 1e6
            measured = f"Qwen3-VL, {millions:.1f} million random weights, {machine.description}"
            return CheckOutcome("learner", measured)

        doing = "making a tiny model and some scenes"
        self._run_series([Check("learner", doing, machine.deadlines.check, make_learner)])
        if learners:
            self._check_training(learners[0])
        if learners and machine.servers and not self.hung:
            self._check_server(learners[0])
        if learners and machine.colocates and not self.hung:
            self._check_colocated(learners[0])

    def _check_training(self, learner: "TinyLearner") -> None:
        from coordexp.doctor.checks import TrainingChecks

        checks, seconds = TrainingChecks(learner.workspace), self.machine.deadlines.start + CLOSE_S
        self._run_series(
            [
                Check("training", "training whole weights", seconds, checks.check_stage1),
                Check("training resumed", "continuing from the checkpoint", seconds, checks.check_resume),
            ]
        )
        doing = "training an adapter on rollouts with transformers"
        self._run_series([Check("adapter, rollouts", doing, seconds, checks.check_stage2)])
        if len(self.machine.training_gpus) > 1:
            doing = "training with two processes"
            self._run_series([Check("training, two ranks", doing, seconds, checks.check_ranks)])

    def _check_server(self, learner: "TinyLearner") -> None:
        from coordexp.doctor.checks import ServerChecks
        from coordexp.doctor.learner import read_settings

        config = learner.workspace.write_config("server")
        url = read_settings(config).rollout_matching.vllm.server.servers[0].base_url
        server = DoctorServer(config, self.machine, learner.workspace.folder / LOG, url)
        checks = ServerChecks(learner, server, config)
        start, check = self.machine.deadlines.start, self.machine.deadlines.check
        minute = "(vLLM takes about a minute)"
        series = [
            Check("rollout server", f"starting a rollout server {minute}", start + check, checks.check_start),
            Check("parity", "comparing answers with the learner's", check, checks.check_parity),
            Check("sync", "sending other weights", check, checks.check_sync),
            Check("answers after sync", "comparing answers again", check, checks.check_answers_after_sync),
            Check("health in answers", "asking for health during answers", check, checks.check_health),
            Check("other weights noticed", "changing only the learner", check, checks.check_detection),
            Check("repeat guard", "generating looping answers", check, checks.check_guard),
            Check("server killed", "killing the server while it answers", 2 * check, checks.check_kill),
            Check("server restarted", f"restarting the server {minute}", start + check, checks.check_restart),
        ]
        with ExitStack() as cleanup:
            cleanup.callback(server.close)
            self._run_series(series)
            with self.step("ending the server"):
                self._close(checks.close)
                self._end_server(server)

    def _end_server(self, server: DoctorServer) -> None:
        """Check that the server ends when it gets SIGTERM, if the checks before went well."""
        if self.outcomes[-1].state != "ok":
            return
        seconds = server.end()
        if seconds is not None:
            self.outcomes.append(CheckOutcome("server ended", f"in order, in {seconds:.1f} s"))
        else:
            problem = "the server did not end in order after SIGTERM"
            self.outcomes.append(CheckOutcome("server ended", "killed", problem, REPORT))

    def _check_colocated(self, learner: "TinyLearner") -> None:
        from coordexp.doctor.checks import ColocateChecks

        checks = ColocateChecks(learner, learner.workspace.write_config("colocate"))
        start, check = self.machine.deadlines.start, self.machine.deadlines.check
        doing = "starting an engine on the learner's device (vLLM takes about a minute)"
        with ExitStack() as cleanup:
            cleanup.callback(self._close, checks.close)
            self._run_series(
                [
                    Check("colocated engine", doing, start + check, checks.check_start),
                    Check("colocated sync", "sending it other weights", check, checks.check_sync),
                ]
            )

    def _run_series(self, checks: Sequence[Check]) -> None:
        """Run checks that build on each other. After an exception the rest is not run. After a check that merely
        finds a problem, the next one is."""
        for number, check in enumerate(checks):
            try:
                with self.step(check.doing):
                    self.outcomes.append(self._run_within(check.seconds, check.run))
            except Exception as error:  # noqa: BLE001 - whatever it is, the user must read it
                self.outcomes.append(_failure(check.name, error))
                reason = f"since {check.name} failed"
                self.outcomes += [CheckOutcome(rest.name, reason, checked=False) for rest in checks[number + 1 :]]
                return

    def _run_within(self, seconds: float, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, or raise if it takes longer than so many seconds."""
        task = Task(work)
        if not task.done.wait(seconds):
            self.hung = True
            raise EngineError(
                f"it was not done after {seconds:g} s, and was given up",
                f"check whether the machine is busy (CPU, GPU, memory), and try again; otherwise {REPORT}",
            )
        return task.result()

    def _close(self, close: Callable[[], None]) -> None:
        with suppress(Exception):
            self._run_within(CLOSE_S, close)

    def _end_left_processes(self) -> None:
        """Kill the processes that are left. There should be none."""
        commands = find_left_processes()
        for pid in commands:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        measured = f"{len(commands)} processes"
        if commands:
            shown = "; ".join(f"{pid} {command[:80]}" for pid, command in commands.items())
            problem = f"processes were left, and have been killed: {shown}"
            self.outcomes.append(CheckOutcome("nothing left", measured, problem, REPORT))
        else:
            self.outcomes.append(CheckOutcome("nothing left", measured))


def _failure(check: str, error: Exception) -> CheckOutcome:
    if isinstance(error, UserError):
        return CheckOutcome(check, "an error", error.problem, error.fix)
    return CheckOutcome(check, "an error", f"{type(error).__name__}: {error}")


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
