"""The run report in a browser: no problems, no requests, keys, zoom, and links to the inspector."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import Open
from tests.command import run
from tests.unit.pages.run_folders import evaluation_line, lines, settings, write_run

pytestmark = pytest.mark.timeout(60)
NARROW = {"width": 640, "height": 450}  # 1280 x 900 at 200 %
HOSTILE = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'


@dataclass(frozen=True)
class RunReportPage:
    """The report of some runs."""

    runs: tuple[Path, ...]

    def save(self, path: Path) -> Path:
        run("report", *self.runs, "--out", path, "--at", "none")
        return path


@pytest.fixture
def two_groups(tmp_path: Path) -> RunReportPage:
    """A report of two groups. The first has two seeds, the second a hostile setting."""
    logged = [*lines(40), *[evaluation_line(step, f1_50=0.02 * step, recall_50=0.5) for step in (10, 20, 40)]]
    folders = [tmp_path / name for name in ("one-1", "one-2", "other")]
    for seed, folder in enumerate(folders):
        tree = settings(seed=seed, output_dir=str(folder), **({"optim": HOSTILE} if seed == 2 else {}))
        write_run(folder, logged, tree)
    return RunReportPage(tuple(folders))


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_a_report_from_disk_requests_nothing_and_reports_no_problem(
    open_page: Open, two_groups: RunReportPage
) -> None:
    page = open_page(two_groups)
    assert page.locator("svg").count() >= 10
    assert page.locator("img").count() == 0
    assert HOSTILE in (page.locator("#settings").text_content() or "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_200_percent_nothing_is_wider_than_the_window(
    open_page: Open, two_groups: RunReportPage, scheme: str
) -> None:
    page = open_page(two_groups, viewport=NARROW, color_scheme=scheme)
    assert overflow(page) <= 0


def test_groups_differ_by_more_than_colour(open_page: Open, two_groups: RunReportPage) -> None:
    page = open_page(two_groups)
    lines = page.locator(".key path.line")
    dashes = lines.evaluate_all("nodes => nodes.map(node => getComputedStyle(node).strokeDasharray)")
    assert len(dashes) == len(set(dashes)) == 2
