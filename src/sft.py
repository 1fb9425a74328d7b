"""Run `python -m src.sft --config X.yaml` from the root of the repository: the older name of `coordexp train`."""

import sys

from coordexp.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]], "python -m src.sft")
