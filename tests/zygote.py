"""Python programs as processes that tests start: forked from a process that has imported everything once.

To import torch, transformers, vLLM and coordexp takes ten to thirty seconds of a processor, and most programs that
tests start work for two. `start` therefore asks a *zygote* for a fork: a process that has imported them and does
nothing. It begins with the first program of a test session, serves all processes of the session, and ends with it.
Python is started anew instead with the variable COORDEXP_TESTS_COLD, in tests with the mark `cold`, which are
about the start, and if the program's environment has a variable that libraries read while they are imported.

A program that starts Python gets a fork, too: torchrun its ranks, a server its engine, an engine its workers. Each
program therefore has a zygote of its own below it, which is forked before the program begins. Linux shows forks as
if they had been started: with their own arguments and environments, and as children of those that start them.

Each program of a test has a *keeper*, a small process above it, to which Linux gives the program's descendants
when their own parents end. All that a program leaves behind is therefore below its keeper, whichever session or
process group it is in, and ends when the keeper's connection closes: with the test, or if the tests are killed.
"""

import _posixsubprocess
import atexit
import contextlib
import ctypes
import errno
import fcntl
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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

COLD = "COORDEXP_TESTS_COLD" in os.environ
STARTS = "COORDEXP_TESTS_STARTS"  # a file that gets a line for each program that a zygote starts
# Libraries read variables with these prefixes while they are imported.
READ_AT_IMPORT = (
    "PYTHON", "HF_", "TRANSFORMERS_", "VLLM_LOGGING_", "OMP_", "TORCH_", "CUDA", "LC_", "LANG", "XDG_", "HOME",
    "LD_",
)  # fmt: skip
SET_DEATH_SIGNAL, SET_SUBREAPER, GET_SUBREAPER = 1, 36, 37  # options of prctl, see linux/prctl.h
IMPORTED = (
    "coordexp.cli", "coordexp.demo.model", "coordexp.detect.answering", "coordexp.evaluate", "coordexp.pages",
    "coordexp.rollout.hugging_face", "coordexp.train.run", "peft",
    "accelerate.utils.fsdp_utils", "torch.distributed.run", "torch.utils.tensorboard",
    "transformers.models.qwen3_vl",
)  # fmt: skip
# Without `coordexp.servers.worker`: a worker ties itself to its engine when it imports this module.
IMPORTED_FOR_ENGINES = (
    "vllm", "vllm.entrypoints.llm", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor", "vllm.v1.core.sched.scheduler", "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen3_vl", "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.plugins.lora_resolvers.filesystem_resolver", "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.distributed.elastic_ep.elastic_execute", "transformers.tokenization_mistral_common",
    "torch._dynamo.backends.inductor", "torch._dynamo.backends.cudagraphs", "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental", "torch.export._trace", "sympy.combinatorics",
    "coordexp.rollout.repeat_guard", "coordexp.rollout.update",
    "coordexp.servers.app", "coordexp.servers.client",
)  # fmt: skip
ROOM = 50_000  # bytes for the arguments of a fork, and for its environment, in the place of the zygote's
_lock = threading.Lock()
_start_really = _posixsubprocess.fork_exec
cold = COLD  # also while a test runs that is marked as one that starts Python anew
imported: Sequence[str] = IMPORTED  # by the zygote, when it starts
session = ""  # the name of a test session of several processes, which are children of one


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
            return [process for process in psutil.Process(self.keeper).children(recursive=True) if lives(process)]
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


def start(words: Sequence[str], *, cwd: Path | str, env: Mapping[str, str], stdout: int, stderr: int) -> Program:
    """Start Python with these arguments: `-m MODULE`, `-c CODE` or a script, and the program's own. It leads a new
    session."""
    differs = {name for name in {*env, *os.environ} if env.get(name) != os.environ.get(name)} - {"PYTHONPATH"}
    differs -= {"OMP_NUM_THREADS"} if env.get("OMP_NUM_THREADS") == "1" else set()
    really = cold or any(name.startswith(READ_AT_IMPORT) for name in differs)
    program = {"words": list(words), "cwd": str(cwd), "env": dict(env), "session": True, "cold": really}
    with _lock:
        address = _zygote(importing=not really)
    with Path(os.devnull).open() as stdin:
        return Program(_ask(address, program | {"kept": True}, {0: stdin.fileno(), 1: stdout, 2: stderr}))


