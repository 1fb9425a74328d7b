"""The pages of a run that is still going on, over real HTTP on loopback."""

import threading

import httpx
import pytest

from coordexp.errors import DataError
from coordexp.pages.live import LivePages, compute_dump_stamp, listen


@pytest.fixture
def served(tmp_path):
    """A run folder, the stamps for which a page was made, and a client of the server."""
    stamps = []

    def make_page(stamp):
        stamps.append(stamp)
        return f"<p>page {len(stamps)}</p>"

    def fail(stamp):
        raise DataError("nothing <b>yet</b>")

    (tmp_path / "metrics.jsonl").write_text("{}\n")
    server = listen(LivePages(tmp_path, {"/": make_page, "/report": fail}), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_address[1]}") as client:
        yield tmp_path, stamps, client
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_a_page_is_made_again_only_if_the_run_wrote_more(served):
    folder, stamps, client = served
    assert client.get("/").text == client.get("/").text == "<p>page 1</p>"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    assert client.get("/").text == "<p>page 2</p>"
    assert len(stamps) == 2


def test_the_stamp_changes_when_the_run_dumps_more(served):
    folder, _, client = served
    stamps = [client.get("/stamp").text]
    (folder / "dumps").mkdir()
    for name, text in (("step-000011.jsonl", ""), ("step-000011.jsonl", "{}\n"), ("trained-000011.jsonl", "")):
        (folder / "dumps" / name).write_text(text)
        stamps.append(client.get("/stamp").text)
    assert len(set(stamps)) == 4 and compute_dump_stamp(folder) == stamps[-1]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed_through_it(served, method):
    assert served[2].request(method, "/").status_code == 501


@pytest.mark.parametrize(
    "address", ["/../metrics.jsonl", "/metrics.jsonl", "/%2e%2e/metrics.jsonl", "//etc/passwd"]
)
def test_no_file_can_be_read_through_it(served, address):
    assert served[2].get(address).status_code == 404


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
    assert served[2].get("/", headers={"Host": host}).status_code == status


def test_the_reason_why_there_is_no_page_yet_is_escaped(served):
    text = served[2].get("/report").text
    assert "nothing &lt;b&gt;yet&lt;/b&gt;" in text
