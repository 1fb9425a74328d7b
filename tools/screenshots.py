"""Takes the pictures of the two pages that the docs show, with headless Chromium and the committed demo model.

python tools/screenshots.py [--chromium /usr/bin/chromium]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples/scenes-cpu/model"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default="chromium")
    chromium = parser.parse_args().chromium
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        words = ["--train", 1, "--val", 60, "--polygons", 0.2, "--seed", 3]
        coordexp(work, "demo", "scenes", "--out", "scenes", *words)
        coordexp(work, "data", "view", "scenes/val.jsonl", "--out", "view.html")
        words = ["--data", "scenes/val.jsonl", "--max-new-tokens", 256, "--batch", 60]
        coordexp(work, "predict", "--model", MODEL, *words, "--out", "preds.json")
        words = ["--data", "scenes/val.jsonl", "--preds", "preds.json"]
        coordexp(work, "evaluate", *words, "--page", "evaluate.html")
        for page, size in (("view", "1200,900"), ("evaluate", "1200,1500")):
            profile = f"--user-data-dir={work / 'profile'}"
            target = f"--screenshot={ROOT / 'docs/images' / (page + '.png')}"
            command = [
                chromium,
                *FLAGS,
                profile,
                target,
                f"--window-size={size}",
                (work / f"{page}.html").as_uri(),
            ]
            subprocess.run(command, check=True, timeout=120, capture_output=True)


def coordexp(folder: Path, *words: object) -> None:
    """In the folder itself, so that no page shows where that is."""
    subprocess.run([sys.executable, "-m", "coordexp", *map(str, words)], cwd=folder, check=True, timeout=600)


if __name__ == "__main__":
    main()
