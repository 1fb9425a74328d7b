"""Images in stores: objects, or parts of them, below URLs that the user allows. They are kept on the local disk.

    COORDEXP_IMAGE_PREFIXES   the URLs below which images may be read, with blanks between them; none by default
    COORDEXP_IMAGE_CACHE      the folder of the cache; by default ~/.cache/coordexp/images
    COORDEXP_IMAGE_CACHE_GB   its size, 10 by default

http and https are read with httpx, other schemes with fsspec, which finds the user's credentials by itself. An
object that does not exist, or ends early, is a broken image (FileNotFoundError, ImageError). Without an answer, a
read is tried again until `DEADLINE_S`, and then raises a StoreError. Objects are taken to be immutable: a changed
one may be read from the cache as it was.

Clients, threads and locks are those of one process. A fork begins with none.
"""

import errno
import io
import ipaddress
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from coordexp.data.addresses import Address, ImageError, check_end, find_url_problem, is_url, parse_address
from coordexp.data.image_cache import ImageCache
from coordexp.errors import DataError, StoreError, UserError, explain, need_packages
from coordexp.logs import say
from coordexp.tasks import Task

PREFIXES, CACHE, CACHE_GB = "COORDEXP_IMAGE_PREFIXES", "COORDEXP_IMAGE_CACHE", "COORDEXP_IMAGE_CACHE_GB"
DEADLINE_S = 300.0  # for one image, with all attempts
ATTEMPT_S = 60.0  # for one attempt
CONNECT_S = 10.0
PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two attempts: the first pause, which doubles, and the longest one
SAID_AFTER_S = 10.0  # without an answer, and between two messages about it
LARGEST = 2**28  # bytes of an image
BLOCK = 2**23  # bytes of an object that is read in order, which are read at once
MOST_REDIRECTS = 5
READERS = 32  # threads that read ahead
MOST_AHEAD = 4096  # images that wait to be read ahead
PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "hf": ("huggingface_hub", "train")}  # and their extras
NOT_FOUND, BEYOND_END, OK, PARTIAL_CONTENT = (404, 410), 416, 200, 206
BUSY = (408, 425, 429)  # statuses of a store that may answer later, as those from 500 on
_NO_BUCKET = "specified bucket does not exist"  # botocore's words


class RefusedAddress(UserError):
    """An image that may not be read, because of its URL or of the place to which that leads. It is no error of the
    data: the user may allow it."""


class _NoAnswer(Exception):
    """An attempt failed, and another one may succeed."""


def are_used() -> bool:
    """Return True if images of some store may be read."""
    return bool(os.environ.get(PREFIXES, "").strip())


def check_allowed(url: str) -> None:
    """Raise RefusedAddress unless a URL is below an allowed prefix."""
    prefixes = _parse_prefixes(os.environ.get(PREFIXES, ""))
    if any(url == prefix or url.startswith(f"{prefix.rstrip('/')}/") for prefix in prefixes):
        return
    allowed = f"only below {' '.join(prefixes)}" if prefixes else "from no store"
    fix = f'if you trust it, set {PREFIXES} to a part of the URL up to a slash, such as "s3://bucket/folder/"'
    raise RefusedAddress(f"{url}: images are read {allowed}", fix)


@lru_cache
def _parse_prefixes(text: str) -> tuple[str, ...]:
    for prefix in text.split():
        if problem := find_url_problem(prefix) or ("" if is_url(prefix) else "a prefix is not a URL"):
            raise UserError(
                f"{PREFIXES}: {problem}", "give e.g. s3://bucket/folder/, and a blank between two of them"
            )
    return tuple(parse_address(prefix).location for prefix in text.split())


@lru_cache
def _open_cache(folder: str, gigabytes: str) -> ImageCache:
    try:
        size = float(gigabytes)
    except ValueError:
        size = 0.0
    if not 0.01 <= size < 1e9:
        raise UserError(f"{CACHE_GB}={gigabytes} is no size of at least 0.01 GB", f"set {CACHE_GB}=10")
    return ImageCache(Path(folder or "~/.cache/coordexp/images").expanduser(), int(size * 1e9))


