"""The carry buffer in a checkpoint: one safetensors file with one array per token-wise field of `Segment`, all
waiting segments joined end to end."""

import json
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coordexp.correction import Segment
from coordexp.errors import explain
from coordexp.pack.carry import CarryBuffer
from coordexp.pack.example import Example, ExampleId

FORMAT = 3  # format 1 had no number in its file, and no ids; formats 1 and 2 had no unlikely tokens
_STREAMS = tuple(field.name for field in fields(Segment) if field.name != "prompt_length")
_PER_SEGMENT = ("lengths", "prompt_lengths", "arrived")
_SOURCE = ("image", "width", "height", "channel", "id")


def save_buffer(buffer: CarryBuffer[Example], path: Path) -> None:
    examples = [example for example, _ in buffer.waiting]
    segments = [example.segment for example in examples]
    arrays: dict[str, NDArray[Any]] = {
        "lengths": np.array([len(segment) for segment in segments], dtype=np.int64),
        "prompt_lengths": np.array([segment.prompt_length for segment in segments], dtype=np.int64),
        "arrived": np.array([row for _, row in buffer.waiting], dtype=np.int64),
    }
    for name in _STREAMS:
        arrays[name] = np.concatenate([getattr(segment, name) for segment in segments] or [np.zeros(0)])
    sources = [
        [example.image, *example.size, example.channel, astuple(example.id) if example.id else None]
        for example in examples
    ]
    metadata = {"format": str(FORMAT), "rows": str(buffer.rows), "sources": json.dumps(sources)}
    save_file(arrays, path, metadata=metadata)


def load_buffer(buffer: CarryBuffer[Example], path: Path) -> None:
    """Put the saved examples back into `buffer`, under its own capacity and limit."""
    problem = f"{path} does not hold a carry buffer of this version"
    with explain((SafetensorError, KeyError, ValueError), problem, "resume from another checkpoint"):
        arrays, rows, sources = _read(path)
    cuts = np.cumsum(arrays["lengths"])[:-1]
    streams = {name: np.split(arrays[name], cuts) for name in _STREAMS}
    waiting = []
    for k, (image, width, height, channel, id) in enumerate(sources):
        parts = {name: stream[k] for name, stream in streams.items()}
        segment = Segment(**parts, prompt_length=int(arrays["prompt_lengths"][k]))
        example = Example(segment, image, (width, height), channel, ExampleId(*id) if id else None)
        waiting.append((example, int(arrays["arrived"][k])))
    buffer.restore(waiting, rows)


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], int, list[Any]]:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        file_format = int(metadata.get("format", "1"))
        if file_format > FORMAT:
            raise ValueError(f"it has format {file_format}, and this version reads up to {FORMAT}")
        saved = [name for name in (*_PER_SEGMENT, *_STREAMS) if file_format >= 3 or name != "unlikely"]
        arrays = {name: file.get_tensor(name) for name in saved}
    if file_format < 3:
        arrays["unlikely"] = np.full(len(arrays["ids"]), -1, dtype=np.int64)
    rows, sources = int(metadata["rows"]), json.loads(metadata["sources"])
    total = int(arrays["lengths"].sum())
    if any(len(arrays[name]) != len(sources) for name in _PER_SEGMENT) or any(
        len(arrays[name]) != total for name in _STREAMS
    ):
        raise ValueError("its streams have different lengths")
    if any(len(source) != len(_SOURCE) for source in sources):
        raise ValueError(f"its sources are not {', '.join(_SOURCE)}")
    if file_format == 1:  # it has the name of a dump in the place of the id
        sources = [[*source[:-1], None] for source in sources]
    return arrays, rows, sources
