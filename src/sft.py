"""`python -m src.sft --config X.yaml`, from the repository root: `coordexp train` under its older name."""

import sys

from coordexp.cli import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]], prog_name="python -m src.sft")
