"""CI installs and runs fixed versions: packages by hash, actions by commit, with read access only."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read_hashed(name: str) -> dict[str, str]:
    """Return the versions of a file whose packages all have hashes."""
    hashed = {}
    for line in (ROOT / name).read_text().replace("\\\n", " ").splitlines():
        if not line.startswith("#"):
            pin, *hashes = line.split()
            assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", word) for word in hashes), line
            package, version = pin.split("==")
            hashed[_normalize(package)] = version
    return hashed


def test_every_package_of_the_tested_set_has_a_hash():
    versions = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert read_hashed("constraints-hashes.txt") == {_normalize(name): version for name, version in versions}


def test_the_tools_of_a_release_are_installed_by_hash_and_nothing_installed_later_can_change_what_they_build():
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    words = [step.get("run", step.get("uses", "")) for step in steps]
    install, build, upload = (
        next(k for k, text in enumerate(words) if text.startswith(start))
        for start in ("pip install", "python -m build", "actions/upload-artifact")
    )
    assert words[install] == "pip install --require-hashes -r constraints-release.txt"
    assert words[build] == "python -m build --no-isolation"  # isolation would install hatchling without a hash
    assert (install, build, upload) == (upload - 2, upload - 1, upload) and steps[upload]["with"]["name"] == "dist"
    assert {"build", "cyclonedx-bom", "hatchling", "pip-audit"} <= set(read_hashed("constraints-release.txt"))
    assert any("cyclonedx-py requirements constraints-gpu.txt" in text for text in words)


def test_whatever_a_job_of_the_release_hands_on_is_made_with_tools_by_hash_and_attested_before_it_is_published():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    handed_on: set[str] = set()
    for job in jobs.values():
        steps = job["steps"]
        names = [
            step["with"]["name"] for step in steps if step.get("uses", "").startswith("actions/upload-artifact")
        ]
        installs = [line for step in steps for line in step.get("run", "").splitlines() if "pip install" in line]
        assert not names or all(line.split()[:3] == ["pip", "install", "--require-hashes"] for line in installs)
        handed_on.update(names)
    assert handed_on == {"dist", "bill-of-materials"}
    uses = [(step["uses"].split("@")[0], step.get("with", {})) for step in jobs["publish"]["steps"]]
    fetched = {
        options["name"]: options["path"] for action, options in uses if action == "actions/download-artifact"
    }
    (proved,) = [options for action, options in uses if action == "actions/attest-build-provenance"]
    assert fetched.keys() == handed_on
    assert proved["subject-path"].split() == [f"{path}*" for path in fetched.values()]
    assert (
        uses[-1] == ("pypa/gh-action-pypi-publish", {}) and fetched["dist"] == "dist/"
    )  # it publishes dist/ only


def test_an_audit_fails_if_a_package_cannot_be_audited_and_is_repeated_every_week():
    """Without --strict, pip-audit exits with 0 where it cannot reach its data."""
    files = {}
    for workflow in ("release", "audit"):
        text = (ROOT / f".github/workflows/{workflow}.yml").read_text()
        assert text.count("pip-audit --") == text.count("pip-audit --strict --no-deps --disable-pip -r ")
        files[workflow] = set(re.findall(r"pip-audit --strict .* -r (\S+)", text))
    assert files["release"] == {"constraints-gpu.txt"}
    assert files["audit"] == {"constraints-gpu.txt", "constraints.txt", "constraints-release.txt"}
    assert yaml.safe_load(text)[True]["schedule"]  # YAML reads the key "on" as true


def test_the_versions_for_gpus_meet_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [
        item for name in ("evaluate", "train", "vllm", "track") for item in extras[name]
    ]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints-gpu.txt").read_text(), re.MULTILINE))
    versions = {_normalize(name): version for name, version in pins.items()}
    for requirement in map(Requirement, wanted):
        if requirement.name != "coordexp":
            assert versions[_normalize(requirement.name)] in requirement.specifier, requirement


def test_ci_installs_only_by_hash():
    installs = [
        line for line in (ROOT / ".ci/env").read_text().splitlines() if line.lstrip().startswith("pip install")
    ]
    assert len(installs) == 3
    assert [line for line in installs if "--require-hashes" not in line] == [
        line for line in installs if "--no-build-isolation" in line and "$root" in line
    ]


def test_actions_are_pinned_by_commit_and_may_only_read_except_for_proving_where_a_release_was_built():
    assert WORKFLOWS
    for file in WORKFLOWS:
        workflow = yaml.safe_load(file.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            proofs = {"id-token": "write", "attestations": "write", "contents": "read"}
            assert job.get("permissions") == (proofs if (file.stem, name) == ("release", "publish") else None)
            used = [step for step in job["steps"] if "uses" in step]
            assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in used)
            checkouts = [step for step in used if step["uses"].startswith("actions/checkout@")]
            assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_only_a_job_with_an_environment_that_asks_a_maintainer_publishes_and_it_runs_no_code_of_the_checkout():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    job = workflow["jobs"]["publish"]
    assert job["environment"] == "pypi" and set(job["needs"]) == set(workflow["jobs"]) - {"publish"}
    assert not any("run" in step or "checkout" in step["uses"] for step in job["steps"])
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_the_version_has_a_dated_entry_in_the_changelog_and_is_the_cited_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    dates = dict(
        re.findall(r"^## (\d\S*) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    )
    assert citation["version"] == project["version"]
    assert str(citation["date-released"]) == dates[project["version"]]
    assert citation["repository-code"] == project["urls"]["Repository"]


PLANTED = {
    "import pickle; pickle.load(file)": {"S301", "TID251"},
    "from pickle import loads; loads(data)": {"S301", "TID251"},
    "import marshal; marshal.loads(data)": {"S302"},
    "import torch; torch.load(path)": {"TID251"},
    "from torch import load; load(path, weights_only=False)": {"TID251"},
    "import numpy as np; np.load(path, allow_pickle=True)": {"TID251"},
    "import yaml; yaml.load(text, Loader=yaml.Loader)": {"S506"},
    "import subprocess; subprocess.run(text, shell=True)": {"S602"},
    "import os; os.system(text)": {"S605"},
    "eval(text)": {"S307"},
    "exec(text)": {"S102"},
}


@pytest.mark.parametrize("place", ["src/coordexp", "tools", "benchmarks", "examples", ".ci"])
def test_code_that_would_run_or_unpickle_data_fails_the_style_check(place):
    """The lines are given to the command that CI runs, as if they were a file of the checkout."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename"]
    words = [*command, f"{place}/planted.py", "-"]
    check = subprocess.run(words, input="\n".join(PLANTED), cwd=ROOT, capture_output=True, text=True)
    reported = set(re.findall(r"planted\.py:(\d+):\d+: (\w+) ", check.stdout))
    for number, (line, codes) in enumerate(PLANTED.items(), 1):
        assert {(str(number), code) for code in codes} <= reported, (line, check.stdout, check.stderr)
    assert check.returncode == 1


def test_no_line_is_exempt_from_the_rules_against_running_or_unpickling_data():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert {"S", "TID251"} < set(settings["select"]) and settings["ignore"] == ["S101"]
    of_security = re.compile(r"S\d*|TID\d*")
    exempt = {
        place: {rule for rule in rules if of_security.fullmatch(rule)}
        for place, rules in settings["per-file-ignores"].items()
    }
    assert {place: rules for place, rules in exempt.items() if rules} == {
        "tests/**": {"S", "TID251"},
        "{benchmarks,examples,tools,.ci}/**": {"S311", "S603"},
        "benchmarks/chaos.py": {"S607", "TID251"},
    }
    dangerous = re.compile(r"noqa(?!:)|noqa:.*\b(S102|S30[12]|S307|S506|S60[2456]|TID251|S)\b")
    checked = [file for folder in ("src", "benchmarks", "tools") for file in (ROOT / folder).rglob("*.py")]
    for file in checked:
        lines = [line for line in file.read_text().splitlines() if dangerous.search(line)]
        assert not lines or (file.name, len(lines)) == ("reference.py", 1), lines  # it evaluates our own source
        assert "trust_remote_code=True" not in file.read_text(), file


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
