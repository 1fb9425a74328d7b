"""A browser for tests of pages. A page must not report any problem, and must not request anything but itself."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

# To run as root and without a graphics card, and to send no requests of its own.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE = {"width": 1400, "height": 900}


@dataclass
class PageEvents:
    """The problems that a page reported and the requests that it sent. Data URLs do not count as requests."""

    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def listen(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.text} ({message.location['url']})")

    def _dialog(self, dialog: Any) -> None:
        self.problems.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        if not request.url.startswith("data:"):
            self.requests.append(request.url)


Open = Callable[..., Page]


class SavedPage(Protocol):
    """Something that can be saved as a page. The page's script marks when it is ready."""

    def save(self, path: Path) -> Path: ...


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    installed = shutil.which("chromium")
    assert installed, "no chromium: install the system's package, the browser tests need it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open a page from disk. At the end, check that it reported no problem and requested only its own file."""
    contexts, events = [], PageEvents()

    def open_file(
        page_source: SavedPage, address: str = "", *, viewport: dict[str, int] = WIDE, **context: Any
    ) -> Page:
        path = page_source.save(tmp_path / "inspect.html")
        contexts.append(browser.new_context(viewport=viewport, **context))  # type: ignore[arg-type]
        page = contexts[-1].new_page()
        page.set_default_timeout(15_000)
        events.listen(page)
        page.goto(path.as_uri() + address)
        ready = "performance.getEntriesByName('ready').length === 1"
        assert page.evaluate(f"!document.querySelector('script') || {ready}")
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert events.problems == []
    assert {address.split("#")[0] for address in events.requests} <= {(tmp_path / "inspect.html").as_uri()}
