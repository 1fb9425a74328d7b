"""The real app on the real uvicorn with a fake engine, in its own process. Prints its port and its file limit.

Arguments: the token or "", then seconds for HEADER and BODY."""

import asyncio
import sys

import uvicorn

from coordexp.servers import connections
from tests.unit.servers.test_app import rollout_app


async def main(token: str, header: str, body: str) -> None:
    limit = connections.raise_file_limit()
    connections.HEADER, connections.BODY = float(header), float(body)
    listening = connections.listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(rollout_app(token or None).api, **connections.UVICORN))
    work = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    print(listening.getsockname()[1], limit, flush=True)
    await work


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