def run(
    words: Sequence[str],
    *,
    cwd: Path | str,
    env: Mapping[str, str] | None = None,
    timeout: float = 200,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, as `subprocess.run` with `capture_output` and `text` does."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        environment = os.environ if env is None else env
        program = start(words, cwd=cwd, env=environment, stdout=out.fileno(), stderr=err.fileno())
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


@functools.cache
def _zygote(importing: bool) -> bytes:
    """Start the process that forks keepers, with or without imports, unless another process of this test session
    has done so. Return the address of its socket."""
    modules = imported if importing else ()
    address = f"\0coordexp-zygote-{session}-{len(modules)}".encode() if session else b""
    try:
        listener = _listen(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return address
    owner = os.pidfd_open(os.getppid() if session else os.getpid())
    files = [listener.fileno(), owner]
    words = [sys.executable, "-m", "tests.zygote", *map(str, files), *modules, " " * ROOM]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), *sys.path]))}
    env |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "ROOM": " " * ROOM}
    for number in files:
        os.set_inheritable(number, True)
    no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    os.posix_spawn(sys.executable, words, env, file_actions=[no_input])  # it ends with its owner, not before
    os.close(owner)
    address = listener.getsockname()
    listener.close()
    return address


def lives(process: psutil.Process) -> bool:
    """Return True if the process exists and has not ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _listen(address: bytes = b"") -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)  # none of them is in the file system; without one, Linux chooses it
    except OSError:
        listener.close()
        raise
    listener.listen(64)
    return listener


def _ask(address: bytes, program: Mapping[str, Any], files: Mapping[int, int]) -> socket.socket:
    """Ask a zygote for a program. `files` are the numbers of its open files, and ours for them."""
    content = json.dumps({**program, "files": list(files)}).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [b"%20d" % len(content)], list(files.values()))
    connection.sendall(content)
    return connection


# What follows runs in zygotes and their forks.


def main(listener: int, owner: int, modules: Sequence[str]) -> NoReturn:
    for module in modules:
        importlib.import_module(module)
    if modules:
        importlib.import_module("setproctitle").getproctitle()  # finds out where Linux keeps the title
        importlib.import_module("transformers").models.auto.VIDEO_PROCESSOR_MAPPING.values()  # imports them
    gc.collect()
    gc.freeze()  # a fork does not search what was imported here, and shares its memory
    assert threading.active_count() == 1, threading.enumerate()
    _serve(socket.socket(fileno=listener), owner)


def _serve(listener: socket.socket, *until_readable: int) -> NoReturn:
    """Start the programs that are asked for, until one of these files can be read: the owner has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    waiting = listener.fileno()
    while select.select([waiting, *until_readable], [], [])[0] == [waiting]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _answer(connection)
        connection.close()
    os._exit(0)


def _answer(connection: socket.socket) -> NoReturn:
    """Start a program below a keeper, or as a child of the process that asks."""
    size, files, _, _ = socket.recv_fds(connection, 20, 200)
    content = b""
    while len(content) < int(size):
        content += connection.recv(1 << 20)
    program = json.loads(content)
    if program["kept"]:
        _keep(connection, program, files)
    me = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == me:  # then the process that asks adopts this one
        time.sleep(0.0005)
    connection.sendall(b"%d\n" % os.getpid())
    connection.close()
    _become(program, files)


