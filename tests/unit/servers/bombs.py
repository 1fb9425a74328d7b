"""Image bombs: files of some kilobytes that decode to very many pixels. Their headers state the true size."""

import struct
import zlib
from pathlib import Path


def png_bomb(width: int, height: int) -> bytes:
    """Return a black PNG of one bit per pixel, written without holding its pixels."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def memory(pid: int | str, name: str) -> int:
    """Return VmHWM (the peak) or VmRSS of a process, in MiB."""
    with Path(f"/proc/{pid}/status").open() as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith(f"{name}:"))
