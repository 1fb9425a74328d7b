"""A launcher and its parts as real processes: the order in which they end, exit codes, and that none is left."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests import zygote
from tests.source import SOURCE

ROOT = Path(__file__).parents[3]
FAKE = [sys.executable, str(Path(__file__).with_name("fake_server.py"))]
MARK = "COORDEXP_TEST_MARK"

DONE = """
import os, sys
print('step 1')
print(os.environ['COORDEXP_SERVER_TOKEN'] == 'secret-token', sys.stdout.isatty(), 'RANK' in os.environ)
"""
SAVES = """
import os, signal, sys, time
from coordexp.child_processes import end_with_parent
end_with_parent(os.getppid())  # as a rank of torchrun does
def stop(*_):
    sys.stdout.write('saved\\n')  # in one piece: another rank may write too
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
sys.stdout.write('training\\n')
time.sleep(60)
"""
IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('training', flush=True)
time.sleep(60)
"""

pytestmark = pytest.mark.timeout(30)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fake(*options):
    """Return a planned server that is a fake with these options."""
    port = free_port()
    return {"port": port, "command": [*FAKE, str(port), *options]}


def without_stamp(line):
    stamp = re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING|ERROR) +", line)
    assert stamp, f"no time or level: {line!r}"
    return line[stamp.end() :]


