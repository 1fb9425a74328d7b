"""A fake rollout server: it answers the requests of a launcher, and misbehaves as its options say."""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from coordexp.child_processes import end_with_parent

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class FakeServer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def die_when(file):
    while not file.exists():
        time.sleep(0.05)
    os._exit(9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--die-when", type=Path)
    parser.add_argument("--at-start", type=int)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    options = parser.parse_args()
    print("starting the engine", file=sys.stderr)
    if options.engine:  # which ends only with its server
        tie = partial(end_with_parent, os.getpid())
        subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True, preexec_fn=tie)
    if options.at_start is not None:
        print("no room for the engine", file=sys.stderr)
        sys.exit(options.at_start)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = HTTPServer(("127.0.0.1", options.port), FakeServer)
    if options.die_when is not None:
        threading.Thread(target=die_when, args=(options.die_when,), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
