"""The pages of a run that is still going on, over real HTTP on loopback."""

import threading
from contextlib import contextmanager

import httpx
import pytest

from coordexp.pages.live import compute_dump_stamp, listen


@contextmanager
def serving(folder):
    """Serve the pages of a run, and yield their address."""
    server = listen(folder, 200, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@pytest.fixture
def served(tmp_path):
    """A run folder that has nothing yet, and a client of the server of its pages."""
    folder = tmp_path / "<b>run"
    folder.mkdir()
    with serving(folder) as url, httpx.Client(base_url=url) as client:
        yield folder, client


def test_the_stamp_changes_when_the_run_dumps_more(served):
    folder, client = served
    stamps = [client.get("/stamp").text]
    (folder / "dumps").mkdir()
    for name, text in (("step-000011.jsonl", ""), ("step-000011.jsonl", "{}\n"), ("trained-000011.jsonl", "")):
        (folder / "dumps" / name).write_text(text)
        stamps.append(client.get("/stamp").text)
    assert len(set(stamps)) == 4 and compute_dump_stamp(folder) == stamps[-1]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed_through_it(served, method):
    assert served[1].request(method, "/").status_code == 501


@pytest.mark.parametrize(
    "address", ["/../metrics.jsonl", "/metrics.jsonl", "/%2e%2e/metrics.jsonl", "//etc/passwd"]
)
def test_no_file_can_be_read_through_it(served, address):
    assert served[1].get(address).status_code == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("example.org", 403),
        ("localhost.example.org:80", 403),
        ("", 403),
        ("localhost:9", 200),
        ("127.0.0.1:9", 200),
    ],
)
def test_a_foreign_host_name_is_refused_and_a_forwarded_port_is_not(served, host, status):
    assert served[1].get("/", headers={"Host": host}).status_code == status


def test_a_run_that_has_nothing_to_show_yet_has_a_page_that_says_why(served):
    for address in ("/", "/report"):
        text = served[1].get(address).text
        assert "&lt;b&gt;run" in text and "<b>run" not in text and 'http-equiv="refresh"' in text
