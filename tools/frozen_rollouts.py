"""A rollout backend whose answers all come from the model that training starts from: `offline` of the study.

`tools/study.py` writes it into the folder of the study as an installed package, with an entry point as in
docs/extending.md. Evaluations during such a run are also answered by that model.
"""

from pathlib import Path
from typing import Any

import torch

from coordexp.families import load_model
from coordexp.objective.attention import attention_for
from coordexp.rollout.hugging_face import HuggingFaceBackend

ENTRY_POINT = "[coordexp.rollout_backends]\nfrozen = frozen_rollouts:make_backend\n"
METADATA = "Metadata-Version: 2.1\nName: frozen-rollouts\nVersion: 1\n"


def make_backend(settings: Any, training_set: Any, learner: Any) -> HuggingFaceBackend:
    """Return a backend with a model of its own. Its syncs change nothing but the version that rollouts carry, also
    after a resume."""
    attention = attention_for(learner.device, learner.precision)
    model = load_model(
        Path(settings.model.path), dtype=getattr(torch, learner.dtype), attn_implementation=attention
    ).to(learner.device)
    batch = settings.rollout_matching.decode_batch_size
    return HuggingFaceBackend(lambda: model, training_set.prompts, training_set.table, batch)


def install(folder: Path) -> None:
    """Write this module to a folder as a package that Python finds if the folder is in PYTHONPATH."""
    about = folder / "frozen_rollouts-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "frozen_rollouts.py").write_text(Path(__file__).read_text())
