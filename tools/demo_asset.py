"""Write a trained checkpoint as a small asset: bfloat16 safetensors, tokenizer and processor, and nothing else.

python tools/demo_asset.py CHECKPOINT OUT
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration


def main(checkpoint: Path, out: Path) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.save_pretrained(out)
    AutoProcessor.from_pretrained(checkpoint).save_pretrained(out)
    shutil.copyfile(checkpoint / "coordexp.json", out / "coordexp.json")
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
