"""Take the screenshots of pages that the documentation shows, with headless Chromium.

    python tools/screenshots.py quickstart                  # with the committed demo model
    python tools/screenshots.py data                        # the same
    python tools/screenshots.py suggestions                 # the same
    python tools/screenshots.py inspector RUN               # a run of configs/demo/stage2-polygons-cpu.yaml
    python tools/screenshots.py report RUN                  # a run of configs/demo/stage2-hf.yaml
    python tools/screenshots.py comparison RUN RUN [RUN ...]
    python tools/screenshots.py site FOLDER                 # pages of the documentation site

Commands run inside the folder of their files, so that no page shows an absolute path.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from coordexp.pages.rollouts import choose_examples

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
MODEL = ROOT / "examples/scenes-cpu/model"
STAGE2_MODEL = ROOT / "examples/stage2-cpu/model"
SITE_PAGES = ("index", "install", "training", "reference/config", "architecture", "results")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(CAPTURES))
    parser.add_argument("runs", nargs="*", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        work = Path(folder)
        CAPTURES[options.what](browser, work, options.runs)


def capture_quickstart(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    coordexp(work, "demo", "scenes", "--out", "scenes", "--train", 1, "--val", 24)
    (work / "examples").symlink_to(ROOT / "examples")
    options = ["--images", "scenes/images/val", "--out", "found.json", "--page", "found.html"]
    coordexp(work, "predict", "--model", "examples/scenes-cpu/model", *options)
    take(browser, work / "found.html", "found.png", (1200, 620))


def capture_data(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    coordexp(work, "demo", "scenes", "--out", "scenes", "--train", 1, "--val", 60, "--polygons", 0.2, "--seed", 3)
    coordexp(work, "data", "view", "scenes/val.jsonl", "--out", "view.html")
    options = ["--data", "scenes/val.jsonl", "--max-new-tokens", 256, "--batch", 60]
    coordexp(work, "predict", "--model", MODEL, *options, "--out", "preds.json")
    coordexp(work, "evaluate", "--data", "scenes/val.jsonl", "--preds", "preds.json", "--page", "evaluate.html")
    take(browser, work / "view.html", "view.png", (1200, 900))
    take(browser, work / "evaluate.html", "evaluate.png", (1200, 2640))


def capture_suggestions(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    """Capture the page in the middle of its work, on scenes of which a third of the labels is missing."""
    coordexp(
        work, "demo", "scenes", "--out", "scenes", "--train", 1, "--val", 40, "--side", 128, "--objects", "3-8"
    )
    coordexp(work, "data", "thin", "scenes/val.jsonl", "--remove", 0.33, "--out", "scenes/thin.jsonl")
    options = ["--max-new-tokens", 300, "--batch", 40, "--out", "suggestions"]
    coordexp(work, "data", "suggest", "--data", "scenes/thin.jsonl", "--model", STAGE2_MODEL, *options)
    take(browser, work / "suggestions/complete.html", "complete.png", (1300, 860), "", decide_about_some)


def decide_about_some(page: Page) -> None:
    for key in "aaaaraaara":
        page.keyboard.press(key)


def capture_inspector(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    """Capture three rollouts. Each shows one feature of the page, and has the most matches among those that do."""
    (run,) = runs
    coordexp(Path.cwd(), "inspect", run, "--out", work / "inspect.html", "--samples", 10_000)
    dumps = [dump.content for dump in choose_examples(run, 10_000)[0]]
    for name, has_feature, point in (
        ("polygon", has_matched_polygon, point_at_polygon),
        ("malformed", has_malformed_middle, point_at_invalid_object),
        ("truncated", has_truncated_tail, point_at_cut_token),
    ):
        place = max(filter(has_feature, dumps), key=count_matches)["place"]
        address = f"#{place['step'] + 1}.{place['micro']}.{place['record']}"
        take(browser, work / "inspect.html", f"inspect-{name}.png", (1400, 960), address, point)


def has_matched_polygon(dump: dict[str, Any]) -> bool:
    result = dump["result"]
    valid = [prediction for prediction in result["objects"] if prediction["reason"] is None]
    has_pair = any(valid[i]["kind"] == dump["truth"][j]["kind"] == "poly" for i, j in result["pairs"])
    return bool(has_pair and result["missed"] and result["extra"] and not result["truncated"])


def has_malformed_middle(dump: dict[str, Any]) -> bool:
    reasons = [prediction["reason"] for prediction in dump["result"]["objects"]]
    return any(reasons[1:-1]) and count_matches(dump) >= 2 and not dump["result"]["truncated"]


def has_truncated_tail(dump: dict[str, Any]) -> bool:
    result = dump["result"]
    return bool(
        result["truncated"] and result["missed"] and len(dump["rollout"]["ids"]) - result["prefix_tokens"] >= 10
    )


def count_matches(dump: dict[str, Any]) -> int:
    return len(dump["result"]["pairs"])


def point_at_polygon(page: Page) -> None:
    """Point at a coordinate of the first matched object that has more than four."""
    owners = page.locator("#strip .token.coord").evaluate_all("tokens => tokens.map(token => token.dataset.owner)")
    polygon = next(owner for owner in owners if owners.count(owner) > 4)
    page.locator(f'#strip .token.coord[data-owner="{polygon}"]').nth(1).hover()


def point_at_invalid_object(page: Page) -> None:
    page.locator(".object.invalid").first.hover()


def point_at_cut_token(page: Page) -> None:
    page.locator("#strip .token.cut").last.hover()


def capture_report(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    (run,) = runs
    coordexp(Path.cwd(), "report", run, "--out", work / "report.html")
    take(browser, work / "report.html", "report.png", (1300, 1900))


def capture_comparison(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    coordexp(Path.cwd(), "report", *runs, "--out", work / "report.html")
    take(browser, work / "report.html", "report-comparison.png", (1300, 2050))


def capture_site(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    """Capture pages of the documentation site and a search, in both widths and both colours."""
    (folder,) = runs
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", work], cwd=ROOT, check=True)
    for width, height in ((1280, 900), (390, 844)):
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            for name in SITE_PAGES:
                page.goto((work / f"{name}.html").as_uri())
                page.screenshot(path=folder / f"{name.replace('/', '-')}-{width}-{scheme}.png")
            search_site(page, "staleness")
            page.screenshot(path=folder / f"search-{width}-{scheme}.png")
            context.close()


def search_site(page: Page, words: str) -> None:
    """Type words into the search field of the site, and wait for the first result."""
    if not page.locator(".md-search__input").is_visible():
        page.locator(".md-header label[for=__search]").click()
    page.locator(".md-search__input").press_sequentially(words)
    page.locator(".md-search-result__item").first.wait_for()


CAPTURES = {
    "site": capture_site,
    "quickstart": capture_quickstart,
    "data": capture_data,
    "suggestions": capture_suggestions,
    "inspector": capture_inspector,
    "report": capture_report,
    "comparison": capture_comparison,
}


def take(
    browser: Browser,
    page_file: Path,
    name: str,
    size: tuple[int, int],
    address: str = "",
    point: Callable[[Page], None] | None = None,
) -> None:
    """Open a page, move the pointer if `point` is given, and save a screenshot."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.goto(page_file.as_uri() + address)
    if point is not None:
        point(page)
    page.wait_for_timeout(500)
    page.screenshot(path=IMAGES / name)
    page.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        yield browser
        browser.close()


def coordexp(folder: Path, *words: object) -> None:
    """Run a `coordexp` command inside `folder`, so that no page shows an absolute path."""
    command = [sys.executable, "-m", "coordexp", *map(str, words)]
    subprocess.run(
        command, cwd=folder, check=True, timeout=600, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )


if __name__ == "__main__":
    main()
