"""Write random weights in the shape of a published Qwen3-VL, to rehearse a run at its real size without download.

    python tools/published.py --size 2b --out rehearsal-2b

Weights are made and written shard by shard, so the memory of one shard is enough for a model of any size. 2b takes
4.3 GB of disk.
"""

import argparse
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from coordexp.demo.model import greedy_generation, make_config, make_processor, make_tokenizer
from coordexp.errors import UserError
from coordexp.files import is_free, write_json
from coordexp.shapes import PUBLISHED, ModelShape, WeightShapes, count_parameters, expected_weights

SHARD_NUMBERS = 500_000_000  # numbers per shard: 1 GB in bfloat16, unless a single weight has more
DEVIATION = 0.02  # as Qwen3-VL is initialised
ROPE_THETA, MAX_POSITIONS = 5_000_000.0, 262_144
SMALLEST_IMAGE = 65_536  # pixels
NUMBER_BYTES = 2  # bfloat16


def plan_shards(weights: WeightShapes, largest: int = SHARD_NUMBERS) -> list[dict[str, tuple[int, ...]]]:
    """Return the weights of each shard, in order."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, size in weights.items():
        if shards[-1] and count_parameters(shards[-1]) + math.prod(size) > largest:
            shards.append({})
        shards[-1][name] = size
    return shards


def write_published(
    folder: Path,
    shape: ModelShape,
    *,
    largest_shard: int = SHARD_NUMBERS,
) -> Path:
    """Write a checkpoint of this shape to `folder`, which must be new or empty, and return the folder. It has
    random weights in bfloat16 and the real Qwen tokenizer with coordinate tokens."""
    if not is_free(folder):
        raise UserError(f"{folder} is not an empty folder", "give another folder, or remove this one")
    shape = shape.with_coordinate_tokens()
    weights = expected_weights(shape)
    tokenizer = make_tokenizer("qwen")
    folder.mkdir(parents=True, exist_ok=True)
    _check_space(folder, count_parameters(weights) * NUMBER_BYTES)
    config = make_config(tokenizer, shape, rope_theta=ROPE_THETA, max_positions=MAX_POSITIONS)
    config.architectures, config.dtype = ["Qwen3VLForConditionalGeneration"], torch.bfloat16
    config.save_pretrained(folder)
    greedy_generation(tokenizer).save_pretrained(folder)
    pixels = SMALLEST_IMAGE, shape.largest_image
    make_processor(config, tokenizer, pixels).save_pretrained(folder)
    mode = (folder / "config.json").stat().st_mode & 0o777  # safetensors makes its files private
    generator = torch.Generator().manual_seed(0)
    shards = plan_shards(weights, largest_shard)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _random_weight(name, size, generator) for name, size in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)
        files |= dict.fromkeys(shard, file)
    total = count_parameters(weights) * NUMBER_BYTES
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    return folder


def _random_weight(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a weight as Qwen3-VL is initialised: norms are 1, biases 0, and all others normally distributed."""
    if name.endswith(".bias"):
        return torch.zeros(size, dtype=torch.bfloat16)
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    weight = torch.empty(size, dtype=torch.bfloat16)
    return weight.normal_(0.0, DEVIATION, generator=generator)


def _check_space(folder: Path, needed: int) -> None:
    """Raise UserError if the disk has too little space."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: the weights take {needed / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB free",
            "give another --out, or remove files",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(PUBLISHED), default="2b")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print(f"wrote {write_published(options.out, PUBLISHED[options.size])}")


if __name__ == "__main__":
    main()
