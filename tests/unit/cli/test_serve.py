"""Without a token, a rollout server can be reached only from this machine."""

import pytest
import yaml

from coordexp.servers.protocol import TOKEN
from tests.command import run
from tests.unit.config.trees import server_mode


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Run the command up to the point where it would listen. Return output and addresses."""
    monkeypatch.delenv(TOKEN, raising=False)
    places = []
    monkeypatch.setattr("coordexp.cli.serve.need", lambda *_, **__: None)
    monkeypatch.setattr("coordexp.cli.serve.missing_files", lambda _: [])
    monkeypatch.setattr("coordexp.cli.serve.check_vllm", lambda: None)
    monkeypatch.setattr("coordexp.cli.serve._serve", lambda *given: places.append(given[2:4]))
    (tmp_path / "train.jsonl").touch()

    def start(url, *options, code=0, **changes):
        server = {"base_url": url, "group_port": 51216}
        changes = {"custom__train_jsonl": str(tmp_path / "train.jsonl")} | changes
        tree = server_mode(rollout_matching__vllm__server={"servers": [server]}, **changes)
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(tree))
        return run("serve", "--config", file, *options, code=code).output, places

    return start


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.5", "example.org", "0", "127.1", "::ffff:10.0.0.5", "localhost.example.org"]
)
def test_a_server_refuses_to_listen_beyond_this_machine_without_a_token(serve, monkeypatch, host):
    for empty in (False, True):
        if empty:
            monkeypatch.setenv(TOKEN, "")
        shown, places = serve("http://127.0.0.1:8000", "--host", host, code=1)
        message = " ".join(shown.split())
        assert not places
        assert f"--host {host}: {TOKEN} is not set" in message and "leave --host out" in message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"])
def test_every_address_of_this_machine_alone_needs_no_token(serve, host):
    _, places = serve("http://127.0.0.1:8000", "--host", host)
    assert places == [(host, 8000)]


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"])
def test_without_host_a_server_listens_only_on_this_machine(serve, url):
    _, places = serve(url)
    assert places == [("::1" if "::1" in url else "127.0.0.1", 8000)]


def test_with_a_token_a_server_listens_at_the_given_host(serve, monkeypatch):
    monkeypatch.setenv(TOKEN, "a token")
    _, places = serve("http://10.0.0.5:8000", "--host", "0.0.0.0")
    assert places == [("0.0.0.0", 8000)]


def test_a_server_reads_images_beside_every_data_file(serve, tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr("coordexp.cli.serve._serve", lambda *given: folders.extend(given[4]))
    for name in ("a/0.jsonl", "a/1.jsonl", "b/0.jsonl", "c/val.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    sets = [{"path": str(tmp_path / "a/*.jsonl")}, {"path": [str(tmp_path / "b/0.jsonl")]}]
    data = {"train_jsonl": None, "train_data": sets, "val_jsonl": str(tmp_path / "c/val.jsonl")}
    serve("http://127.0.0.1:8000", **{f"custom__{name}": value for name, value in data.items()})
    assert folders == [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
