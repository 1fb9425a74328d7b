"""The pages of a run that is going on, over real HTTP on loopback."""

import threading

import httpx
import pytest

from coordexp.errors import DataError
from coordexp.inspector.dumps import mark_of_dumps
from coordexp.inspector.live import Pages, listen


@pytest.fixture
def served(tmp_path):
    """A folder, what was made of it, and a client of the server."""
    made = []

    def maker(now):
        made.append(now)
        return f"<p>page {len(made)}</p>"

    def fails(now):
        raise DataError("nothing <b>yet</b>")

    (tmp_path / "metrics.jsonl").write_text("{}\n")
    server = listen(Pages(tmp_path, {"/": maker, "/report": fails}), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_address[1]}") as client:
        yield tmp_path, made, client
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_it_listens_on_loopback_alone(tmp_path):
    with listen(Pages(tmp_path, {}), 0) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_a_page_is_made_again_only_when_there_is_more_to_see(served):
    folder, made, client = served
    assert client.get("/").text == client.get("/").text == "<p>page 1</p>"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    assert client.get("/").text == "<p>page 2</p>"
    assert len(made) == 2


def test_changed_says_whether_there_is_more_than_a_page_was_made_from(served):
    folder, _, client = served
    since = mark_of_dumps(folder)
    assert client.get("/changed", params={"since": since}).json() == {"changed": False, "step": 0}
    (folder / "dumps").mkdir()
    (folder / "dumps/step-000011.jsonl").write_text("")
    assert client.get("/changed", params={"since": since}).json() == {"changed": True, "step": 12}


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
def test_another_sites_name_that_leads_here_is_refused_and_a_forwarded_port_is_not(served, host, status):
    assert served[2].get("/", headers={"Host": host}).status_code == status


def test_a_page_that_could_not_be_made_is_tried_again(tmp_path):
    tries = []

    def maker(now):
        tries.append(now)
        if len(tries) == 1:
            raise DataError("half a file")
        return "whole"

    pages = Pages(tmp_path, {"/": maker})
    assert "half a file" in pages.get("/")
    assert pages.get("/") == pages.get("/") == "whole"
    assert len(tries) == 2


def test_what_is_missing_yet_is_told_as_text(served):
    text = served[2].get("/report").text
    assert "nothing &lt;b&gt;yet&lt;/b&gt;" in text
