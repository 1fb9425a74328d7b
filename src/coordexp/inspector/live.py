"""Serves the pages of a run that is going on: on loopback, to this machine, and nothing can be changed through it.

A page is made when it is asked for and there is more to see than the last time. `changed` says whether there is.
"""

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from coordexp.document import document, written
from coordexp.errors import DataError
from coordexp.inspector.dumps import last_step, mark, mark_of_dumps
from coordexp.inspector.report import dumped, grouped, read_logged, report_page, why_not
from coordexp.inspector.rollouts import inspector_page
from coordexp.inspector.run import METRICS, REPORT, read_run

HOST = "127.0.0.1"
Make = Callable[[str], str]  # from the mark of the dumps to a page


def run_pages(folder: Path, samples: int) -> "Pages":
    """The inspector at `/`, the report at `/report`, with ways from each to the other."""
    return Pages(
        folder,
        {
            "/": lambda dumps: inspector_page(read_run(folder), samples, stamp=dumps, report="report").text,
            "/report": lambda _: _report(folder),
        },
    )


def _report(folder: Path) -> str:
    groups = grouped([read_logged(folder)])
    links = [replace(one, page="/") for one in dumped(groups, folder / REPORT)]
    return report_page(groups, why_not(groups) or "", links)


class Pages:
    """The pages by their addresses. One is made at a time: a second reader gets what the first one waited for."""

    def __init__(self, folder: Path, makers: dict[str, Make]) -> None:
        self.folder = folder
        self._makers = makers
        self._made: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()

    def __contains__(self, address: str) -> bool:
        return address in self._makers

    def get(self, address: str) -> str:
        with self._lock:
            dumps = mark_of_dumps(self.folder)
            now = f"{dumps} {mark([self.folder / METRICS])}"
            made, page = self._made.get(address, ("", ""))
            if made != now:
                try:
                    page = self._makers[address](dumps)
                except (DataError, OSError) as error:  # a run that has just begun, or is writing a file
                    return _not_yet(str(error), [other for other in self._makers if other != address])
                self._made[address] = now, page
            return page

    def changed(self, since: str) -> dict[str, Any]:
        """Whether there are other examples than when a page was made, and up to which step."""
        return {"changed": mark_of_dumps(self.folder) != since, "step": last_step(self.folder)}


def _not_yet(why: str, others: list[str]) -> str:
    """Looks again by itself."""
    ways = "".join(f'<p><a href="{written(each)}">{written(each)}</a></p>' for each in others)
    words = f"<p>Nothing to show yet. This page looks again every few seconds.</p><pre>{written(why)}</pre>"
    return document("coordexp", f'<meta http-equiv="refresh" content="3">{words}{ways}', styles=(), scripts=())


def listen(pages: Pages, port: int) -> ThreadingHTTPServer:
    """Port 0 takes a free one. OSError when it is taken."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "coordexp", ""
        timeout = 30  # seconds for a client that says nothing

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            if not _is_local(self.headers.get("Host", "")):
                # Another site's name that was made to lead here must not read the pages.
                self.send_error(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1 or localhost")
            elif address.path == "/changed":
                since = parse_qs(address.query).get("since", [""])[0]
                self._answer("application/json", json.dumps(pages.changed(since)))
            elif address.path in pages:
                self._answer("text/html; charset=utf-8", pages.get(address.path))
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode("utf-8", "replace")
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reader has gone on
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: a page asks every few seconds."""

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    return server


def _is_local(host: str) -> bool:
    """Whatever the port: a forwarded one may be another."""
    return host.partition(":")[0] in (HOST, "localhost")
