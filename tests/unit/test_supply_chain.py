"""CI installs and runs fixed versions: packages by hash, actions by commit, with read access only."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_every_package_of_the_tested_set_has_a_hash():
    versions = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    blocks = (ROOT / "constraints-hashes.txt").read_text().replace("\\\n", " ").splitlines()
    hashed = {}
    for line in blocks:
        if not line.startswith("#"):
            pin, *hashes = line.split()
            assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", word) for word in hashes), line
            name, version = pin.split("==")
            hashed[_normalize(name)] = version
    assert hashed == {_normalize(name): version for name, version in versions}


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
    assert job["environment"] == "pypi" and job["needs"] == "build"
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


def test_no_line_of_the_source_is_exempt_from_the_rules_against_running_or_unpickling_data():
    """Ruff's rules for exec, pickle, marshal, eval, unsafe YAML, a shell, and torch.load hold everywhere."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in settings["select"] and settings["ignore"] == ["S101"]
    dangerous = re.compile(r"noqa(?!:)|noqa:.*\b(S102|S30[12]|S307|S506|S60[2456]|S614|S615|S)\b")
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text()
        assert not dangerous.search(text), file
        assert "trust_remote_code=True" not in text, file


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
