"""Plan a launch: which servers and learners are started, with which commands, on which devices.

This is pure code: it looks at the settings and the command line, and not at the machine. All problems of a plan
are reported at once.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from coordexp.config import Settings
from coordexp.config.rollout import is_loopback_host
from coordexp.config.rules import DATA_PARALLEL, SERVERS, TENSOR_PARALLEL, uses_vllm
from coordexp.errors import ConfigError, Finding

LISTENS_AT = ("127.0.0.1", "localhost", "::1")  # hosts that a server listens at without --host
SERVER_GPUS, TRAIN_GPUS = "--server-gpus", "--train-gpus"


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `coordexp launch`. Lists of GPUs are the texts that the user wrote, or None."""

    config: str
    server_gpus: str | None = None
    train_gpus: str | None = None
    cpu: bool = False
    learners: int | None = None  # with `cpu`
    start_servers: bool = True
    resume: bool = False
    images: tuple[str, ...] = ()  # folders that servers may read images from, besides those of the data files
    overrides: tuple[str, ...] = ()  # of the config, such as training.max_steps=6

    @property
    def config_words(self) -> tuple[str, ...]:
        """The config as options of `coordexp serve` and `coordexp train`."""
        return "--config", self.config, *(f"--set={override}" for override in self.overrides)


@dataclass(frozen=True)
class Part:
    """One command to start, with additions to the launcher's environment. Without GPUs it runs on the CPU."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    ranks: bool = False  # the command is torchrun: signals go to the ranks that it starts


@dataclass(frozen=True)
class PlannedServer:
    """A rollout server of the config. If it is started elsewhere, `part` and `world_size` are None."""

    index: int
    base_url: str
    group_port: int
    world_size: int | None
    part: Part | None

    @property
    def name(self) -> str:
        return f"server {self.index}"


@dataclass(frozen=True)
class Plan:
    """Everything that a launch starts or waits for."""

    servers: tuple[PlannedServer, ...]
    learner: Part  # the command of all learner processes
    learners: int

    @property
    def local_servers(self) -> tuple[PlannedServer, ...]:
        """The servers that this launch starts itself."""
        return tuple(server for server in self.servers if server.part is not None)


def number_of_learners(options: LaunchOptions) -> int:
    """Return the number of learner processes, which some rules of the config depend on."""
    return options.learners or 1 if options.cpu else max(1, len(gpu_ids(options.train_gpus)))


def plan_problems(settings: Settings, options: LaunchOptions) -> list[Finding]:
    """Return all problems that rule out a plan."""
    return [*option_problems(options), *_config_problems(settings, options)]


def make_plan(settings: Settings, options: LaunchOptions) -> Plan:
    """Return the plan. Raise a ConfigError with all `plan_problems` if there are any."""
    if findings := plan_problems(settings, options):
        raise ConfigError(findings)
    size = settings.rollout_matching.vllm.devices_per_server
    gpus = gpu_ids(options.server_gpus)
    servers = []
    for index, server in enumerate(settings.rollout_matching.vllm.server.servers):
        here = options.start_servers and is_loopback(server.base_url)
        own, gpus = (gpus[:size], gpus[size:]) if here else ((), gpus)
        words = ["-m", "coordexp", "serve", *options.config_words, "--index", str(index)]
        command = (sys.executable, *words, *(f"--images={folder}" for folder in options.images))
        part = Part(f"server {index}", command, device_variables(own), own) if here else None
        servers.append(PlannedServer(index, server.base_url, server.group_port, size if here else None, part))
    return Plan(tuple(servers), _learner(options), number_of_learners(options))


def is_loopback(base_url: str) -> bool:
    """Return True if the host of a URL is this machine's loopback address."""
    return is_loopback_host(urlsplit(base_url).hostname or "")


def _learner(options: LaunchOptions) -> Part:
    count, gpus = number_of_learners(options), gpu_ids(options.train_gpus)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count))
    train = ("-m", "coordexp", "train", *options.config_words, *(["--resume"] if options.resume else []))
    command = (sys.executable, *(torchrun if count > 1 else ()), *train)
    return Part("learner", command, device_variables(gpus), gpus, ranks=count > 1)


