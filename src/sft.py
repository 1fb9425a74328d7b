"""`python -m src.sft --config X.yaml`, from the repository root: `coordexp train` under its older name."""

import sys

from coordexp.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]], "python -m src.sft")
