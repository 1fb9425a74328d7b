"""Pages made from run folders: from a dumped example to what a reader points at, and a running run."""

import json
import threading
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from coordexp.pages.live import listen
from tests.browser.conftest import Open
from tests.browser.rollouts import RunInspectorPage
from tests.unit.pages.run_folders import write_dumped_run

pytestmark = pytest.mark.timeout(60)


def test_each_coordinate_of_a_dumped_answer_highlights_its_shape(open_page: Open, tmp_path: Path) -> None:
    folder = write_dumped_run(tmp_path / "run", steps=(0,))
    page = open_page(RunInspectorPage(folder), "#1.0.0")
    dump = json.loads((folder / "dumps/step-000000.jsonl").read_text().splitlines()[0])
    objects, pairs = dump["result"]["objects"], dict(dump["result"]["pairs"])
    for k, obj in enumerate(objects):
        for at in obj["at"]:
            token = page.locator(f'#strip .token[data-i="{at}"]')
            assert token.inner_text() == str(obj["bins"][obj["at"].index(at)])
            token.hover()
            lit = page.locator("#stage .shape.lit").evaluate_all("nodes => nodes.map(node => node.dataset.owner)")
            assert set(lit) == {str(k)} and len(lit) == (2 if k in pairs else 1)


def test_a_served_page_offers_what_was_written_later(browser: Browser, tmp_path: Path) -> None:
    folder = write_dumped_run(tmp_path / "run", steps=(0,))
    server = listen(folder, 200, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    page = browser.new_page()
    try:
        page.goto(f"http://127.0.0.1:{server.server_port}/#1.0.1")
        expect(page.locator("#where")).to_have_text("2 of 3")
        write_dumped_run(folder, steps=(1,))
        page.locator("#news").click(timeout=20_000)
        expect(page.locator("#where")).to_have_text("2 of 6")
        assert page.url.endswith("#1.0.1")
        page.locator("#report").click()
        expect(page.locator("h1")).to_have_text("run")
        page.get_by_role("link", name=str(folder), exact=True).click()
        expect(page.locator("#where")).to_have_text("1 of 6")
    finally:
        page.close()
        server.shutdown()
        server.server_close()
        thread.join(5)
