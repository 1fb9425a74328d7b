"""Stage-1 runs of a tiny model on drawn scenes."""

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml

from coordexp.demo.model import Size, make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from tests import zygote
from tests.integration import stage2_runs
from tests.integration.stage2_runs import ROOT, finish, training

TINY = Size(hidden=64, layers=2, patch=8, vision_hidden=32)


def make_parts(folder: Path, scenes: SceneSettings | None = None, held_out: int = 6) -> Path:
    """Write a tiny model and 40 scenes to a folder, and return it."""
    write_scenes(folder / "data", scenes or SceneSettings(objects=(1, 3)), train=40, val=held_out, seed=1)
    make_model(folder / "model", "small", ordinal=True, size=TINY)
    return folder


def config(parts: Path, name: str, *, adapter: Any = None, dtype: str = "float32", **changes: Any) -> Path:
    """Write the config of a run called `name`. `changes` are of the section `training`."""
    shipped = yaml.safe_load((ROOT / "configs/stage1.yaml").read_text())
    own = {"max_steps": 8, "learning_rate": 1e-3} | changes
    return stage2_runs.config(
        parts,
        name,
        model={"path": str(parts / "model"), "dtype": dtype, "adapter": adapter},
        custom__trainer_variant="stage1_sft",
        stage1={"pipeline": shipped["stage1"]["pipeline"]},
        global_max_length=512,
        rollout_matching={"rollout_backend": "hf", "decode_batch_size": 4, "max_new_tokens": 24},
        **{f"training__{key}": value for key, value in own.items()},
    )


def ran(file: Path, *options: str) -> CompletedProcess[str]:
    return zygote.run(training(file, *options), env=stage2_runs.environment(), cwd=ROOT)


def train(file: Path, *options: str, processes: int = 1) -> str:
    return finish(training(file, *options), processes)
