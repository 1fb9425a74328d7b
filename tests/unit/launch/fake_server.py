"""FakeServer: answers what a launcher asks of a rollout server, and misbehaves as it is told."""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
BETWEEN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)"


class FakeServer(BaseHTTPRequestHandler):
    size = 1

    def do_GET(self):
        allowed = self.path == "/health/" or self.headers["Authorization"] == "Bearer secret-token"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(b'{"world_size": %d}' % self.size)

    def log_message(self, *_):
        pass


def die_when(file):
    while not file.exists():
        time.sleep(0.05)
    os._exit(9)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("port", type=int)
    options.add_argument("--size", type=int, default=1)
    options.add_argument("--die-when", type=Path)
    options.add_argument("--at-start", type=int)
    options.add_argument("--spawn", action="store_true")
    options.add_argument("--stubborn", action="store_true")
    asked = options.parse_args()
    print("starting the engine", file=sys.stderr)
    if asked.spawn:  # an engine in a session of its own, whose parent ends before it
        subprocess.run([sys.executable, "-c", BETWEEN], check=True)
        subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    if asked.at_start is not None:
        print("no room for the engine", file=sys.stderr)
        sys.exit(asked.at_start)
    if asked.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    FakeServer.size = asked.size
    server = HTTPServer(("127.0.0.1", asked.port), FakeServer)
    if asked.die_when is not None:
        threading.Thread(target=die_when, args=(asked.die_when,), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
