"""Checks that a rollout server fits the learner: the same model, dtype and guard, on other devices."""

import socket
from collections.abc import Sequence

import torch

from coordexp.errors import EngineError
from coordexp.rollout.engine import EngineSetup
from coordexp.rollout.wire import ServerFacts, model_difference, model_fingerprint

ALTERNATIVES = "set rollout_matching.vllm.mode: colocate, or rollout_matching.rollout_backend: hf"
OTHERWISE = f"or {ALTERNATIVES}"
SAME_CONFIG = "start it with the config that the learner has"


def check_server(server: str, facts: ServerFacts, learner: EngineSetup, devices: Sequence[str]) -> None:
    """Raise EngineError if the server does not fit the learner. `devices` are those of all learner ranks."""
    if facts.is_swift:
        _check_plugin(server, facts, learner)
        return
    if difference := model_difference(model_fingerprint(learner.folder), facts.model or {}):
        raise EngineError(
            f"{server}: it serves another model than {learner.folder}: {difference}",
            f"{SAME_CONFIG} (model.path)",
        )
    if facts.dtype != learner.dtype:
        raise EngineError(
            f"{server}: its weights are {facts.dtype}, but model.dtype is {learner.dtype}", SAME_CONFIG
        )
    length = learner.settings.vllm.max_model_len
    if length is not None and facts.max_model_len != length:
        raise EngineError(
            f"{server}: its max_model_len is {facts.max_model_len}, but the learner's is {length}", SAME_CONFIG
        )
    _check_guard(server, facts, learner)
    if shared := set(map(normalise_device, facts.devices)) & set(map(normalise_device, filter(None, devices))):
        raise EngineError(
            f"{server}: it runs on {', '.join(sorted(shared))}, which a learner rank uses too",
            "give them GPUs of their own (CUDA_VISIBLE_DEVICES), or set rollout_matching.vllm.mode: colocate",
        )


def _check_plugin(server: str, facts: ServerFacts, learner: EngineSetup) -> None:
    """Raise EngineError if the run needs the repeat guard and this ms-swift server does not run our plugin with
    the learner's settings."""
    if facts.guard is not None:
        _check_guard(server, facts, learner)
    elif learner.settings.repeat_terminate.enabled:
        raise EngineError(
            f"{server}: this ms-swift server reports no repeat guard, but "
            "rollout_matching.repeat_terminate.enabled is true",
            "start it with `swift rollout --external_plugins FILE`, where FILE is coordexp.plugins."
            "SWIFT_REPEAT_GUARD, as docs/operations.md shows, or with `coordexp serve`, or set enabled: false, "
            f"{OTHERWISE}",
        )


def _check_guard(server: str, facts: ServerFacts, learner: EngineSetup) -> None:
    theirs, ours = dict(facts.guard or {}), learner.settings.repeat_terminate.model_dump(mode="json")
    if different := sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)):
        name = different[0]
        raise EngineError(
            f"{server}: its repeat_terminate.{name} is {theirs.get(name)}, but the learner's is {ours.get(name)}",
            f"a server loads its guard when it starts: {SAME_CONFIG}",
        )


def own_device(device: torch.device) -> str:
    """Return the GPU of this process, with the name of its machine. Return an empty text without a GPU."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def normalise_device(device: str) -> str:
    """Return the device with the id of its GPU in one form, since ids are written in several."""
    host, _, identity = device.rpartition("/")
    return f"{host}/{identity.removeprefix('GPU-').lower()}"
