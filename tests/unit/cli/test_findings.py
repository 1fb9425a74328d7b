"""One kind of finding: all commands that check something print it in the same form, and as the same JSON."""

import json

import pytest

from coordexp.cli import doctor as doctor_command
from tests.command import run

TEN_MISTAKES = "examples/check/ten-mistakes.yaml"
SERVERS = "configs/stage2-server-3v1.yaml"
RECORD = {"image": "1.png", "width": 64, "height": 64, "space": "pixel", "objects": []}
BOX = {"desc": "cup", "bbox_2d": [40, 10, 20, 30]}
NAMES = ("check", "doctor", "data doctor", "launch", "launch with a wrong config")


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Return command lines that find an error, each with its exit code and the subject of the error."""
    monkeypatch.setattr(doctor_command, "TRAIN", {"pydantic": "2", "no-such-package": "1"})
    monkeypatch.setattr(doctor_command, "VLLM", {})
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps(RECORD | {"objects": [BOX]}))
    launch = ["launch", "--cpu", "--check-only", "--config"]
    cases = (
        (["check", "--config", TEN_MISTAKES], 2, "rollout_matching.decode_batch_size"),
        (["doctor"], 1, "no-such-package"),
        (["data", "doctor", "--images", "skip", str(data)], 1, "inverted"),
        ([*launch, SERVERS], 1, "model.path"),
        ([*launch, TEN_MISTAKES], 2, "custom.trainer_variant"),
    )
    return dict(zip(NAMES, cases, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_check_prints_the_same_json_and_keeps_its_exit_code(commands, name):
    arguments, code, subject = commands[name]
    report = json.loads(run(*arguments, "--json", code=code).stdout)
    assert list(report) == ["ok", "checked", "findings", "details"]
    assert report["ok"] is False and report["checked"]
    for finding in report["findings"]:
        assert list(finding) == ["severity", "subject", "problem", "fix", "count", "places"]
        assert finding["severity"] in ("error", "warning", "note") and finding["problem"]
        assert all(list(place) == ["file", "line", "detail"] for place in finding["places"])
    assert subject in {finding["subject"] for finding in report["findings"] if finding["severity"] == "error"}


@pytest.mark.parametrize("name", NAMES)
def test_every_check_prints_its_findings_in_the_same_form(commands, name):
    arguments, code, subject = commands[name]
    report = json.loads(run(*arguments, "--json", code=code).stdout)
    (finding,) = [finding for finding in report["findings"] if finding["subject"] == subject]
    lines = run(*arguments, code=code).output.splitlines()
    (index,) = [k for k, line in enumerate(lines) if line.startswith(f"error {subject}: {finding['problem']}")]
    assert lines[index + 1] == f"  {finding['fix']}"


def test_a_sound_config_has_its_notes_among_the_findings_and_its_settings_in_the_details():
    report = json.loads(run("check", "--config", SERVERS, "--json").stdout)
    assert report["ok"] is True
    assert {finding["severity"] for finding in report["findings"]} == {"warning"}
    assert "model.path" in {finding["subject"] for finding in report["findings"]}
    details = report["details"]
    assert set(details) == {"settings", "origins", "files"}
    assert details["files"] == ["configs/base.yaml", "configs/stage2.yaml", "configs/stage2-server-3v1.yaml"]
    place = "rollout_matching.vllm.server.servers[2].group_port"
    assert details["origins"][place].startswith("configs/stage2-server-3v1.yaml:")
    assert details["origins"]["rollout_matching.fp_cost"] == "default"


def test_the_doctor_reports_every_check_in_the_details(commands):
    report = json.loads(run("doctor", "--json", code=1).stdout)
    states = {check["check"]: check["state"] for check in report["details"]["checks"]}
    assert states["pydantic"] == "ok" and states["no-such-package"] == "failed"


def test_json_of_a_launch_needs_check_only():
    assert "add --check-only" in run("launch", "--config", SERVERS, "--cpu", "--json", code=1).output


def test_a_finding_that_occurs_often_is_printed_once_with_its_count_and_its_first_places(tmp_path):
    data = tmp_path / "train.jsonl"
    lines = [json.dumps(RECORD | {"image": f"{k}.png", "objects": [BOX]}) for k in range(7)]
    data.write_text("\n".join(lines))
    lines = run("data", "doctor", "--images", "skip", data, code=1).stdout.splitlines()
    assert lines[:2] == [
        "error inverted: box whose corners are inverted (7)",
        "  write the upper left corner before the lower right",
    ]
    assert lines[2:7] == [f"  {data}:{k}: objects[0] 'cup' bbox_2d [40, 10, 20, 30]" for k in range(1, 6)]
