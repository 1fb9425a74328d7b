"""Python programs as processes that tests start: forked from a process that has imported everything once.

To import torch, transformers and coordexp takes ten seconds of a processor, and most programs that tests start
work for two. `start` therefore asks a *zygote* for a fork: a process that has imported them and computes nothing.
It begins with the first program of a test session and ends with the session. With the environment variable
COORDEXP_TESTS_COLD, or if the program's environment has a variable that libraries read while they are imported,
Python is started anew instead.

Each program has a *keeper*, a small process above it, to which Linux gives the program's descendants when their
own parents end. All that a program leaves behind is therefore below its keeper, whichever session or process group
it is in, and ends when the keeper's connection closes: with the test, or if the tests are killed.
"""

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

COLD = "COORDEXP_TESTS_COLD"
# Libraries read variables with these prefixes while they are imported.
READ_AT_IMPORT = (
    "PYTHON",
    "HF_",
    "TRANSFORMERS_",
    "VLLM_",
    "OMP_",
    "TORCH",
    "CUDA",
    "LC_",
    "LANG",
    "XDG_",
    "HOME",
    "LD_",
)
SET_NAME, SET_CHILD_SUBREAPER = 15, 36  # options of prctl, see linux/prctl.h
IMPORTED = (
    "coordexp.cli", "coordexp.demo.model", "coordexp.detect.answering", "coordexp.evaluate", "coordexp.pages",
    "coordexp.rollout.hugging_face", "coordexp.train.callbacks", "coordexp.train.run", "peft",
    "accelerate.utils.fsdp_utils", "torch.distributed.run", "torch.utils.tensorboard",
    "transformers.models.qwen3_vl",
)  # fmt: skip
_starting = threading.Lock()


class Program:
    """A program that was started. It has the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._received = connection, b""
        self.returncode: int | None = None
        self.keeper, self.pid = json.loads(self._line(None))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def processes(self) -> list[psutil.Process]:
        """Return its living processes: itself and all that it started, also if their parents have ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [process for process in psutil.Process(self.keeper).children(recursive=True) if _lives(process)]
        return []

    def close(self) -> None:
        """Kill what is left of it."""
        self._connection.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.wait_procs([psutil.Process(self.keeper)], timeout=20)

    def _line(self, timeout: float | None) -> bytes:
        until = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._received:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                raise subprocess.TimeoutExpired(str(getattr(self, "pid", "")), timeout or 0.0)
            received = self._connection.recv(1024)
            assert received, "the keeper of the program has ended"
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line


