"""The port of a server, taken at once: before anything that takes long. Imports nothing that does."""

import socket

from coordexp.errors import EngineError
from coordexp.rollout.wire import KEEP_ALIVE


def bound(host: str, port: int) -> socket.socket:
    """It can be connected to when the server is ready, not before. A learner whose machine has gone is noticed by
    the kernel's own questions."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, or asyncio would leave Nagle's algorithm on, and every answer wait for 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for option in KEEP_ALIVE:
        listening.setsockopt(*option)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise EngineError(
            f"{host}:{port} cannot be listened on ({error.strerror})\n"
            "  end what uses it, or change rollout_matching.vllm.server.servers"
        ) from error
    return listening
