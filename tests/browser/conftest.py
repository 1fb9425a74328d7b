"""A browser for tests of pages. A page may complain about nothing and ask for nothing but itself."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

# As root and without a graphics card, and silent towards the outside.
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
class Heard:
    """What a page complained about and asked for. Data inside of the page is no request."""

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def listen(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        if not request.url.startswith("data:"):
            self.requests.append(request.url)


Open = Callable[..., Page]


class Saved(Protocol):
    """What becomes a page on disk. Its script marks when it is ready."""

    def save(self, path: Path) -> Path: ...


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    installed = shutil.which("chromium")
    assert installed, "no chromium: install the system's package, browser tests look at pages with it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a page from disk. At the end: no complaint, and no request but for the file itself."""
    contexts, heard = [], Heard()

    def open_page(made: Saved, address: str = "", *, viewport: dict[str, int] = WIDE, **context: Any) -> Page:
        path = made.save(tmp_path / "inspect.html")
        contexts.append(browser.new_context(viewport=viewport, **context))  # type: ignore[arg-type]
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        heard.listen(page)
        page.goto(path.as_uri() + address)
        assert page.evaluate("performance.getEntriesByName('ready').length") == 1
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert heard.complaints == []
    assert {address.split("#")[0] for address in heard.requests} <= {(tmp_path / "inspect.html").as_uri()}
