"""Pages made from run folders: from a dumped example to what a reader points at, and a running run."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Open
from tests.browser.rollouts import RunInspectorPage
from tests.unit.pages.run_folders import write_dumped_run
from tests.unit.pages.test_live import serving

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
    with serving(folder) as url, closing(browser.new_page()) as page:
        page.goto(f"{url}/#1.0.1")
        expect(page.locator("#where")).to_have_text("2 of 3")
        write_dumped_run(folder, steps=(1,))
        page.locator("#news").click(timeout=20_000)
        expect(page.locator("#where")).to_have_text("2 of 6")
        assert page.url.endswith("#1.0.1")
        page.locator("#report").click()
        expect(page.locator("h1")).to_have_text("run")
        page.get_by_role("link", name=str(folder), exact=True).click()
        expect(page.locator("#where")).to_have_text("1 of 6")
