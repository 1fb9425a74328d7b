"""The jobs of the study, with real processes that write files."""

import fcntl
import sys
from pathlib import Path

import pytest
from study_jobs import LOG, Command, Job, lock_log, read_seconds, run_jobs

from coordexp.errors import UserError


def write(file: Path, *, fail: bool = False, leftover: Path | None = None) -> Command:
    """Return a command that writes a file, with a line more each time, unless it fails."""
    program = "raise SystemExit(3)" if fail else f"open({str(file)!r}, 'a').write('x')"
    return Command((sys.executable, "-SEc", program), file, leftover)


def make_job(folder: Path, *commands: Command, needs: tuple[Path, ...] = ()) -> Job:
    return Job(folder.name, folder, commands, needs)


def test_a_job_waits_for_what_it_needs_and_nothing_is_made_twice(tmp_path):
    first, second = tmp_path / "first/a", tmp_path / "second/b"
    jobs = [
        make_job(second.parent, write(second), write(second.with_name("c")), needs=(first,)),
        make_job(first.parent, write(first)),
    ]
    for _ in range(2):
        run_jobs(jobs, 2, {})
    assert first.read_text() == second.read_text() == "x"
    assert [made for made, _ in read_seconds(second.parent)] == ["b", "c"]
    assert all(seconds >= 0 for _, seconds in read_seconds(second.parent))


def test_after_a_failure_the_other_jobs_are_made_and_those_that_need_it_are_not(tmp_path):
    broken, needing, other = (tmp_path / name / "file" for name in ("broken", "needing", "other"))
    jobs = [
        make_job(broken.parent, write(broken, fail=True)),
        make_job(needing.parent, write(needing), needs=(broken,)),
        make_job(other.parent, write(other)),
    ]
    with pytest.raises(UserError) as error:
        run_jobs(jobs, 1, {})
    assert other.exists() and not needing.exists()
    assert str(broken.parent / LOG) in str(error.value)


def test_what_an_interruption_left_of_a_command_that_cannot_resume_is_removed(tmp_path):
    left = tmp_path / "job/run/part"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    made = tmp_path / "job/made"
    run_jobs([make_job(tmp_path / "job", write(made, leftover=left.parent))], 1, {})
    assert made.exists() and not left.exists()


def test_a_job_that_another_process_makes_is_left_to_it(tmp_path):
    made, other = tmp_path / "job/made", tmp_path / "other/made"
    made.parent.mkdir()
    with (made.parent / LOG).open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert lock_log(made.parent) is None
        with pytest.raises(UserError):
            run_jobs([make_job(made.parent, write(made)), make_job(other.parent, write(other))], 1, {})
    assert other.exists() and not made.exists()
