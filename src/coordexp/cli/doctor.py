"""`coordexp doctor`: does this environment have what training needs, in the versions that were tested?"""

import importlib
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import typer
from rich.table import Table

from coordexp.cli.console import out, progress

# The first is needed by the commands that train or generate, the second by the vLLM backends only.
TRAIN = {"torch": "2.13", "torchvision": "0.28", "transformers": "5.19", "accelerate": "1.15"}
VLLM = {"vllm": "0.32"}


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    tested: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        return not self.advice


def doctor() -> None:
    """Import the packages that training uses and compare them with the tested versions. Exits 1 on a problem."""
    with progress("importing torch, transformers and vLLM (some seconds)"):
        findings = [Finding("python", platform.python_version(), "3.11")]
        findings += [_package(name, tested, "train") for name, tested in TRAIN.items()]
        findings += [_package(name, tested, "vllm") for name, tested in VLLM.items()]
        findings.append(_devices())
    table = Table("", "found", "tested", "")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else f"[red]{finding.advice}[/]"
        table.add_row(finding.what, finding.found, finding.tested, mark)
    out.print(table)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


def _package(name: str, tested: str, extra: str) -> Finding:
    install = f"pip install 'coordexp\\[{extra}]'"
    distribution = _distribution(name)
    if distribution is None:
        return Finding(name, "missing", tested, install)
    found = version(distribution)
    shown = found if distribution == name else f"{found} ({distribution})"
    try:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  (whatever stops the import is what the user must read)
        return Finding(name, shown, tested, f"does not import: {type(error).__name__}: {error}")
    if not found.startswith(tested):
        return Finding(name, shown, tested, f"not the tested release; {install}")
    return Finding(name, shown, tested)


def _distribution(name: str) -> str | None:
    for candidate in (name, f"{name}-cpu"):
        try:
            version(candidate)
        except PackageNotFoundError:
            continue
        return candidate
    return None


def _devices() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return Finding("devices", "unknown", "CPU", "torch is missing")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return Finding("devices", names or f"CPU, {os.cpu_count()} cores", "CPU")
