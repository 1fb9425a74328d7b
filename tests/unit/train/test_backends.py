"""The backend of a run, and what a backend with servers writes to the run folder."""

import json
from pathlib import Path

import pytest

from coordexp.rollout.colocate import ColocateBackend
from coordexp.servers.backend import ServerBackend
from coordexp.train.folder import ServerLog, describe_rollouts
from tests.unit.train.test_rollout_step import handed_over

SERVERS = [{"base_url": f"http://127.0.0.1:{8000 + k}", "group_port": 51216 + k} for k in range(2)]


def prepared(tmp_path, monkeypatch, **changes):
    """Return the settings of a run with servers, and its backend."""
    servers = {"mode": "server", "server": {"servers": SERVERS}}
    settings, given = handed_over(tmp_path, monkeypatch, rollout_matching__vllm=servers, **changes)
    backend = given["steps"].rollouts.backend
    assert isinstance(backend, ServerBackend)
    return settings, backend


@pytest.mark.scenario("R07.C8", on="fake")
def test_a_run_with_servers_has_a_backend_that_asks_them_and_a_manifest_that_names_them(tmp_path, monkeypatch):
    settings, backend = prepared(tmp_path, monkeypatch)
    assert backend.setup.settings == settings.rollout_matching_cfg
    facts = describe_rollouts(settings, backend)
    assert (facts["mode"], facts["sync_mode"], facts["fallbacks"]) == ("server", "full", [])
    assert [(server["base_url"], server["group_port"]) for server in facts["servers"]] == [
        (server["base_url"], server["group_port"]) for server in SERVERS
    ]
    backend.close()


@pytest.mark.scenario("R10.C9", "R10.S3", on="fake")
def test_rollouts_and_evaluation_decode_by_decode_batch_size_whatever_the_evaluation_batch_is(
    tmp_path, monkeypatch
):
    changes = {"rollout_matching__rollout_backend": "hf", "rollout_matching__decode_batch_size": 3}
    _, given = handed_over(tmp_path, monkeypatch, training__per_device_eval_batch_size=7, **changes)
    assert given["steps"].rollouts.backend.decode_batch_size == 3


@pytest.mark.scenario("R09.C1", on="fake")
def test_a_fallback_after_the_first_sync_changes_the_sync_mode_of_the_manifest(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps([{"rollouts": {"mode": "server"}}]))
    log = ServerLog(tmp_path, 0)
    servers = [{"base_url": "u", "boot": "b"}]
    warning = "warning: server 0: base_changed; whole weights are sent from here on"
    for version, mode, fallbacks in ((1, "adapter", []), (2, "adapter", []), (3, "full", [warning])):
        facts = {"servers": servers, "sync_mode": mode, "fallbacks": fallbacks}
        log({"event": "sync", "version": version} | facts)
        log({"event": "rollouts", "version": version, "sync_mode": mode, "calls": []})
        (run,) = json.loads((tmp_path / "run.json").read_text())
        assert run == {"rollouts": {"mode": "server"} | facts}


@pytest.mark.scenario("R09.C1", on="fake")
def test_a_fallback_of_a_colocated_run_changes_the_sync_mode_of_the_manifest(tmp_path, monkeypatch):
    settings, given = handed_over(
        tmp_path,
        monkeypatch,
        model__adapter={"rank": 4, "alpha": 8, "train_coord_rows": False},
        rollout_matching__vllm={"mode": "colocate", "enable_lora": True, "sync": {"mode": "auto"}},
    )
    backend = given["steps"].rollouts.backend
    assert isinstance(backend, ColocateBackend)
    facts = describe_rollouts(settings, backend)
    assert (facts["mode"], facts["sync_mode"], facts["fallbacks"]) == ("colocate", "adapter", [])
    folder = Path(settings.training.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps([{"rollouts": facts}]))
    backend.sync_mode.fall_back("the engine cannot use the adapter: its rank")
    backend.record(backend.describe())
    (run,) = json.loads((folder / "run.json").read_text())
    assert run["rollouts"]["sync_mode"] == "full" and run["rollouts"]["mode"] == "colocate"
    assert run["rollouts"]["fallbacks"] == backend.describe()["fallbacks"] != []


@pytest.mark.scenario("R09.S1", on="fake")
def test_what_servers_say_of_themselves_goes_to_the_manifest_and_every_event_to_a_file_of_its_rank(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps([{"rollouts": {"mode": "server"}}, {"rollouts": None}]))
    facts = {"servers": [{"base_url": "u", "boot": "b"}], "sync_mode": "full", "fallbacks": []}
    log = ServerLog(tmp_path, 0)
    log({"event": "sync", "version": 0} | facts)
    log({"event": "rollouts", "version": 0, "calls": [{"server": 0, "seed": 7}]})
    log({"event": "sync", "version": 1} | facts | {"servers": []})
    ServerLog(tmp_path, 3)({"event": "rollouts", "calls": []})
    runs = json.loads((tmp_path / "run.json").read_text())
    assert runs == [{"rollouts": {"mode": "server"}}, {"rollouts": facts}]
    lines = (tmp_path / "servers.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["sync", "rollouts", "sync"]
    assert (tmp_path / "servers_3.jsonl").is_file()


def test_a_full_disk_costs_server_events_and_facts_and_not_the_run(tmp_path, capsys):
    """Writing to /dev/full fails as on a full disk."""
    (tmp_path / "servers.jsonl").symlink_to("/dev/full")
    (tmp_path / "run.json").write_text(json.dumps([{"rollouts": None}]))
    log = ServerLog(tmp_path, 0)
    for _ in range(3):
        log({"event": "sync", "servers": [], "sync_mode": "full", "fallbacks": []})
    assert capsys.readouterr().err.count(f"{tmp_path}/servers.jsonl") == 1
    assert json.loads((tmp_path / "run.json").read_text())[0]["rollouts"]["sync_mode"] == "full"
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json.partial").mkdir()  # so that it cannot be written
    (tmp_path / "run.json").write_text(json.dumps([{"rollouts": None}]))
    ServerLog(tmp_path, 0)({"event": "sync", "servers": [], "sync_mode": "full", "fallbacks": []})
    assert "run.json" in capsys.readouterr().err