def device_variables(gpus: tuple[int, ...]) -> dict[str, str]:
    """Return the variables that show a part only these GPUs, numbered as nvidia-smi does."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpu_ids(text: str | None) -> tuple[int, ...]:
    """Return the numbers in a list such as `0,1,2`. Other words are skipped."""
    words = [word.strip() for word in (text or "").split(",")]
    return tuple(int(word) for word in words if word.isdecimal())


def option_problems(options: LaunchOptions) -> Iterator[Finding]:
    """Yield the problems of the command line that do not depend on the config."""
    lists = {SERVER_GPUS: options.server_gpus, TRAIN_GPUS: options.train_gpus}
    for name, text in lists.items():
        words = [word.strip() for word in text.split(",")] if text is not None else []
        if not all(word.isdecimal() for word in words):
            yield Finding("error", name, f"{text!r} is not a list of GPU numbers", f"write e.g. {name} 0,1,2")
        elif len(set(map(int, words))) < len(words):
            yield Finding("error", name, f"{text} names a GPU twice", "write each GPU once")
        if text is not None and options.cpu:
            yield Finding("error", name, f"{text} was given together with --cpu", "leave one of the two out")
    both = sorted(set(gpu_ids(options.server_gpus)) & set(gpu_ids(options.train_gpus)))
    if both:
        shared = ", ".join(map(str, both))
        fix = f"give each GPU to a server or to a learner, not to both ({SERVER_GPUS} {options.server_gpus})"
        yield Finding("error", TRAIN_GPUS, f"GPU {shared} is in {SERVER_GPUS} too", fix)
    if not options.cpu and options.train_gpus is None:
        yield Finding("error", TRAIN_GPUS, "missing", f"write e.g. {TRAIN_GPUS} 3, or --cpu to run without GPUs")
    if options.learners is not None and not options.cpu:
        fix = f"leave it out: one learner runs on each of {TRAIN_GPUS}"
        yield Finding("error", "--learners", "is only for --cpu", fix)
    if not options.start_servers and options.server_gpus is not None:
        fix = f"leave {SERVER_GPUS} out, or --no-servers"
        yield Finding(
            "error", SERVER_GPUS, f"{options.server_gpus} was given, but --no-servers starts no server", fix
        )


def _config_problems(settings: Settings, options: LaunchOptions) -> Iterator[Finding]:
    train = f"run coordexp train --config {options.config}"
    if not settings.uses_rollouts and settings.backend != "vllm":
        problem = f"{settings.custom.trainer_variant} makes no rollouts, so there are no servers to start"
        yield Finding("error", "custom.trainer_variant", problem, train)
    elif not uses_vllm(settings, "server"):
        fix = f"set {settings.backend_setting}: vllm and rollout_matching.vllm.mode: server, or {train}"
        yield Finding("error", "rollout_matching.vllm.mode", "this run has no rollout servers to start", fix)
    elif options.start_servers:
        yield from _server_problems(settings, options)


def _server_problems(settings: Settings, options: LaunchOptions) -> Iterator[Finding]:
    """Yield the problems of the servers that are to be started here: their addresses and their GPUs."""
    vllm = settings.rollout_matching.vllm
    servers, size = vllm.server.servers, vllm.devices_per_server
    here = [index for index, server in enumerate(servers) if is_loopback(server.base_url)]
    for index in here:
        url = urlsplit(servers[index].base_url)
        if url.scheme != "http" or url.path or url.hostname not in LISTENS_AT:
            fix = f"write e.g. http://127.0.0.1:{url.port or 8000}, or start it yourself and give --no-servers"
            problem = f"{servers[index].base_url} is not an address that a server started here can listen at"
            yield Finding("error", f"{SERVERS}[{index}].base_url", problem, fix)
    given, needed = len(gpu_ids(options.server_gpus)), len(here) * size
    if not here:
        fix = (
            "start each on its machine (coordexp serve --config X --index i --host H) and give --no-servers, or "
            "use a base_url of this machine, e.g. http://127.0.0.1:8000"
        )
        yield Finding("error", SERVERS, f"none of the {len(servers)} servers is on this machine", fix)
    elif given != needed and not options.cpu:
        share = "one GPU each" if size == 1 else f"{size} GPUs each ({TENSOR_PARALLEL} * {DATA_PARALLEL})"
        problem = f"{given} GPUs, and the config has {len(here)} servers on this machine with {share}"
        fix = f"give {needed} GPUs, or change the number of servers or of GPUs for each in the config"
        yield Finding("error", SERVER_GPUS, "missing" if options.server_gpus is None else problem, fix)
