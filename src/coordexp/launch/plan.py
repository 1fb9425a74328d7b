"""From settings and lists of GPUs to what is started: each server and the learners, their commands, their devices.

Pure: nothing is looked at but what is given. What is wrong with the plan is a ConfigError, all of it at once.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

from coordexp.config import ConfigError, Settings, Violation
from coordexp.config.capacity import capacity_shortage
from coordexp.config.paths import keys_of
from coordexp.config.rules import DATA_PARALLEL, MODE, SERVERS, TENSOR_PARALLEL, uses_vllm

LISTENS_AT = ("127.0.0.1", "localhost", "::1")  # a server that is told no address
SERVER_GPUS, TRAIN_GPUS = "--server-gpus", "--train-gpus"


@dataclass(frozen=True)
class Asked:
    """The command line: what runs where. GPU lists as they were written; None when they were not."""

    config: str
    server_gpus: str | None = None
    train_gpus: str | None = None
    cpu: bool = False
    learners: int | None = None  # on a CPU
    start_servers: bool = True
    resume: bool = False
    images: tuple[str, ...] = ()  # folders that servers may read pictures from, besides those of the data


@dataclass(frozen=True)
class Part:
    """One command, with what its environment has beyond that of the launcher. No GPUs: on the CPU."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    ranks: bool = False  # signals are for the processes that the command starts, as torchrun does


@dataclass(frozen=True)
class PlannedServer:
    """`part` is None for one that is started elsewhere; its world size is then what it says."""

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
    servers: tuple[PlannedServer, ...]
    learner: Part
    learners: int

    @property
    def started(self) -> tuple[PlannedServer, ...]:
        return tuple(server for server in self.servers if server.part is not None)


def number_of_learners(asked: Asked) -> int:
    """That of the command line, which the rules of the config need."""
    return asked.learners or 1 if asked.cpu else max(1, len(gpu_ids(asked.train_gpus)))


def asked_violations(asked: Asked) -> list[Violation]:
    """What is wrong with the command line, whatever the config says."""
    return list(_asked_violations(asked))


def make_plan(settings: Settings, asked: Asked) -> Plan:
    violations = [*asked_violations(asked), *_config_violations(settings, asked)]
    if violations:
        raise ConfigError(violations)
    size = settings.rollout_matching.vllm.devices_per_server
    gpus = gpu_ids(asked.server_gpus)
    servers = []
    for index, server in enumerate(settings.rollout_matching.vllm.server.servers):
        here = asked.start_servers and is_loopback(server.base_url)
        mine, gpus = (gpus[:size], gpus[size:]) if here else ((), gpus)
        words = ["-m", "coordexp", "serve", "--config", asked.config, "--index", str(index)]
        command = (sys.executable, *words, *(f"--images={folder}" for folder in asked.images))
        part = Part(f"server {index}", command, _devices(mine), mine) if here else None
        servers.append(PlannedServer(index, server.base_url, server.group_port, size if here else None, part))
    return Plan(tuple(servers), _learner(asked), number_of_learners(asked))


def is_loopback(base_url: str) -> bool:
    return is_loopback_host(urlsplit(base_url).hostname or "")


def is_loopback_host(host: str) -> bool:
    """Return whether an address, or the name localhost, can be reached from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def capacity_violations(settings: Settings, sizes: tuple[int, ...], learners: int) -> Iterator[Violation]:
    """R15, with sizes that were planned or that the servers gave."""
    if shortage := capacity_shortage(settings.rollout_matching.decode_batch_size, sizes, learners):
        yield Violation(("rollout_matching", "decode_batch_size"), *shortage)


def _learner(asked: Asked) -> Part:
    count, gpus = number_of_learners(asked), gpu_ids(asked.train_gpus)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count))
    train = ("-m", "coordexp", "train", "--config", asked.config, *(["--resume"] if asked.resume else []))
    command = (sys.executable, *(torchrun if count > 1 else ()), *train)
    return Part("learner", command, _devices(gpus), gpus, ranks=count > 1)


def _devices(gpus: tuple[int, ...]) -> dict[str, str]:
    """GPUs by the numbers that nvidia-smi gives them."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpu_ids(text: str | None) -> tuple[int, ...]:
    """As far as they are numbers."""
    words = [word.strip() for word in (text or "").split(",")]
    return tuple(int(word) for word in words if word.isdecimal())


