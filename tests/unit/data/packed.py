"""Small packed data sets: WebDataset tars, and TSV as of Rex-Omni."""

import base64
import io
import json
import tarfile
from pathlib import Path

from PIL import Image

WIDTH, HEIGHT = 64, 48


def draw(number: int, form: str = "png") -> bytes:
    """Return an image of its own for each number."""
    file = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT), (number % 256, 40, 90)).save(file, form)
    return file.getvalue()


def write_members(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_webdataset(path: Path, rows: dict[str, object]) -> Path:
    """Write a tar with an image and a row of labels for each name."""
    members = []
    for number, (name, row) in enumerate(rows.items()):
        members += [(f"{name}.png", draw(number)), (f"{name}.json", json.dumps(row).encode())]
    return write_members(path, members)


def write_tsv(folder: Path, rows: list[object], name: str = "toy", quoted: bool = False) -> Path:
    """Write NAME.images.tsv, NAME.annotations.tsv and its index of lines, as Rex-Omni has them."""
    images, annotations, index = bytearray(), bytearray(), []
    for number, row in enumerate(rows):
        index.append(len(annotations))
        annotations += f"{len(images)}\t{json.dumps(row)}\n".encode()
        content = base64.b64encode(draw(number))
        images += f"{number}.png\t".encode() + (str(content).encode() if quoted else content) + b"\n"
    (folder / f"{name}.images.tsv").write_bytes(images)
    file = folder / f"{name}.annotations.tsv"
    file.write_bytes(annotations)
    file.with_name(f"{file.name}.lineidx").write_text("".join(f"{offset}\n" for offset in index))
    return file
