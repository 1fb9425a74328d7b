"""Write the table of docs/scale.md: which runs fit on which GPUs, by the formulas of `coordexp plan`.

python tools/scale.py
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordexp.cli.plan import load_for_gpus
from coordexp.config.settings import Adapter
from coordexp.launch.fit import PlannedModel, Planner, SampleSize, change_setting
from coordexp.launch.memory import GIB
from coordexp.shapes import PUBLISHED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/scale.md"
RANK = 32
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Machine:
    name: str
    config: str
    gpus: int
    memory: int  # GiB of each GPU


MACHINES = (
    Machine("1 x 24", "stage2-colocate", 1, 24),
    Machine("1 x 80", "stage2-colocate", 1, 80),
    Machine("3 + 1 x 80", "stage2-server-3v1", 4, 80),
    Machine("8 x 80", "stage2-colocate", 8, 80),
)


def make_table() -> str:
    """Return the table as Markdown."""
    head = ["| model | trained | GPUs | learner | engine | on a GPU | verdict | what to change |"]
    return "\n".join([*head, "| --- | --- | --- | --- | --- | --- | --- | --- |", *_rows()])


def _rows() -> Iterator[str]:
    for size, shape in PUBLISHED.items():
        planned = PlannedModel.from_shape(size, shape.with_coordinate_tokens())
        for trained in ("all weights", f"LoRA {RANK}"):
            for machine in MACHINES:
                cells = (size.upper(), trained, machine.name, *_cells(planned, trained, machine))
                yield f"| {' | '.join(cells)} |"


def _cells(planned: PlannedModel, trained: str, machine: Machine) -> tuple[str, ...]:
    settings, split = load_for_gpus(ROOT / f"configs/{machine.config}.yaml", machine.gpus)
    if trained != "all weights":
        settings = change_setting(settings, "model.adapter", Adapter(rank=RANK, alpha=2 * RANK))
    planner = Planner(planned, SampleSize(), split, machine.memory * GIB)
    plan = planner.plan(settings)
    assert plan.engine is not None
    largest = max(use.total for use in plan.uses)
    errors = [finding for finding in plan.findings if finding.severity == "error"]
    fix = errors[0].fix.split("; or ")[0] if errors else ""
    sizes = (planner.learner(settings).bytes, plan.engine.least_bytes, largest)
    return (*(f"{size / GIB:.1f}" for size in sizes), f"**{plan.verdict}**", _as_code(fix))


def _as_code(fix: str) -> str:
    """Return a suggestion with its settings as code."""
    return re.sub(r"(set | and )([\w.]+: (?:\{.*?\}|\S+))", r"\1`\2`", fix)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{make_table()}\n\n{END}{rest.partition(END)[2]}")
