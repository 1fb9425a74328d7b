"""A folder of a bounded size with images that were read from stores. All processes of a machine share it.

    12/9f86d081884c7d65...          one entry: the bytes, and their CRC-32 in four more bytes
    12/9f86d081....5e1f.partial     an entry that is being written, or was when its process was killed

An entry appears whole, because its file is renamed, and one that a crash of the machine has damaged is dropped
when it is read. There is no index and no lock: a process that writes to a subfolder removes its oldest entries.
"""

import hashlib
import os
import threading
import time
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from coordexp.files import PARTIAL

SUBFOLDERS = 64  # each has an equal share of the size, and is cleaned up by itself
KEPT = 0.75  # of the share of a subfolder, after it was cleaned up
WRITTEN = 1 / 64  # of this share, by one process, before it cleans up again
LARGEST = 1 / 4  # of this share; what is larger is not kept
ABANDONED = 3600.0  # seconds after which a partial entry is taken for that of a killed process
CHECKSUM = 4  # bytes


class ImageCache:
    """Several threads and processes may use a folder at the same time. `size` is in bytes."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self._share = folder, size // SUBFOLDERS
        self._written = Counter[str]()  # bytes by subfolder, since this process cleaned up there
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """Return the bytes of an entry, or None if there is none that is whole."""
        place = self._place(key)
        try:
            content = place.read_bytes()
        except OSError:
            return None
        body, checksum = content[:-CHECKSUM], content[-CHECKSUM:]
        with suppress(OSError):
            if checksum == _checksum(body):
                os.utime(place)  # the oldest entries go first, and this one was just used
                return body
            place.unlink()
        return None

    def has(self, key: str) -> bool:
        return self._place(key).is_file()

    def put(self, key: str, content: bytes) -> bool:
        """Write an entry, unless it is too large. Return False if the folder cannot be written. That is no error:
        the image is read from its store again."""
        if len(content) > LARGEST * self._share:
            return True
        place = self._place(key)
        partial = place.with_name(f"{place.name}.{uuid4().hex[:8]}{PARTIAL}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_bytes(content + _checksum(content))
            partial.replace(place)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return False
        with self._lock:
            self._written[place.parent.name] += len(content)
            is_due = self._written[place.parent.name] >= WRITTEN * self._share
            if is_due:
                self._written[place.parent.name] = 0
        if is_due:
            self._clean_up(place.parent)
        return True

    def _place(self, key: str) -> Path:
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=20)
        return self.folder / f"{digest.digest()[0] % SUBFOLDERS:02d}" / digest.hexdigest()

    def _clean_up(self, subfolder: Path) -> None:
        """Remove the oldest entries of a subfolder until the rest fits, and what killed processes have left."""
        entries, now = list[tuple[float, int, str]](), time.time()
        with suppress(OSError), os.scandir(subfolder) as files:
            for file in files:
                with suppress(OSError):  # another process has removed it
                    facts = file.stat()
                    is_partial = file.name.endswith(PARTIAL)
                    if is_partial and now - facts.st_mtime > ABANDONED:
                        Path(file.path).unlink()
                    elif not is_partial:
                        entries.append((facts.st_mtime, facts.st_size, file.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= KEPT * self._share:
                break
            Path(path).unlink(missing_ok=True)
            total -= size


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM, "big")