def _asked_violations(asked: Asked) -> Iterator[Violation]:
    given = {SERVER_GPUS: asked.server_gpus, TRAIN_GPUS: asked.train_gpus}
    for name, text in given.items():
        words = [word.strip() for word in text.split(",")] if text is not None else []
        if not all(word.isdecimal() for word in words):
            yield Violation((name,), f"{text!r} is not a list of GPU numbers", f"write e.g. {name} 0,1,2")
        elif len(set(map(int, words))) < len(words):
            yield Violation((name,), f"{text} names a GPU twice", "write each GPU once")
        if text is not None and asked.cpu:
            yield Violation((name,), f"{text}, and --cpu is given", "leave one of the two out")
    both = sorted(set(gpu_ids(asked.server_gpus)) & set(gpu_ids(asked.train_gpus)))
    if both:
        shared = ", ".join(map(str, both))
        fix = f"give each GPU to a server or to a learner, not to both ({SERVER_GPUS} {asked.server_gpus})"
        yield Violation((TRAIN_GPUS,), f"GPU {shared} is in {SERVER_GPUS} too", fix)
    if not asked.cpu and asked.train_gpus is None:
        yield Violation((TRAIN_GPUS,), "missing", f"write e.g. {TRAIN_GPUS} 3, or --cpu to run without GPUs")
    if asked.learners is not None and not asked.cpu:
        fix = f"leave it out: one learner runs on each of {TRAIN_GPUS}"
        yield Violation(("--learners",), "has a meaning with --cpu only", fix)
    if not asked.start_servers and asked.server_gpus is not None:
        fix = f"leave {SERVER_GPUS} out, or --no-servers"
        yield Violation((SERVER_GPUS,), f"{asked.server_gpus}, and --no-servers starts no server", fix)


def _config_violations(settings: Settings, asked: Asked) -> Iterator[Violation]:
    if not settings.uses_rollouts:
        problem = f"{settings.custom.trainer_variant} makes no rollouts, so there are no servers to start"
        yield Violation(keys_of("custom.trainer_variant"), problem, f"coordexp train --config {asked.config}")
        return
    if not uses_vllm(settings, "server"):
        fix = f"set rollout_backend: vllm and vllm.mode: server, or use coordexp train --config {asked.config}"
        yield Violation(keys_of(MODE), "this run has no rollout servers to start", fix)
        return
    yield from _server_violations(settings, asked)
    if asked.start_servers:
        servers = settings.rollout_matching.vllm.server.servers
        if all(is_loopback(server.base_url) for server in servers):
            size = settings.rollout_matching.vllm.devices_per_server
            yield from capacity_violations(settings, (size,) * len(servers), number_of_learners(asked))


def _server_violations(settings: Settings, asked: Asked) -> Iterator[Violation]:
    """Of those that are to be started here."""
    if not asked.start_servers:
        return
    servers = settings.rollout_matching.vllm.server.servers
    here = [index for index, server in enumerate(servers) if is_loopback(server.base_url)]
    for index in here:
        url = urlsplit(servers[index].base_url)
        if url.scheme != "http" or url.path or url.hostname not in LISTENS_AT:
            fix = f"write e.g. http://127.0.0.1:{url.port or 8000}, or start it yourself and give --no-servers"
            problem = f"{servers[index].base_url} is not what a server listens at that is started here"
            yield Violation(keys_of(f"{SERVERS}[{index}].base_url"), problem, fix)
    if not here:
        fix = (
            "start each on its machine (coordexp serve --config X --index i --host H) and give --no-servers, or "
            "use a base_url of this machine, e.g. http://127.0.0.1:8000"
        )
        yield Violation(keys_of(SERVERS), f"none of the {len(servers)} servers is on this machine", fix)
    elif not asked.cpu:
        yield from _gpus_fit(settings, asked, len(here))


def _gpus_fit(settings: Settings, asked: Asked, here: int) -> Iterator[Violation]:
    vllm = settings.rollout_matching.vllm
    size = vllm.devices_per_server
    found = len(gpu_ids(asked.server_gpus))
    if found == here * size:
        return
    each = "one GPU each" if size == 1 else f"{size} GPUs each ({TENSOR_PARALLEL} * {DATA_PARALLEL})"
    problem = f"{found} GPUs, and the config has {here} servers on this machine with {each}"
    fix = f"give {here * size} GPUs"
    if found and found % size == 0:
        fix += f", or list {found // size} servers in {SERVERS}"
    for name, other in (
        ("data_parallel_size", vllm.tensor_parallel_size or 1),
        ("tensor_parallel_size", vllm.data_parallel_size),
    ):
        if found and found % (here * other) == 0:
            fix += f", or set vllm.{name}: {found // (here * other)}"
    yield Violation((SERVER_GPUS,), "missing" if asked.server_gpus is None else problem, fix)