def start(
    words: Sequence[str], *, cwd: Path | str, env: Mapping[str, str], stdout: int, stderr: int, cold: bool = False
) -> Program:
    """Start Python with these arguments: `-m MODULE`, `-c CODE` or a script, and the program's own. It leads a new
    session."""
    differs = {name for name in {*env, *os.environ} if env.get(name) != os.environ.get(name)} - {"PYTHONPATH"}
    differs -= {"OMP_NUM_THREADS"} if env.get("OMP_NUM_THREADS") == "1" else set()
    cold = cold or COLD in os.environ or any(name.startswith(READ_AT_IMPORT) for name in differs)
    request = {"words": list(words), "cwd": str(cwd), "env": dict(env), "cold": cold}
    with _starting:
        path = _zygote(importing=not cold)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    content = json.dumps(request).encode()
    descriptors = array.array("i", [stdout, stderr])
    connection.sendmsg([b"%20d" % len(content)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.sendall(content)
    return Program(connection)


def run(
    words: Sequence[str],
    *,
    cwd: Path | str,
    env: Mapping[str, str] | None = None,
    timeout: float = 200,
    check: bool = False,
    cold: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, as `subprocess.run` with `capture_output` and `text` does."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = start(
            words,
            cwd=cwd,
            env=os.environ if env is None else env,
            stdout=out.fileno(),
            stderr=err.fileno(),
            cold=cold,
        )
        try:
            code = program.wait(timeout)
        finally:
            program.close()
        shown = []
        for file in (out, err):
            file.seek(0)
            shown.append(file.read().decode(errors="replace").replace("\r\n", "\n"))
    done = subprocess.CompletedProcess(list(words), code, *shown)
    if check:
        done.check_returncode()
    return done


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank of a process in its run."""
    with contextlib.suppress(psutil.NoSuchProcess):
        # A fork has the environment of the zygote in /proc, and its rank in its name.
        word, _, number = process.name().partition(" ")
        rank = number if word == "rank" else process.environ().get("RANK", "")
        return int(rank) if rank.isdigit() else None
    return None


@functools.cache
def _zygote(importing: bool) -> str:
    """Start the process that forks keepers, with or without imports. Return the path of its socket."""
    folder = tempfile.mkdtemp(prefix="zygote-")
    path = f"{folder}/socket"
    words = [sys.executable, "-m", "tests.zygote", path, *(IMPORTED if importing else ())]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), *sys.path]))}
    process = subprocess.Popen(words, env=env | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE)
    atexit.register(process.kill)
    until = time.monotonic() + 170
    while not Path(path).exists():
        assert process.poll() is None and time.monotonic() < until, "the zygote did not start"
        time.sleep(0.05)
    return path


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


# What follows runs in the zygote and its forks.


def main(path: str, modules: Sequence[str]) -> NoReturn:
    paths = list(sys.path)
    for module in modules:
        importlib.import_module(module)
    if modules:
        _fork_ranks()
    gc.collect()
    gc.freeze()  # a fork does not search what was imported here, and shares its memory
    assert threading.active_count() == 1, threading.enumerate()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no parent
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    Path(f"{path}.new").rename(path)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:  # the tests have ended: it is closed
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _keep(connection, paths)
        connection.close()
    sys.exit()


def _keep(connection: socket.socket, paths: list[str]) -> NoReturn:
    """Start the program that is asked for, say how it ended, and end what is left when the connection closes."""
    prctl(SET_CHILD_SUBREAPER, 1)
    os.setsid()
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    size, ancillary, _, _ = connection.recvmsg(20, socket.CMSG_SPACE(8))
    stdout, stderr = array.array("i", ancillary[0][2])
    content = b""
    while len(content) < int(size):
        content += connection.recv(1 << 20)
    child = os.fork()
    if child == 0:
        for number in (connection.fileno(), reading):
            os.close(number)
        signal.set_wakeup_fd(-1)
        os.close(writing)
        _become(json.loads(content), stdout, stderr, paths)
    os.close(stdout)
    os.close(stderr)
    connection.sendall(b"[%d, %d]\n" % (os.getpid(), child))
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
        ready, _, _ = select.select([connection, reading], [], [])
        if connection in ready:  # closed: nothing is ever sent
            break
        os.read(reading, 1024)
    me = psutil.Process()
    while left := me.children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    os._exit(0)


def _become(program: Mapping[str, Any], stdout: int, stderr: int, paths: Sequence[str]) -> NoReturn:
    """Be the program: in a fork that has imported everything, or in a new Python."""
    os.setsid()
    for number, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, stdout), (2, stderr)):
        os.dup2(source, number)
        if source > 2:
            os.close(source)
    os.chdir(program["cwd"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if program["cold"]:
        os.execve(sys.executable, [sys.executable, *program["words"]], program["env"])
    _run_and_exit(program["words"], program["env"], paths)


def _run_and_exit(words: Sequence[str], env: Mapping[str, str], paths: Sequence[str]) -> NoReturn:
    """Run Python's arguments as Python does after a fork, and end as it does."""
    os.environ.clear()
    os.environ.update(env)
    if rank := env.get("RANK"):
        name = ctypes.create_string_buffer(
            f"rank {rank}".encode()
        )  # a fork shows its parent's environment in /proc
        prctl(SET_NAME, ctypes.addressof(name))
    first, *others = words
    inherited = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = [path for path in paths if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [str(Path.cwd()), *inherited, *installed]
    code = 0
    try:
        if first == "-m":
            sys.argv[:] = others
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv[:] = ["-c", *others[1:]]
            sys.modules["__main__"].__dict__.update(__name__="__main__", __file__=None, __spec__=None)
            exec(compile(others[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.argv[:] = list(words)
            sys.path[0] = str(Path(first).absolute().parent)
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - Python prints it, too, and ends with 1
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


class ForkingPopen(subprocess.Popen[bytes]):
    """Starts Python by a fork of this process, for a program that starts others of the same kind."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        names = subprocess.Popen._execute_child.__code__.co_varnames[2 : 2 + len(others)]
        given = dict(zip(names, others, strict=True))
        paths = list(sys.path)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number, source in ((1, given["c2pwrite"]), (2, given["errwrite"])):
                if source >= 0:
                    os.dup2(source, number)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            _run_and_exit(args[2:], given["env"], paths)  # without the name of Python and -u
        self._child_created = True


def _fork_ranks() -> None:
    """Have torchrun fork the ranks of a run."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = ForkingPopen


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
