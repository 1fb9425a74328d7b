"""Run a plan whose commands are small scripts: `python -m tests.unit.launch.launcher JSON`.

This is a process of its own, so that tests can send it signals and kill it."""

import json
import sys

from coordexp.launch.parts import Log
from coordexp.launch.plan import Part, Plan, PlannedServer
from coordexp.launch.processes import Launch, Patience

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    servers = tuple(
        PlannedServer(
            index,
            f"http://127.0.0.1:{server['port']}",
            1,
            1 if server["command"] else None,
            Part(f"server {index}", tuple(server["command"])) if server["command"] else None,
        )
        for index, server in enumerate(request["servers"])
    )
    learner = Part("learner", tuple(request["learner"]), ranks=request.get("ranks", False))
    patience = Patience(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in request["patience"].items()}
    )
    log = Log(sys.stdout, (*(server.name for server in servers), learner.name))
    sys.exit(Launch(Plan(servers, learner, 1), log, "secret-token", patience).run())
