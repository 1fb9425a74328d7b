"""Loads settings in one pass: compose the YAML, validate the values, check the rules between them, derive values.

All wrong values are reported at once, and then, when all values are valid, all conflicts between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from coordexp.config import rules
from coordexp.config.rollout import default_tensor_parallel_size
from coordexp.config.rules import World, find_conflicts, uses_vllm
from coordexp.config.schema import explain_errors
from coordexp.config.sections import SettingsSection
from coordexp.config.settings import Settings
from coordexp.config.yaml_tree import COMMAND_LINE, Document, Tree, format_path, read_document
from coordexp.errors import ConfigError, Finding

S = TypeVar("S", bound=SettingsSection)


@dataclass(frozen=True)
class Loaded:
    """Validated settings. `origins` maps each value to where it came from; `notes` name what has no effect."""

    settings: Settings
    origins: dict[str, str]
    notes: tuple[Finding, ...]
    files: tuple[str, ...]

    @property
    def overrides(self) -> dict[str, str]:
        """The origins of the values that were given on the command line, by their paths."""
        return {path: origin for path, origin in self.origins.items() if origin.startswith(COMMAND_LINE)}


def load_settings(path: Path | str, world: World | None = None, overrides: Sequence[str] = ()) -> Loaded:
    """Return the settings of a YAML file and of the files it extends. Overrides are texts such as
    `training.max_steps=6`. Raise ConfigError with all wrong values, or with all conflicts between valid ones."""
    return parse_settings(read_document(Path(path), overrides), world, file=str(path))


def parse_settings(document: Document | Tree, world: World | None = None, file: str = "") -> Loaded:
    """Return the settings of a tree in memory. Raise ConfigError as `load_settings` does."""
    document = document if isinstance(document, Document) else Document(document)
    world, findings = world or World(), list(document.findings)
    try:
        settings = Settings.model_validate(document.tree)
        findings += find_conflicts(settings, world)
    except ValidationError as invalid:
        findings += explain_errors(invalid, document.tree)
    if findings:
        raise ConfigError(document.locate(findings), file)
    origins = {format_path(path): str(place) for path, place in document.places.items()}
    notes = tuple(_find_notes(settings, document))
    for path, value, reason in _derive_values(settings, world):
        settings = _replace(settings, path.split("."), value)
        origins[path] = f"derived: {reason}"
    return Loaded(settings, origins, notes, tuple(document.parts))


def _find_notes(s: Settings, document: Document) -> Iterator[Finding]:
    """Yield a note for each module that does not run, for each file whose modules another list replaces, and for
    what the specification accepts without effect."""
    assert s.pipeline is not None
    objective, kept = f"{s.pipeline_path}.objective", {module.name for module in s.pipeline.objective}
    for file, tree in document.parts.items():
        modules: Any = tree
        for key in objective.split("."):
            modules = modules.get(key) if isinstance(modules, dict) else None
        modules = modules if isinstance(modules, list) else []
        names = [module.get("name") for module in modules if isinstance(module, dict)]
        if lost := [str(name) for name in names if name not in kept]:
            problem = f"replaces the list of {file}: {', '.join(lost)} {'is' if len(lost) == 1 else 'are'} gone"
            yield Finding("note", objective, problem, "to keep a module, repeat its entry: lists are not merged")
    for part in ("objective", "diagnostics"):
        for index, module in enumerate(getattr(s.pipeline, part)):
            if reason := rules.idle_reason(module, s):
                yield Finding("note", f"{s.pipeline_path}.{part}[{index}]", f"{module.name} is {reason}")
    if s.rollout_matching.offload.enabled and not uses_vllm(s, "colocate"):
        problem = "not used: only colocated vLLM shares memory with the learner"
        yield Finding("note", "rollout_matching.offload", problem)
    if (
        s.training.per_device_eval_batch_size
        != type(s.training).model_fields["per_device_eval_batch_size"].default
    ):
        problem = "not used: rollout_matching.decode_batch_size sets how evaluation generates answers"
        yield Finding("note", "training.per_device_eval_batch_size", problem)


def _derive_values(s: Settings, world: World) -> Iterator[tuple[str, Any, str]]:
    """Yield the path, the value and the reason of each value that the file leaves open."""
    vllm, length = s.rollout_matching.vllm, rules.max_length(s)
    if not s.uses_rollouts and s.evaluates and s.stage1.eval_backend == "auto":
        reason = f"vLLM is {'' if s.backend == 'vllm' else 'not '}installed"
        reason = reason if s.describes_engine else "rollout_matching.vllm describes no engine"
        yield "stage1.eval_backend", s.backend, f"auto, and {reason}"
    if s.global_max_length is None:
        yield "global_max_length", length, "from template.max_length"
    if s.template.max_length is None:
        yield "template.max_length", length, "from global_max_length"
    if s.rollout_matching.decode_mode is None:
        yield rules.DECODE_MODE, s.rollout_matching.effective_decode_mode, "from the temperature"
    if vllm.tensor_parallel_size is None and vllm.mode == "colocate" and world.learners is not None:
        size = default_tensor_parallel_size(world.learners)
        yield rules.TENSOR_PARALLEL, size, f"common divisor of 4 and the learner world size {world.learners}"
    if vllm.tensor_parallel_size is None and vllm.mode == "server":
        yield rules.TENSOR_PARALLEL, 1, "one device per server"
    if vllm.sync.mode == "auto":
        yield rules.SYNC, rules.sync_mode(s), f"auto, and enable_lora is {str(vllm.enable_lora).lower()}"
    if vllm.max_model_len is None:
        yield "rollout_matching.vllm.max_model_len", length, "from global_max_length"
    if vllm.max_lora_rank is None and vllm.enable_lora and s.model.adapter is not None:
        yield "rollout_matching.vllm.max_lora_rank", s.model.adapter.rank, "from model.adapter.rank"


def _replace(section: S, path: list[str], value: Any) -> S:
    key, *rest = path
    return section.model_copy(update={key: _replace(getattr(section, key), rest, value) if rest else value})