def open_cache() -> ImageCache:
    return _open_cache(os.environ.get(CACHE, ""), os.environ.get(CACHE_GB, "10"))


def read(address: Address) -> bytes:
    """Return the bytes of an object or of a part of it: those that are being read ahead, those of the cache, or
    those of the store."""
    check_allowed(address.location)
    if (pending := _reader.pending.get(_key(address))) is not None:
        return pending.result()
    content = open_cache().get(_key(address))
    return _reader.fetch(address) if content is None else content


def read_ahead(addresses: Iterable[str]) -> None:
    """Begin to read images that will be asked for soon, in the order of the list. Files are left out, and so is
    whatever would raise an error: `read` will raise it."""
    if are_used():
        _reader.begin(addresses)


def _key(address: Address) -> str:
    return f"{address.location}#bytes={address.offset}:{address.size}"


class _Reader:
    """The clients of this process, and the threads that read ahead."""

    def __init__(self) -> None:
        self.pending: dict[str, Future[bytes]] = {}
        self._queue: SimpleQueue[tuple[Address, Future[bytes]]] = SimpleQueue()
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._has_threads = self._has_no_cache = False
        self._said = -SAID_AFTER_S  # when the latest message about a store that does not answer was printed

    def begin(self, addresses: Iterable[str]) -> None:
        """Queue the addresses that are URLs, unless so many images wait already."""
        urls = [text for text in addresses if is_url(text) and find_url_problem(text) is None]
        if urls and not self._has_threads:
            self._has_threads = True
            for _ in range(READERS):
                threading.Thread(target=self._read_next, daemon=True).start()
        for address in map(parse_address, urls):
            if self._has_no_cache or len(self.pending) >= MOST_AHEAD:
                break
            with self._lock:
                if _key(address) not in self.pending and not open_cache().has(_key(address)):
                    self.pending[_key(address)] = future = Future[bytes]()
                    self._queue.put((address, future))

    def _read_next(self) -> None:
        while True:
            address, future = self._queue.get()
            try:
                check_allowed(address.location)
                content = self.fetch(address)
            except Exception as error:  # noqa: BLE001 - raised in the thread that asks for the image
                self.pending.pop(_key(address))
                future.set_exception(error)
            else:
                self.pending.pop(_key(address))
                future.set_result(content)

    def fetch(self, address: Address) -> bytes:
        """Read from the store, and keep what was read in the cache."""
        content = self.ask(address)
        self._has_no_cache = not open_cache().put(_key(address), content)
        return content

    def ask(self, address: Address) -> bytes:
        """Read from the store. Try again until the deadline."""
        scheme, began = address.location.partition("://")[0], time.monotonic()
        attempt = self._read_http if scheme in ("http", "https") else self._read_with_fsspec
        for number in itertools.count():
            try:
                content = attempt(address, time.monotonic() + ATTEMPT_S) if address.size != 0 else b""
                break
            except _NoAnswer as error:
                reason = hide_secrets(str(error))
            pause = min(PAUSE_S * 2**number, LONGEST_PAUSE_S)
            waited = time.monotonic() - began
            if waited + pause > DEADLINE_S:
                raise StoreError(
                    f"{address.location}: the store has not answered for {waited:.0f} s: {reason}",
                    "check the store and the network; nothing was recorded about this image, so the command can "
                    "be repeated, and a run resumed",
                )
            self._report(address, waited, reason)
            time.sleep(pause)
        if len(content) > LARGEST:
            raise ImageError(f"larger than {LARGEST:,} bytes")
        if address.size is not None:
            check_end(address.size, len(content))
        return content

    def _report(self, address: Address, waited: float, reason: str) -> None:
        """Print that a store does not answer, after a while and from time to time."""
        now = time.monotonic()
        if waited > SAID_AFTER_S and now - self._said > SAID_AFTER_S:
            self._said = now
            say(f"waiting for {address.location}, for {waited:.0f} s so far: {reason}")

    def _client(self, scheme: str, make: Callable[[], Any]) -> Any:
        with self._lock:
            if scheme not in self._clients:
                self._clients[scheme] = make()
            return self._clients[scheme]

    # fsspec

    def open_system(self, scheme: str) -> Any:
        package, extra = PACKAGES[scheme]
        need_packages(f"reading {scheme}:// images", package, extra=extra)
        import fsspec  # type: ignore[import-untyped]

        return self._client(scheme, partial(fsspec.filesystem, scheme, skip_instance_cache=True))

    def _read_with_fsspec(self, address: Address, deadline: float) -> bytes:
        system = self.open_system(address.location.partition("://")[0])
        end = address.offset + (LARGEST + 1 if address.size is None else address.size)
        # The names are needed: these are not the second and the third argument of all implementations.
        task = Task[bytes](partial(system.cat_file, address.location, start=address.offset, end=end))
        try:
            return task.result(deadline=deadline)
        except FileNotFoundError as error:
            if _NO_BUCKET in str(error):
                raise StoreError(f"{address.location}: there is no such bucket", "correct the bucket") from error
            raise _missing(address) from error
        except OSError as error:
            if error.errno == errno.EINVAL:  # the range begins behind the end of the object
                raise ImageError("its address begins behind the end of the object") from error
            if isinstance(error, PermissionError):
                raise _refused(address, str(error)) from error
            raise _NoAnswer(_describe(error)) from error
        except Exception as error:
            if "Credential" in type(error).__name__:
                raise _refused(address, _describe(error)) from error
            raise _NoAnswer(_describe(error)) from error

    # HTTP

    def _read_http(self, address: Address, deadline: float) -> bytes:
        """Read with redirects to allowed URLs only."""
        need_packages("reading images over HTTP", "httpx", extra="train")
        import httpx

        def make() -> httpx.Client:
            limits = httpx.Limits(max_connections=2 * READERS, max_keepalive_connections=2 * READERS)
            timeout = httpx.Timeout(ATTEMPT_S / 2, connect=CONNECT_S)
            return httpx.Client(limits=limits, timeout=timeout, trust_env=False)

        client, target = self._client("http", make), httpx.URL(address.location)
        headers = {"Accept-Encoding": "identity"}
        if address.size is not None:
            headers["Range"] = f"bytes={address.offset}-{address.offset + address.size - 1}"
        try:
            for _ in range(MOST_REDIRECTS + 1):
                options = {"trace": partial(_check_peer, target.host)}
                with client.stream("GET", target, headers=headers, extensions=options) as response:
                    if not response.has_redirect_location:
                        return _read_response(response, address, deadline)
                    target = target.join(response.headers["Location"])
                _check_redirect(address, target)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _NoAnswer(_describe(error)) from error
        raise _NoAnswer(f"more than {MOST_REDIRECTS} redirects")