def _keep(connection: socket.socket, program: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Start the program, say how it ended, and end what is left when the connection closes."""
    _prctl(SET_SUBREAPER, 1)
    os.setsid()
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (connection.detach(), reading, writing):
            os.close(number)
        _become(program, files)
    for number in files:
        os.close(number)
    connection.sendall(b"[%d, %d]\n" % (os.getpid(), child))
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
        ready, _, _ = select.select([connection.fileno(), reading], [], [])
        if connection.fileno() in ready:  # closed: nothing is ever sent
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


def _become(program: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Be the program: in a fork that has imported everything, or in a new Python."""
    if STARTS in os.environ:
        with Path(os.environ[STARTS]).open("a") as file:
            file.write(json.dumps([program["cold"], program["kept"], *program["words"]]) + "\n")
    if program["session"]:
        os.setsid()
    if not program["cold"] and program["words"][:2] != ["-m", "pytest"]:  # tests choose themselves what is a fork
        _start_zygote(files)
    above = max(*files, *program["files"]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in files]
    for number, source in zip(program["files"], moved, strict=True):
        os.dup2(source, number)
    for number in {*range(max(moved) + 1)} - {*program["files"]}:
        with contextlib.suppress(OSError):
            os.close(number)
    os.chdir(program["cwd"])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, program.get("blocked", ()))
    if program["cold"]:
        os.execve(sys.executable, [sys.executable, *program["words"]], program["env"])
    _run_and_exit(program["words"], program["env"], program.get("first"))


def _start_zygote(files: Sequence[int]) -> None:
    """Start the zygote of this program, which ends with it, and start Python from now on as its forks."""
    listener, program = _listen(), os.getpid()
    if os.fork() == 0:
        for number in files:
            os.close(number)
        _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != program:  # it ended before that
            os._exit(0)
        _serve(listener)
    address = listener.getsockname()
    _posixsubprocess.fork_exec = functools.partial(_fork_exec, address)
    subprocess._fork_exec = _posixsubprocess.fork_exec  # type: ignore[attr-defined]


def _fork_exec(zygote: bytes, *arguments: Any) -> int:
    """Start a process, as the function of `_posixsubprocess` does for `subprocess` and `multiprocessing`. If it is
    Python, it is a fork of the zygote and becomes a child of this process."""
    args, _, _, pass_fds, cwd, env, stdin, _, _, stdout, _, stderr, _, error, _, session, *_, first, _ = arguments
    python, *words = map(os.fsdecode, args)
    if python != sys.executable or "resource_tracker" in words[-1]:
        return _start_really(*arguments)
    pairs = [entry.partition(b"=") for entry in env or ()]
    program = {
        "words": words,
        "cwd": os.fsdecode(cwd) if cwd else str(Path.cwd()),
        "env": {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs} if pairs else dict(os.environ),
        "session": session,
        "first": first and [first.func.__module__, first.func.__name__, *first.args],  # a `functools.partial`
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "cold": False,
        "kept": False,
    }
    standard = {number: number if own < 0 else own for number, own in enumerate((stdin, stdout, stderr))}
    passed = {number: number for number in pass_fds if number != error}
    with _lock, _adopting(), _ask(zygote, program, standard | passed) as connection:
        return int(connection.recv(20))


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Let Linux give processes to this process whose parent, below it, ends."""
    before = ctypes.c_int()
    _prctl(GET_SUBREAPER, ctypes.addressof(before))
    _prctl(SET_SUBREAPER, 1)
    yield
    _prctl(SET_SUBREAPER, before.value)


def _run_and_exit(words: Sequence[str], env: Mapping[str, str], call_first: Sequence[Any] | None) -> NoReturn:
    """Run Python's arguments as Python does after a fork, and end as it does."""
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # is chosen again
    _show([sys.executable, *words], env)
    if env.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    if call_first:
        module, name, *given = call_first
        getattr(importlib.import_module(module), name)(*given)
    # The zygote's streams know of its files, for example whether they can be searched.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1 if words[0] == "-u" else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    while words[0].startswith("-") and words[0] not in ("-c", "-m"):
        words = words[1:]  # another option, which is the zygote's, too
    first, *others = words
    inherited = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [str(Path.cwd()), *inherited, *installed]
    code = 0
    try:
        if first == "-m":
            sys.argv[:] = others
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv[:] = ["-c", *others[1:]]
            sys.modules["__main__"] = module = ModuleType("__main__")
            exec(compile(others[0], "<string>", "exec"), module.__dict__)
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


def _show(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Show these arguments and this environment in /proc instead of the zygote's. They are where Linux has put the
    zygote's, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = map(int, fields[45:49])  # see proc_pid_stat(5)
    for start, end, texts in zip(places, places, (words, map("=".join, env.items())), strict=True):
        content = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:-1])
