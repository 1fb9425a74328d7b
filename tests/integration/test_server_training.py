"""Training on the answers of rollout servers equals training on the learner's own: the losses and counters are the
same. Servers and learner are separate processes."""

import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordexp.rollout.backend import request_seed
from tests.command import run
from tests.integration.servers import GUARD, Fleet
from tests.integration.stage2_runs import DRAWN, check_losses, config, finish, replayed_steps, started, training

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]

STEPS = 6
RUN = DRAWN | {"training__max_steps": STEPS, "training__save_steps": STEPS, "stage2__dump_every": 5}


class Pair:
    """A run with servers that are already running, and the same run with the learner alone (`own`)."""

    def __init__(self, fleet: Fleet, name: str, servers: int, ranks: int, **changes: Any) -> None:
        fleet.ensure(servers)
        file = str(fleet.config(name, servers, **RUN, **changes))
        launch = ["-m", "coordexp", "launch", "--config", file, "--cpu", "--no-servers", "--learners", str(ranks)]
        self.shown = finish(launch)
        self.folder = fleet.folder / name
        self.own = fleet.folder / f"{name}-own"
        guard = {"rollout_matching__repeat_terminate": GUARD}
        finish(training(config(fleet.folder, self.own.name, **RUN, **guard)), ranks)
        self.servers, self.ranks, self.fleet = servers, ranks, fleet

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        file = self.folder / (f"servers_{rank}.jsonl" if rank else "servers.jsonl")
        return [event for line in file.read_text().splitlines() if (event := json.loads(line))["event"] == kind]


@pytest.fixture(scope="module")
def two_servers(fleet: Fleet) -> Pair:
    return Pair(fleet, "two-servers", servers=2, ranks=1)


@pytest.fixture(scope="module")
def two_ranks(fleet: Fleet) -> Pair:
    """Each rank sends the weights to one of the servers."""
    return Pair(fleet, "two-ranks", servers=2, ranks=2, rollout_matching__vllm__sync__senders=2)


@pytest.mark.scenario("R07.C9", "R08.C1", "R34.S1", on="engine")
def test_two_servers_and_a_learner_give_the_losses_of_the_learners_own_answers(two_servers):
    check_losses(two_servers.folder, two_servers.own, STEPS)


@pytest.mark.scenario("R07.S9", on="engine")
def test_two_servers_and_two_ranks_give_the_losses_of_their_own_answers(two_ranks):
    check_losses(two_ranks.folder, two_ranks.own, STEPS)
    syncs = two_ranks.events("sync")
    assert [event["version"] for event in syncs] == list(range(STEPS)) and not two_ranks.events("sync", 1)
    assert all(event["synced"] == [0, 1] and event["bytes"] > 3_000_000 for event in syncs)
    for rank in (0, 1):
        calls = [call for event in two_ranks.events("rollouts", rank) for call in event["calls"]]
        assert {call["server"] for call in calls} == {0, 1}


@pytest.mark.scenario("R07.C5", "R07.S5", on="engine")
def test_answers_of_servers_are_aligned_strictly_and_come_out_the_same_when_corrected_again(two_servers):
    done = run("replay", two_servers.folder / "dumps")
    assert replayed_steps(done.output) >= 2


@pytest.mark.scenario("R09.S1", "R39.S1", on="engine")
def test_everything_that_is_needed_to_repeat_the_run_is_in_its_folder(two_servers, two_ranks):
    rollouts = json.loads((two_servers.folder / "run.json").read_text())[0]["rollouts"]
    known = [
        {"base_url": server["base_url"], "group_port": server["group_port"]} for server in rollouts["servers"]
    ]
    assert known == two_servers.fleet.servers
    assert {server["world_size"] for server in rollouts["servers"]} == {1}
    assert (rollouts["mode"], rollouts["sync_mode"], rollouts["fallbacks"]) == ("server", "full", [])
    possible = {request_seed(42, 0, micro, 0, k) for micro in range(2) for k in range(64)}
    first = two_servers.events("rollouts")[0]
    assert first["sync_mode"] == "full" and {call["seed"] for call in first["calls"]} <= possible
    calls = [call for event in two_servers.events("rollouts") for call in event["calls"]]
    calls += [call for rank in (0, 1) for event in two_ranks.events("rollouts", rank) for call in event["calls"]]
    assert all(call["base_url"].startswith("http://127.0.0.1:") for call in calls)
    of_ranks = [
        {call["seed"] for event in two_ranks.events("rollouts", rank) for call in event["calls"]}
        for rank in (0, 1)
    ]
    assert not of_ranks[0] & of_ranks[1]


@pytest.mark.timeout(500)
def test_the_token_of_a_launch_is_in_no_argument_no_log_and_no_folder(tmp_path_factory):
    folder, token = tmp_path_factory.mktemp("token"), secrets.token_urlsafe(32)
    (folder / "temporary").mkdir()
    steps_of = {"training__max_steps": 2, "training__save_steps": 2, "stage2__dump_every": 1}
    file = Fleet(folder, 1).config("launched", **steps_of)
    variables = {"COORDEXP_SERVER_TOKEN": token, "TMPDIR": str(folder / "temporary")}
    commands: set[bytes] = set()
    with started(["-m", "coordexp", "launch", "--config", str(file), "--cpu"], **variables) as run:
        while run.process.poll() is None:
            commands |= set(command_lines(run.left()))
            time.sleep(0.3)
        assert run.process.returncode == 0, run.shown[-3000:]
        shown = run.shown
    assert any(b"serve" in command for command in commands) and any(b"train" in command for command in commands)
    assert not [command for command in commands if token.encode() in command]
    assert token not in shown
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert {"run.json", "servers.jsonl", "resolved.yaml"} <= {path.name for path in written}
    assert not [path for path in written if token.encode() in path.read_bytes()]


def command_lines(processes: dict[int, Any]) -> Iterator[bytes]:
    for pid in processes:
        try:
            yield Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it has ended
            continue