def list_objects(pattern: str) -> dict[str, int]:
    """Return the URLs that match a URL, in which `*` may stand for any name, and the sizes of their objects."""
    location = parse_address(pattern).location
    check_allowed(location)
    scheme = location.partition("://")[0]
    if scheme not in PACKAGES:
        raise UserError(f"{location}: files are read from {', '.join(PACKAGES)}", "download it, and give its path")
    try:
        entries = _reader.open_system(scheme).glob(location, detail=True)
    except UserError:  # a missing package
        raise
    except Exception as error:
        raise _refused(Address(location), _describe(error)) from error
    return {f"{scheme}://{name}": item["size"] for name, item in sorted(entries.items()) if item["type"] == "file"}


def open_object(url: str) -> IO[bytes]:
    """Open an object to read it in order. Raise DataError if it does not exist."""
    if (size := list_objects(url).get(url)) is None:
        raise DataError(f"{url} does not exist", "correct the URL")
    return io.BufferedReader(_Object(url, size), BLOCK)


class _Object(io.RawIOBase):
    """An object as a file. Whatever goes wrong with it raises a StoreError, and breaks no image in it."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._position = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), BLOCK, self._size - self._position))
        with explain(OSError, self._url, "give it again when it does not change any more", to=StoreError):
            buffer[:size] = _reader.ask(Address(self._url, self._position, size))
        self._position += size
        return size


def _read_response(response: Any, address: Address, deadline: float) -> bytes:
    status, is_part = response.status_code, address.size is not None
    if status in NOT_FOUND:
        raise _missing(address)
    if status == BEYOND_END:
        raise ImageError("its address begins behind the end of the object")
    if status in BUSY or status >= 500:
        raise _NoAnswer(f"status {status}")
    if status not in (OK, PARTIAL_CONTENT):
        raise _refused(address, f"status {status}")
    range_begin = f"bytes {address.offset}-"
    if is_part != (status == PARTIAL_CONTENT) or (
        is_part and not response.headers.get("Content-Range", "").startswith(range_begin)
    ):
        raise _refused(address, "it does not answer requests for ranges")
    if "Content-Length" not in response.headers and "Transfer-Encoding" not in response.headers:
        raise _refused(address, "it does not say how long its answers are, so a broken connection would not show")
    limit, content = address.size or LARGEST, bytearray()
    for piece in response.iter_raw():
        content += piece
        if len(content) > limit:
            raise ImageError(f"larger than {limit:,} bytes")
        if time.monotonic() > deadline:
            raise _NoAnswer(f"{len(content):,} bytes in {ATTEMPT_S:.0f} s")
    return bytes(content)


def _check_redirect(address: Address, target: Any) -> None:
    """Raise RefusedAddress unless a redirect leads below an allowed prefix. The query of its target may be a
    signature, so it is sent, but neither checked nor shown."""
    plain = str(target.copy_with(query=None, fragment=None))
    try:
        if problem := find_url_problem(plain):
            raise RefusedAddress(problem)
        check_allowed(parse_address(plain).location)
    except RefusedAddress as error:
        problem = f"{address.location} redirects to {target.host}, which is not allowed"
        raise RefusedAddress(problem, error.fix) from error


def _check_peer(host: str, event: str, info: dict[str, Any]) -> None:
    """Raise RefusedAddress, before anything is sent, if the name of a host leads to this machine or to an address
    that only this machine has, such as that of a cloud's metadata. A prefix may name such an address itself."""
    if event != "connection.connect_tcp.complete" or host == "localhost" or _is_ip(host):
        return
    peer = ipaddress.ip_address(info["return_value"].get_extra_info("server_addr")[0].partition("%")[0])
    peer = getattr(peer, "ipv4_mapped", None) or peer
    if peer.is_loopback or peer.is_link_local or peer.is_unspecified or peer.is_multicast:
        info["return_value"].close()
        raise RefusedAddress(
            f"{host} leads to {peer}, an address of this machine", f"allow it by that: {PREFIXES}"
        )


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _missing(address: Address) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address.location)


def _refused(address: Address, reason: str) -> StoreError:
    fix = "check your credentials and permissions, and that the store answers requests for ranges"
    return StoreError(f"{address.location}: the store refuses it: {hide_secrets(reason)}", fix)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def hide_secrets(text: str) -> str:
    """Return a message of a library without what may be a secret in a URL: a name, a password, a query."""
    return re.sub(r"\?[^\s'\"<>)]+", "?...", re.sub(r"//[^\s/@]+@", "//...@", text))


_reader = _Reader()


def _start_anew() -> None:
    global _reader
    _reader = _Reader()


os.register_at_fork(after_in_child=_start_anew)
