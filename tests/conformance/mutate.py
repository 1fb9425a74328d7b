"""Break the code, one small change at a time, and show that a test which claims the broken part fails.

    python tests/conformance/mutate.py               all mutations
    python tests/conformance/mutate.py --quick       those that CI runs
    python tests/conformance/mutate.py R28 R07.C14   those of some requirements or parts

The mutations are data: `mutations.yaml` names the part of the specification, the file, the text and what replaces
it. A mutation is caught when a test that carries the part's mark fails with it and passes without it. Tests that
start a vLLM engine are not run here. The exit code is 1 unless every mutation is caught.

Each mutation is applied to a copy of `src`. Every test run is a fork of a process that has imported what is not
mutated (`tests/zygote.py`), which takes about a second instead of ten.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests import zygote  # noqa: E402
from tests.conformance import page  # noqa: E402

DATA = ROOT / "tests/conformance/mutations.yaml"
WORKERS = 2
DEADLINE_S = 150  # for the tests of one file
# Imported once, before the forks. Modules of coordexp are not among them: each fork imports its own, mutated copy.
WARM = (
    "numpy", "scipy.optimize", "ot", "hypothesis", "pydantic", "typer", "httpx", "fastapi", "uvicorn", "torch",
    "torchvision.ops", "torch.distributed.fsdp", "transformers.trainer", "peft", "accelerate", "vllm.config",
    "pycocotools.mask", "pytest",
)  # fmt: skip
# Some plugins of pytest are already imported, so that their assertions cannot be rewritten any more.
OPTIONS = ("-x", "-q", "-rfE", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")


_worker = threading.local()  # its workspace, a folder with its copy of `src`


@dataclass(frozen=True)
class Mutation:
    """A change of the code. `old` occurs exactly once in `file`. `says` describes the fault that it causes."""

    id: str
    says: str
    file: str
    old: str
    new: str
    quick: bool = False


@dataclass(frozen=True)
class Verdict:
    """The result of a mutation. `caught_by` is None if no test failed. `error` says why it was not judged."""

    mutation: Mutation
    caught_by: str | None
    seconds: float
    error: str | None = None


def mutations() -> list[Mutation]:
    """Return the mutations of `mutations.yaml` in the order of the specification."""
    entries = [Mutation(**entry) for entry in yaml.safe_load(DATA.read_text())]
    return sorted(entries, key=lambda mutation: page.sort_key(mutation.id))


def provable_without_engine() -> set[str]:
    """Return the parts that at least one test proves without starting a vLLM engine."""
    return {part for part, claims in page.claims().items() if any(claim.kind != "engine" for claim in claims)}


def claiming_tests(identity: str) -> list[list[str]]:
    """Return the tests that claim a part without an engine, one list per file, the cheapest files first."""
    by_file: dict[str, list[str]] = {}
    for claim in page.claims().get(identity, []):
        if claim.kind != "engine":
            by_file.setdefault(claim.test.partition("::")[0], []).append(claim.test)
    return [tests for _, tests in sorted(by_file.items(), key=lambda item: ("integration" in item[0], item[0]))]


def is_python(text: str) -> bool:
    """Return True if a text can be parsed. A file that cannot would fail every test, and prove nothing."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def judge(mutation: Mutation) -> Verdict:
    """Run the claiming tests on mutated code until one fails, and make sure that it passes on the original."""
    since = time.perf_counter()

    def verdict(caught_by: str | None, error: str | None = None) -> Verdict:
        return Verdict(mutation, caught_by, time.perf_counter() - since, error)

    source = _worker.workspace / mutation.file
    original = source.read_text()
    if original.count(mutation.old) != 1:
        return verdict(None, f"its text occurs {original.count(mutation.old)} times in {mutation.file}")
    if not is_python(mutated := original.replace(mutation.old, mutation.new)):
        return verdict(None, "the mutated file is not Python")
    groups = claiming_tests(mutation.id)
    if not groups:
        return verdict(None, "no test without an engine claims it")
    failed = error = None
    _write(source, mutated)
    try:
        for tests in groups:
            failed, error = _run(tests)
            if failed or error:
                break
    finally:
        _write(source, original)
    if error:
        return verdict(None, error)
    if failed and not _passes_unmutated(failed):
        return verdict(None, f"{failed} fails without the mutation, too")
    return verdict(failed)


