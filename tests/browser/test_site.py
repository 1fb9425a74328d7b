"""The documentation site in a browser, from disk and from a server, with every other host out of reach."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import PageEvents

ROOT = Path(__file__).parents[2]
PHONE = {"width": 390, "height": 844}
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    class QuietHandler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # a browser keeps a connection, instead of opening one for every file

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # connections that wait; by default five, which a browser can exceed

    with Server(("127.0.0.1", 0), partial(QuietHandler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that reports no problem at its end."""
    events = PageEvents()
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(20_000)
    events.listen(page)
    yield page
    context.close()
    assert events.problems == []


@pytest.mark.parametrize("place", ["disk", "server"])
def test_search_works_without_any_other_host(site, served, page, place):
    # The page comes after the server among the fixtures, so that it is closed first: it may still load a file.
    start = site.as_uri() if place == "disk" else served
    others: list[str] = []
    page.on("request", lambda request: others.append(request.url) if not request.url.startswith(start) else None)
    page.route(lambda address: not address.startswith(start), lambda route: route.abort())
    page.goto(f"{start}/index.html")
    page.locator(".md-search__input").press_sequentially("staleness")
    results = page.locator(".md-search-result__item")
    results.first.wait_for()
    assert "staleness" in results.first.inner_text()
    results.first.locator("a").first.click()
    page.wait_for_url(lambda address: "index.html" not in address)
    assert "staleness" in page.locator("article").inner_text()
    page.wait_for_load_state("networkidle")
    assert [address for address in others if not address.startswith(("data:", "about:"))] == []


def test_no_page_is_wider_than_a_phone(page, site):
    page.set_viewport_size(PHONE)
    wide = []
    for file in sorted(set(site.rglob("*.html")) - {site / "404.html"}):
        page.goto(file.as_uri(), wait_until="domcontentloaded")
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(str(file.relative_to(site)))
    assert wide == []
