"""A store of objects on this machine, over HTTP with ranges. It is slow, fails or redirects when it is told to."""

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# Gets the path and the number of a request, from 1, and returns a status to answer with, "cut" to break the
# connection in the middle of the answer, or None to answer.
Fault = Callable[[str, int], int | str | None]


class HttpStore:
    """Serves the files of a folder at `url`. Every answer takes `delay` seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.delay = folder, 0.0
        self.fault: Fault = lambda path, number: None
        self.redirects: dict[str, str] = {}
        self.has_ranges = True
        self.requests: list[str] = []  # the paths, with the range
        self._numbers = itertools.count(1)
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Listen, at the same port as before."""
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                store._answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size, allow_reuse_address = True, 512, True

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range", "")
        path = handler.path.partition("?")[0]
        number = next(self._numbers)
        self.requests.append(f"{path} {asked}".strip())
        time.sleep(self.delay)
        fault = self.fault(path, number) if self._server is not None else "closed"
        if self._server is None:  # an open connection ends with the server
            handler.close_connection = True
            return
        if isinstance(fault, int):
            self._send(handler, fault, b"")
        elif path in self.redirects:
            handler.send_response(302)
            handler.send_header("Location", self.redirects[path])
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        elif not (self.folder / path.lstrip("/")).is_file():
            self._send(handler, 404, b"")
        else:
            self._send_file(handler, (self.folder / path.lstrip("/")).read_bytes(), asked, is_cut=fault == "cut")

    def _send_file(self, handler: BaseHTTPRequestHandler, content: bytes, asked: str, *, is_cut: bool) -> None:
        bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", asked) if self.has_ranges else None
        if bounds is None:
            self._send(handler, 200, content, is_cut=is_cut)
        elif int(bounds[1]) >= len(content):
            self._send(handler, 416, b"")
        else:
            begin, end = int(bounds[1]), min(int(bounds[2]) + 1, len(content))
            self._send(handler, 206, content[begin:end], f"bytes {begin}-{end - 1}/{len(content)}", is_cut=is_cut)

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        content: bytes,
        content_range: str = "",
        *,
        is_cut: bool = False,
    ) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        if content_range:
            handler.send_header("Content-Range", content_range)
        handler.end_headers()
        if is_cut:
            handler.close_connection = True
            content = content[: len(content) // 2]
        handler.wfile.write(content)


@contextmanager
def http_store(folder: Path) -> Iterator[HttpStore]:
    store = HttpStore(folder)
    try:
        yield store
    finally:
        store.close()
