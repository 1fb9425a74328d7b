"""Write a model whose weights are the means of those of two models.

    python tools/average_weights.py FIRST SECOND OUT

Tokenizer, processor and prompt are those of the first.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoProcessor

from coordexp.answers.formats import NOTE_FILE
from coordexp.families import load_model


def main(first: Path, second: Path, out: Path) -> None:
    model = load_model(first, dtype=torch.float32)
    other = load_model(second, dtype=torch.float32).state_dict()
    model.load_state_dict({name: (weight + other[name]) / 2 for name, weight in model.state_dict().items()})
    AutoProcessor.from_pretrained(first).save_pretrained(out)
    shutil.copyfile(first / NOTE_FILE, out / NOTE_FILE)
    model.save_pretrained(out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
