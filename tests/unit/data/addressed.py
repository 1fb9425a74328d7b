"""The images of a data file moved into a tar or a TSV, and its records with their addresses."""

import base64
import json
import tarfile
from collections.abc import Callable
from pathlib import Path


def rewrite(file: Path, name: str, change: Callable[[str], str]) -> Path:
    """Write the records of a file with other addresses of their images, beside it, and return the new file."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    new = file.with_name(name)
    new.write_text("".join(json.dumps(record | {"image": change(record["image"])}) + "\n" for record in records))
    return new


def pack_tar(file: Path, tar: str = "images.tar") -> dict[str, str]:
    """Write the images that the records of a file name to a tar beside it. Return the address of each image there,
    by its name."""
    names = dict.fromkeys(json.loads(line)["image"] for line in file.read_text().splitlines())
    with tarfile.open(file.with_name(tar), "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in names:
            archive.add(file.parent / name, name)
    with tarfile.open(file.with_name(tar)) as archive:
        return {member.name: f"{tar}#bytes={member.offset_data}:{member.size}" for member in archive}


def pack_tsv(file: Path, tsv: str = "images.tsv") -> dict[str, str]:
    """Write the images that the records of a file name to a TSV beside it, in base64. Return their addresses."""
    names = dict.fromkeys(json.loads(line)["image"] for line in file.read_text().splitlines())
    content, addresses = bytearray(), {}
    for number, name in enumerate(names):
        content += f"{number}\t".encode()
        text = base64.b64encode((file.parent / name).read_bytes())
        addresses[name] = f"{tsv}#bytes={len(content)}:{len(text)};base64"
        content += text + b"\n"
    file.with_name(tsv).write_bytes(content)
    return addresses