class LaunchProcess:
    """A launcher in a process of its own, its output so far, and all processes that carry its mark."""

    def __init__(self, learner, servers, ranks=False, **patience):
        self.mark = uuid.uuid4().hex
        request = {
            "servers": servers,
            "learner": [sys.executable, "-c", learner] if isinstance(learner, str) else learner,
            "ranks": ranks,
            "patience": {"server_s": 5.0, "back_off_s": [0.1, 0.1, 0.1]} | patience,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.launch.launcher", json.dumps(request)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {MARK: self.mark, "PYTHONPATH": f"{ROOT}:{SOURCE}", "RANK": "5"},
        )
        self.text = ""  # without the time and the level at the beginning of every line

    def read_until(self, pattern):
        """Read the output up to a line with this pattern, and return that line."""
        for line in map(without_stamp, self.process.stdout):
            self.text += line
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern} was not printed:\n{self.text}")

    def wait(self):
        """Wait for the end, and return the exit code."""
        self.text += "".join(map(without_stamp, self.process.communicate(timeout=25)[0].splitlines(keepends=True)))
        return self.process.returncode

    def find_processes(self):
        """Return the living processes of this launch."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process):
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@contextmanager
def launch(*arguments, **options):
    """Run a launcher, and check at the end that no process of it is left."""
    run = LaunchProcess(*arguments, **options)
    try:
        yield run
        assert run.find_processes() == []
    finally:
        for process in (run.process, *run.find_processes()):
            process.kill()
        run.process.communicate()


def test_when_the_learner_is_done_the_launch_ends_with_0_and_no_process_is_left():
    """The learner gets the token, no terminal, and no variables of another torchrun."""
    with launch(DONE, [fake("--engine"), fake()]) as run:
        assert run.wait() == 0, run.text
        lines = run.text.splitlines()
        assert "server 0 | starting the engine" in lines
        assert "server 1 | starting the engine" in lines
        assert "learner  | True False False" in lines
        answers = [k for k, line in enumerate(lines) if re.match(r"launch   \| server [01] answers at", line)]
        assert len(answers) == 2 and lines.index("learner  | step 1") > max(answers)
        assert "secret-token" not in run.text
        assert "\x1b" not in run.text


def test_a_learner_that_fails_ends_the_launch_with_its_code_and_its_last_lines_are_repeated():
    with launch("import sys; print('bad data'); sys.exit(7)", [fake("--engine")]) as run:
        assert run.wait() == 7, run.text
        repeated = run.text.split("the last lines of learner:")[1]
        assert "learner  | bad data" in repeated


def test_a_server_that_ends_at_the_start_ends_the_launch_before_anything_is_trained():
    with launch(DONE, [fake(), fake("--at-start", "3", "--engine")]) as run:
        assert run.wait() == 1
        repeated = run.text.split("the last lines of server 1:")[1]
        assert "server 1 | no room for the engine" in repeated
        assert "exit code 3" in repeated
        assert "step 1" not in run.text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_lets_the_learner_save_before_servers_end(number, code):
    with launch(SAVES, [fake("--engine")]) as run:
        run.read_until("training")
        run.process.send_signal(number)
        assert run.wait() == code, run.text
        assert "learner  | saved" in run.text


def test_parts_that_do_not_end_are_killed_after_their_grace():
    with launch(IGNORES, [fake("--stubborn")], learner_s=0.5, server_s=0.5) as run:
        run.read_until("training")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        assert "learner did not end in 0.5 s" in run.text


def test_a_second_ctrl_c_ends_everything_at_once():
    with launch(IGNORES, [fake("--engine", "--stubborn")], learner_s=60.0, server_s=20.0) as run:
        run.read_until("training")
        run.process.send_signal(signal.SIGINT)
        run.read_until("finishes its step")
        since = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert time.monotonic() - since < 4


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_launch_whose_servers_do_not_answer_ends_by_ctrl_c_or_by_itself(interrupted):
    silent = {"port": free_port(), "command": [sys.executable, "-c", "import time; time.sleep(60)"]}
    with launch(DONE, [silent], start_s=60.0 if interrupted else 1.0) as run:
        run.read_until("waiting for server 0")
        if interrupted:
            run.process.send_signal(signal.SIGINT)
        assert run.wait() == (130 if interrupted else 1)
        assert "step 1" not in run.text


def test_no_process_outlives_a_launcher_that_is_killed():
    with launch(IGNORES, [fake("--engine"), fake()]) as run:
        run.read_until("training")
        assert len(run.find_processes()) == 5  # the launcher, two servers, an engine, and the learner
        run.process.kill()
        run.process.wait()
        until = time.monotonic() + 5
        while run.find_processes() and time.monotonic() < until:
            time.sleep(0.05)


def test_a_server_that_is_killed_leaves_no_process_and_is_restarted():
    with launch(SAVES, [fake("--engine")]) as run:
        server = int(re.search(r"process (\d+)", run.read_until("started server 0"))[1])
        run.read_until("training")
        (engine,) = psutil.Process(server).children()
        os.kill(server, signal.SIGKILL)
        run.read_until(r"server 0 ended with exit code 137")
        assert not zygote.lives(engine)
        run.read_until("starting the engine")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.text


def test_what_a_part_leaves_in_its_process_group_is_killed():
    leaves = "import subprocess, sys; subprocess.Popen(['sleep', '600']); sys.exit(3)"
    with launch(leaves, [fake()]) as run:
        assert run.wait() == 3, run.text


def test_a_server_that_ends_is_restarted_a_few_times_and_then_given_up(tmp_path):
    with launch(SAVES, [fake("--die-when", str(tmp_path / "now"))], back_off_s=[0.1, 0.2]) as run:
        run.read_until("training")
        (tmp_path / "now").touch()
        assert run.wait() == 1, run.text
        assert run.text.count("started server 0") == 3
        assert "restart 2 of 2 in 0.2 s" in run.text
        assert "it was restarted 2 times in a row, and is given up" in run.text
        assert "no rollout server is left" in run.text
        assert "learner  | saved" in run.text


def test_a_server_that_ran_for_long_can_be_restarted_as_often_again(tmp_path):
    with launch(SAVES, [fake("--die-when", str(tmp_path / "now"))], back_off_s=[0.1], stable_s=0.0) as run:
        run.read_until("training")
        (tmp_path / "now").touch()
        for _ in range(3):
            run.read_until("restart 1 of 1")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.text


def test_a_learner_continues_with_the_remaining_servers(tmp_path):
    with launch(SAVES, [fake("--die-when", str(tmp_path / "now")), fake()], back_off_s=[0.1]) as run:
        run.read_until("training")
        (tmp_path / "now").touch()
        run.read_until("it was restarted 1 times in a row, and is given up")
        assert "saved" not in run.text
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.text
        assert "learner  | saved" in run.text


def test_a_server_that_was_started_elsewhere_is_used_and_not_ended():
    port = free_port()
    elsewhere = subprocess.Popen([*FAKE, str(port)])
    try:
        with launch(DONE, [{"port": port, "command": None}]) as run:
            assert run.wait() == 0, run.text
            assert elsewhere.poll() is None
    finally:
        elsewhere.kill()
        elsewhere.wait()


def test_a_reader_that_goes_away_stops_no_part(tmp_path):
    learner = f"import time\nfor k in range(400): print('x' * 1000)\nopen({str(tmp_path / 'done')!r}, 'w').close()"
    with launch(learner, [fake()]) as run:
        run.read_until("waiting")
        run.process.stdout.close()
        assert run.process.wait(timeout=20) == 0
        assert (tmp_path / "done").exists()
        run.process.stdout = None


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_ranks_of_torchrun_save_after_a_signal_and_end_with_torchrun_if_it_is_killed(tmp_path, is_killed):
    script = tmp_path / "rank.py"
    script.write_text(SAVES)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    with launch([sys.executable, *torchrun], [fake()], ranks=True) as run:
        learner = int(re.search(r"process (\d+)", run.read_until("started learner"))[1])
        run.read_until("training")
        run.read_until("training")
        if is_killed:
            os.kill(learner, signal.SIGKILL)
        else:
            run.process.send_signal(signal.SIGTERM)
        assert run.wait() == (137 if is_killed else 0), run.text
        assert run.text.count("saved") == (0 if is_killed else 2)
