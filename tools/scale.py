"""Write the table of docs/scale.md: which runs fit on which GPUs, by the formulas of `coordexp plan`.

python tools/scale.py
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordexp.cli.plan import load_for_gpus
from coordexp.launch.memory import (
    GIB,
    Learner,
    Model,
    RowSize,
    SampleSize,
    count_server_gpus,
    engine_parts,
    plan_memory,
    total_bytes,
)
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
    """Return the table as Markdown: a row for each model, with the memory on each machine, bold where it fits."""
    names = " | ".join(machine.name for machine in MACHINES)
    head = [f"| model | trained | learner | engine | {names} |", "| --- " * (4 + len(MACHINES)) + "|"]
    return "\n".join([*head, *_rows()])


def _rows() -> Iterator[str]:
    for size in PUBLISHED:
        for trained in ("all weights", f"LoRA {RANK}"):
            plans = [_plan(Model.published(size), trained, machine) for machine in MACHINES]
            cells = (size.upper(), trained, *plans[0][:2], *(total for _, _, total in plans))
            yield f"| {' | '.join(cells)} |"


def _plan(model: Model, trained: str, machine: Machine) -> tuple[str, str, str]:
    """Return the GiB of the learner and of the engine, and the largest total on a GPU."""
    overrides = (
        () if trained == "all weights" else (f"model.adapter.rank={RANK}", f"model.adapter.alpha={2 * RANK}")
    )
    settings = load_for_gpus(ROOT / f"configs/{machine.config}.yaml", machine.gpus, overrides)
    sample = SampleSize()
    uses, findings = plan_memory(settings, model, sample, machine.gpus, machine.memory * GIB)
    row = RowSize.from_settings(settings, sample, model.shape)
    learner = total_bytes(Learner(settings, model, row, machine.gpus - count_server_gpus(settings)).parts())
    engine = total_bytes(engine_parts(settings, model))
    sizes = [f"{bytes / GIB:.1f}" for bytes in (learner, engine, max(use.total for use in uses))]
    fits = all(finding.severity != "error" for finding in findings)
    return sizes[0], sizes[1], f"**{sizes[2]}**" if fits else sizes[2]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{make_table()}\n\n{END}{rest.partition(END)[2]}")
