"""The run report in a browser: no complaint, no request, keys, zoom, and ways into the inspector."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from typer.testing import CliRunner

from coordexp.cli import app
from tests.browser.conftest import Open
from tests.unit.inspector.run_folders import evaluated, lines, settings, write_dumped_run, write_run

pytestmark = pytest.mark.timeout(60)
NARROW = {"width": 640, "height": 450}  # 1280 x 900 at 200 %
HOSTILE = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'


@dataclass(frozen=True)
class Reported:
    """The report of some runs."""

    runs: tuple[Path, ...]

    def save(self, path: Path) -> Path:
        words = ["report", *map(str, self.runs), "--out", str(path), "--at", "none"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return path


@pytest.fixture
def two(tmp_path: Path) -> Reported:
    """Of two groups; the first has two seeds, the second a hostile setting."""
    logged = [*lines(40), *[evaluated(step, f1_50=0.02 * step, recall_50=0.5) for step in (10, 20, 40)]]
    folders = [tmp_path / name for name in ("one-1", "one-2", "other")]
    for seed, folder in enumerate(folders):
        tree = settings(seed=seed, output_dir=str(folder), **({"optim": HOSTILE} if seed == 2 else {}))
        write_run(folder, logged, tree)
    return Reported(tuple(folders))


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_a_report_from_disk_asks_for_nothing_and_complains_of_nothing(opened: Open, two: Reported) -> None:
    page = opened(two)
    assert page.locator("svg").count() > 10
    assert page.locator("img").count() == 0
    assert HOSTILE in (page.locator("#settings").text_content() or "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_200_percent_nothing_is_wider_than_the_window(opened: Open, two: Reported, scheme: str) -> None:
    page = opened(two, viewport=NARROW, color_scheme=scheme)
    assert overflow(page) <= 0


def test_the_values_of_a_step_are_read_out_by_keys_alone(opened: Open, two: Reported) -> None:
    page = opened(two)
    before = page.locator("main").inner_text()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type === 'range'"):
            break
    else:
        pytest.fail("no key leads to the slider")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function("before => document.querySelector('main').innerText !== before", arg=before)
    page.keyboard.press("Escape")
    page.wait_for_function("before => document.querySelector('main').innerText === before", arg=before)


def test_groups_differ_by_more_than_colour(opened: Open, two: Reported) -> None:
    page = opened(two)
    lines = page.locator("button.key path.line")
    dashes = lines.evaluate_all("all => all.map(one => getComputedStyle(one).strokeDasharray)")
    assert len(dashes) == len(set(dashes)) == 2


def test_a_dumped_step_leads_to_its_examples_in_the_inspector(opened: Open, tmp_path: Path) -> None:
    folder = write_dumped_run(tmp_path / "run", steps=(0, 4))
    assert CliRunner().invoke(app, ["inspect", str(folder)]).exit_code == 0
    page = opened(Reported((folder,)))
    link = page.locator('a[href$="inspect.html#step=5"]').first  # there is one on each scale
    expect(link).to_be_visible()
    assert (folder / "inspect.html").samefile(tmp_path / (link.get_attribute("href") or "").partition("#")[0])
