"""Takes the pictures of pages that the docs show, with headless Chromium.

    python tools/screenshots.py data                        # with the committed demo model
    python tools/screenshots.py inspector RUN               # of configs/demo/stage2-polygons-cpu.yaml
    python tools/screenshots.py report RUN                  # of configs/demo/stage2-hf.yaml
    python tools/screenshots.py comparison RUN RUN [RUN ...]

Runs are made from a folder of their own, so that no page shows where that is.
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

from coordexp.inspector.dumps import choose

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
MODEL = ROOT / "examples/scenes-cpu/model"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
Pointing = Callable[[Page], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "inspector", "report", "comparison"))
    parser.add_argument("runs", nargs="*", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        work = Path(folder)
        {"data": data, "inspector": inspector, "report": report, "comparison": comparison}[given.what](
            browser, work, given.runs
        )


def data(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    coordexp(work, "demo", "scenes", "--out", "scenes", "--train", 1, "--val", 60, "--polygons", 0.2, "--seed", 3)
    coordexp(work, "data", "view", "scenes/val.jsonl", "--out", "view.html")
    words = ["--data", "scenes/val.jsonl", "--max-new-tokens", 256, "--batch", 60]
    coordexp(work, "predict", "--model", MODEL, *words, "--out", "preds.json")
    coordexp(work, "evaluate", "--data", "scenes/val.jsonl", "--preds", "preds.json", "--page", "evaluate.html")
    take(browser, work / "view.html", "view.png", (1200, 900))
    take(browser, work / "evaluate.html", "evaluate.png", (1200, 1500))


def inspector(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    """Of three rollouts, each the first with the most matches of those that show something."""
    (run,) = runs
    coordexp(Path.cwd(), "inspect", run, "--out", work / "inspect.html", "--samples", 10_000)
    wholes = [one.whole for one in choose(run, 10_000)[0]]
    for name, fits, point in (
        ("polygon", matched_polygon, point_at_a_polygon),
        ("malformed", malformed_middle, lambda page: page.locator(".object.invalid").first.hover()),
        ("truncated", truncated_tail, lambda page: page.locator("#strip .token.cut").last.hover()),
    ):
        found = max(filter(fits, wholes), key=lambda whole: len(whole["result"]["pairs"]))
        place = found["place"]
        address = f"#{place['step'] + 1}.{place['micro']}.{place['record']}"
        take(browser, work / "inspect.html", f"inspect-{name}.png", (1400, 960), address, point)


def matched_polygon(whole: dict[str, Any]) -> bool:
    result = whole["result"]
    valid = [one for one in result["objects"] if one["reason"] is None]
    drawn = any(valid[i]["kind"] == whole["truth"][j]["kind"] == "poly" for i, j in result["pairs"])
    return bool(drawn and result["missed"] and result["extra"] and not result["truncated"])


def malformed_middle(whole: dict[str, Any]) -> bool:
    reasons = [one["reason"] for one in whole["result"]["objects"]]
    return any(reasons[1:-1]) and len(whole["result"]["pairs"]) >= 2 and not whole["result"]["truncated"]


def truncated_tail(whole: dict[str, Any]) -> bool:
    result = whole["result"]
    return bool(
        result["truncated"] and result["missed"] and len(whole["rollout"]["ids"]) - result["prefix_tokens"] >= 10
    )


def point_at_a_polygon(page: Page) -> None:
    """At a coordinate of the first matched object with more than four."""
    marks = page.locator("#strip .token.bin").evaluate_all("all => all.map(one => one.dataset.owner)")
    owner = next(each for each in marks if marks.count(each) > 4 and int(each) >= 0)
    page.locator(f'#strip .token.bin[data-owner="{owner}"]').nth(1).hover()


def report(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    (run,) = runs
    coordexp(Path.cwd(), "report", run, "--out", work / "report.html")
    take(browser, work / "report.html", "report.png", (1300, 1900))


def comparison(browser: Browser, work: Path, runs: Sequence[Path]) -> None:
    coordexp(Path.cwd(), "report", *runs, "--out", work / "report.html")
    take(browser, work / "report.html", "report-comparison.png", (1300, 2050))


def take(
    browser: Browser,
    page_file: Path,
    name: str,
    size: tuple[int, int],
    address: str = "",
    point: Pointing = lambda page: None,
) -> None:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.goto(page_file.as_uri() + address)
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
    """In the folder itself, so that no page shows where that is."""
    command = [sys.executable, "-m", "coordexp", *map(str, words)]
    subprocess.run(
        command, cwd=folder, check=True, timeout=600, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )


if __name__ == "__main__":
    main()
