"""Names that docs/reference documents, to compare them with what a run writes."""

import json
import re
from pathlib import Path

REFERENCE = Path(__file__).parents[1] / "docs/reference"


def find_undocumented_metrics(run: Path) -> list[str]:
    """Return the names in the metrics of a run that docs/reference/metrics.md does not have."""
    documented = _read_patterns("metrics.md")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    names = {name.removesuffix("/mean") for line in lines for name in json.loads(line)}
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in documented))


def find_undocumented_files(run: Path) -> list[str]:
    """Return the files of a run folder and its checkpoints that docs/reference/files.md does not have."""
    documented = _read_patterns("files.md")
    names = {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()}
    names = {re.sub(r"^checkpoint-\d+/", "", name) for name in names}
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in documented))


def _read_patterns(page: str) -> list[re.Pattern[str]]:
    """Return a pattern for each name in the first column of a page's tables. N is a number, NAME a word."""
    names = re.findall(r"^\| `([^`]+)` \|", (REFERENCE / page).read_text(), re.MULTILINE)
    return [re.compile(_to_pattern(name)) for name in names]


def _to_pattern(name: str) -> str:
    words = re.escape(name).replace("NAME", "[^/]+")
    return re.sub(r"(?<![A-Za-z])N(?![A-Za-z])", r"\\d+", words)
