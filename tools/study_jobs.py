"""The jobs of the study: commands that run side by side, each after what it needs, and their processor time.

What is there is never made again. A command that was interrupted goes on where it was; one that cannot do that
begins anew. The folder of a job gets `log.txt`, and `seconds.jsonl` with the processor time of every command.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import TextIO

from coordexp.errors import UserError
from coordexp.files import read_json_lines

POLL_S = 0.2
LOG, SECONDS = "log.txt", "seconds.jsonl"


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the file that it writes last. `leftover` is removed before it begins: what
    an interruption leaves of a command that cannot resume."""

    words: tuple[str, ...]
    makes: Path
    leftover: Path | None = None

    @property
    def is_done(self) -> bool:
        return self.makes.exists()


@dataclass(frozen=True)
class Job:
    """Commands that run one after the other when the files exist that they need."""

    name: str
    folder: Path
    commands: tuple[Command, ...]
    needs: tuple[Path, ...] = ()

    @property
    def is_done(self) -> bool:
        return all(command.is_done for command in self.commands)

    @property
    def can_begin(self) -> bool:
        return all(path.exists() for path in self.needs)


class RunningJob:
    """A job that has begun. Its log is locked as long as a process of it lives, so nobody else makes the same."""

    def __init__(self, job: Job, log: TextIO, environment: Mapping[str, str]) -> None:
        self.job, self._log, self._environment = job, log, environment
        self._commands = deque(command for command in job.commands if not command.is_done)
        self._begin_next()

    def poll(self) -> int | None:
        """Return the exit code of the job if it has ended. Begin its next command if the last one succeeded."""
        code = self._reap(os.WNOHANG)
        if code == 0 and self._commands:
            self._begin_next()
            return None
        if code is not None:
            self._log.close()
        return code

    def stop(self) -> None:
        """Let the current command save what it has, and wait for its end."""
        os.kill(self._process.pid, SIGTERM)
        self._reap(0)
        self._log.close()

    def _begin_next(self) -> None:
        self._command = self._commands.popleft()
        if self._command.leftover:
            shutil.rmtree(self._command.leftover, ignore_errors=True)
        self._process = subprocess.Popen(
            self._command.words,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the job
        )

    def _reap(self, options: int) -> int | None:
        """Return the exit code of the current command if it has ended, and write down its processor time."""
        process, status, usage = os.wait4(self._process.pid, options)
        if not process:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        made = os.path.relpath(self._command.makes, self.job.folder)
        line = {"makes": made, "seconds": round(usage.ru_utime + usage.ru_stime, 2)}
        with (self.job.folder / SECONDS).open("a") as file:
            file.write(json.dumps(line) + "\n")
        return self._process.returncode


def read_seconds(folder: Path) -> list[tuple[str, float]]:
    """Return what each command of a job was to make, relative to its folder, and its processor time. A command
    that was interrupted and went on is there more than once."""
    return [(line["makes"], line["seconds"]) for line in read_json_lines(folder / SECONDS)]


def lock_log(folder: Path) -> TextIO | None:
    """Open the log of a job to write to, or return None if another process makes the job."""
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / LOG).open("a")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        return None
    return log


def run_jobs(jobs: Sequence[Job], side_by_side: int, environment: Mapping[str, str]) -> None:
    """Run the jobs that are left, in this order, except that those wait whose needs are not there yet. If some
    fail, or another process makes them, run the others all the same, and raise UserError at the end."""
    waiting = [job for job in jobs if not job.is_done]
    running, failed, busy = list[RunningJob](), list[Job](), list[Job]()

    def show(event: str) -> None:
        done = len(jobs) - len(waiting) - len(running) - len(failed) - len(busy)
        hours = sum(seconds for job in jobs for _, seconds in read_seconds(job.folder)) / 3600
        counts = f"{done} of {len(jobs)} done, {len(failed)} failed, {hours:.2f} core-hours"
        print(f"{time.strftime('%H:%M:%S')} {counts}: {event}", file=sys.stderr, flush=True)

    try:
        while waiting or running:
            while len(running) < side_by_side and (job := next((one for one in waiting if one.can_begin), None)):
                waiting.remove(job)
                if log := lock_log(job.folder):
                    running.append(RunningJob(job, log, environment))
                    show(f"{job.name} begins")
                else:
                    busy.append(job)
            if not running:
                break  # what waits needs what failed
            time.sleep(POLL_S)
            for process in [*running]:
                if (code := process.poll()) is not None:
                    running.remove(process)
                    failed += [process.job] if code else []
                    show(f"{process.job.name} {f'failed: see {process.job.folder / LOG}' if code else 'is done'}")
    finally:
        for process in running:
            process.stop()
    if busy:
        names = "; ".join(job.name for job in busy)
        raise UserError(f"another process makes {names}", "wait until it ends, and give this command again")
    if failed:
        logs = ", ".join(str(job.folder / LOG) for job in failed)
        problem = f"{len(failed)} of {len(jobs)} jobs failed, and {len(waiting)} others need them"
        raise UserError(problem, f"see the end of {logs}, and give this command again")
