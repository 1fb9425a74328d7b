"""Serving the pages of a run that is still going on: to this machine only, and read-only.

A page is made when it is requested. A page that is open asks for `/stamp`, which differs from its own if there is
more to see.
"""

import contextlib
import os
import threading
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from coordexp.dumps import FOLDER
from coordexp.errors import DataError
from coordexp.pages.comparison import reason_not_to_compare
from coordexp.pages.document import render_page
from coordexp.pages.report import render_report
from coordexp.pages.rollouts import make_inspector_page
from coordexp.pages.run_folder import group_runs, read_logged_run, read_run

HOST = "127.0.0.1"
GROWING_FILES = 100  # the latest of a folder, which may still grow: an example can wait some steps


def make_inspector(folder: Path, samples: int) -> str:
    stamp = compute_dump_stamp(folder)
    return make_inspector_page(read_run(folder), samples, stamp=stamp, report="report").html


def make_report(folder: Path) -> str:
    groups = group_runs([read_logged_run(folder)])
    return render_report(groups, reason_not_to_compare(groups) or "", {folder: "/"})


def listen(folder: Path, samples: int, port: int) -> ThreadingHTTPServer:
    """Return a server that is bound to the port; 0 takes a free one. The inspector is at `/` and the report at
    `/report`. They link to each other. Raise OSError if the port is in use."""
    pages = {"/": partial(make_inspector, folder, samples), "/report": partial(make_report, folder)}
    lock = threading.Lock()  # one page is made at a time

    def make_page(address: str) -> str:
        try:
            with lock:
                return pages[address]()
        except (DataError, OSError) as error:  # the run has just begun, or is writing a file
            others = [other for other in pages if other != address]
            return render_page("waiting.html", title="coordexp", reason=str(error), others=others)

    class PageHandler(BaseHTTPRequestHandler):
        server_version, sys_version = "coordexp", ""
        timeout = 30  # seconds for a client that sends nothing

        def do_GET(self) -> None:
            address = urlsplit(self.path).path
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
                # Another site could point its own name at this address. The port may be another one, forwarded.
                self.send_error(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1 or localhost")
            elif address == "/stamp":
                self._send("text/plain; charset=utf-8", compute_dump_stamp(folder))
            elif address in pages:
                self._send("text/html; charset=utf-8", make_page(address))
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _send(self, content_type: str, text: str) -> None:
            body = text.encode("utf-8", "replace")
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reader closed the page
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a page sends a request every few seconds."""

    server = ThreadingHTTPServer((HOST, port), PageHandler)
    server.daemon_threads = True
    return server


def compute_dump_stamp(run: Path) -> str:
    """Return a text that changes when a run dumps more: how many files there are, and how large the last ones are.
    Those of traces come last, and they grow for some steps more than the others."""
    folder = run / FOLDER
    names = sorted(os.listdir(folder)) if folder.is_dir() else []  # noqa: PTH208, ten times as fast
    return f"{len(names)}-{sum((folder / name).stat().st_size for name in names[-GROWING_FILES:])}"