def _prepare_worker(folder: str) -> None:
    """Give this thread its own copy of `src` below `folder`."""
    _worker.workspace = Path(tempfile.mkdtemp(dir=folder))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", _worker.workspace / "src", ignore=ignored)


def _write(source: Path, text: str) -> None:
    """Write a source file and remove its byte code, since a time stamp does not show two writes in one second."""
    source.write_text(text)
    for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        compiled.unlink()


@cache
def _passes_unmutated(test: str) -> bool:
    return _run([test]) == (None, None)


def _run(tests: Sequence[str]) -> tuple[str | None, str | None]:
    """Run tests with this worker's copy. Return the first test that fails, or the first of all if they crash or
    do not end, or the reason why they could not be run."""
    words = ["-m", "pytest", *OPTIONS, f"--basetemp={_worker.workspace}/files", *tests]
    environment = os.environ | {"PYTHONPATH": f"{_worker.workspace}/src", "OMP_NUM_THREADS": "1"}
    try:
        done = zygote.run(words, cwd=ROOT, env=environment, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return tests[0], None
    if done.returncode < 0:
        return tests[0], None
    if done.returncode not in (0, 1):
        last = " | ".join(f"{done.stdout}{done.stderr}".strip().splitlines()[-3:])
        return None, f"pytest could not run {tests[0]} (exit code {done.returncode}): {last}"
    failed = re.search("^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE)  # no line of a log
    return failed and failed[1], None


def _select(arguments: argparse.Namespace) -> list[Mutation]:
    chosen = mutations()
    if arguments.quick:
        chosen = [mutation for mutation in chosen if mutation.quick]
    if arguments.ids:
        ids = set(arguments.ids)
        chosen = [m for m in chosen if m.id in ids or m.id.partition(".")[0] in ids]
    return chosen


def _line(verdict: Verdict) -> str:
    outcome = verdict.error or verdict.caught_by or "NOT CAUGHT"
    mark = "caught" if verdict.caught_by else "ERROR" if verdict.error else "SURVIVED"
    return f"{verdict.mutation.id:8} {mark:8} {verdict.seconds:5.1f} s  {verdict.mutation.says}\n{'':26}{outcome}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ids", nargs="*", help="requirements (R28) or parts (R28.C3); without any, all of them")
    parser.add_argument("--quick", action="store_true", help="only the mutations that CI runs")
    chosen = _select(parser.parse_args())
    print(f"{len(chosen)} mutations, {WORKERS} at a time", flush=True)
    since = time.perf_counter()
    zygote.imported = WARM
    verdicts = []
    with (
        tempfile.TemporaryDirectory(prefix="coordexp-mutate-") as folder,
        ThreadPoolExecutor(WORKERS, initializer=_prepare_worker, initargs=(folder,)) as pool,
    ):
        for judged in as_completed([pool.submit(judge, mutation) for mutation in chosen]):
            verdicts.append(verdict := judged.result())
            print(f"[{len(verdicts)}/{len(chosen)}] {_line(verdict)}", flush=True)
    missed = [verdict for verdict in verdicts if not verdict.caught_by]
    if missed:
        print("\nNot caught:\n" + "\n".join(map(_line, missed)))
    count = len({verdict.mutation.id for verdict in verdicts})
    print(
        f"\n{len(verdicts)} mutations of {count} parts, {len(verdicts) - len(missed)} caught, {len(missed)} not, "
        f"{time.perf_counter() - since:.0f} s"
    )
    return 1 if missed or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
