"""Whether a rollout server is the one that a learner needs: the same model, dtype and guard, on other devices."""

import socket
from collections.abc import Sequence

import torch

from coordexp.errors import EngineError
from coordexp.rollout.setup import Setup
from coordexp.rollout.wire import ServerFacts, model_difference, model_fingerprint

ALTERNATIVES = "set rollout_matching.vllm.mode: colocate, or rollout_matching.rollout_backend: hf"
OTHERWISE = f"or {ALTERNATIVES}"


def check_server(who: str, facts: ServerFacts, learner: Setup, devices: Sequence[str]) -> None:
    """`devices` are those of all learner ranks."""
    if facts.foreign:
        _check_plugin(who, facts, learner)
        return
    if told := model_difference(model_fingerprint(learner.folder), facts.model or {}):
        raise EngineError(
            f"{who}: it serves another model than {learner.folder}: {told}\n"
            "  start it with the config that the learner has (model.path)"
        )
    if facts.dtype != learner.dtype:
        raise EngineError(
            f"{who}: its weights are {facts.dtype}, and model.dtype is {learner.dtype}\n"
            "  start it with the config that the learner has"
        )
    wanted = learner.settings.vllm.max_model_len
    if wanted is not None and facts.max_model_len != wanted:
        raise EngineError(
            f"{who}: its max_model_len is {facts.max_model_len}, and the learner's {wanted}\n"
            "  start it with the config that the learner has"
        )
    _check_guard(who, facts, learner)
    if shared := {plain(one) for one in facts.devices} & {plain(one) for one in devices if one}:
        raise EngineError(
            f"{who}: it is on {', '.join(sorted(shared))}, where a learner rank is too\n"
            "  give them GPUs of their own (CUDA_VISIBLE_DEVICES), or set rollout_matching.vllm.mode: colocate"
        )


def _check_plugin(who: str, facts: ServerFacts, learner: Setup) -> None:
    """Raise EngineError if the run needs the repeat guard and this ms-swift server does not run our plugin with
    the learner's settings."""
    if facts.guard is not None:
        _check_guard(who, facts, learner)
    elif learner.settings.repeat_terminate.enabled:
        raise EngineError(
            f"{who}: this ms-swift server reports no repeat guard, and "
            "rollout_matching.repeat_terminate.enabled is true\n"
            "  start it with `swift rollout --external_plugins FILE`, where FILE is coordexp.plugins."
            "SWIFT_REPEAT_GUARD, as docs/operations.md shows, or with `coordexp serve`, or set enabled: false, "
            f"{OTHERWISE}"
        )


def _check_guard(who: str, facts: ServerFacts, learner: Setup) -> None:
    theirs, ours = dict(facts.guard or {}), learner.settings.repeat_terminate.model_dump(mode="json")
    if other := sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)):
        name = other[0]
        raise EngineError(
            f"{who}: its repeat_terminate.{name} is {theirs.get(name)}, and the learner's {ours.get(name)}\n"
            "  a server loads its guard when it starts: start it with the config that the learner has"
        )


def own_device(device: torch.device) -> str:
    """With the host's name; empty without a GPU."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def plain(device: str) -> str:
    """However the id of a GPU is written."""
    host, _, identity = device.rpartition("/")
    return f"{host}/{identity.removeprefix('GPU-').lower()}"
