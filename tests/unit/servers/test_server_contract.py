"""What a learner sends to rollout servers, and where. The servers are fakes: real HTTP and weights, no model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordexp.servers import send as server_weights
from tests.unit.servers.served import Run, are_right

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setattr(server_weights, "BUCKET_BYTES", 700)
    runs: list[Run] = []

    def start(**options: object) -> Run:
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield start
    for started in runs:
        started.close()


@pytest.mark.scenario("R07.C15", on="fake")
def test_a_base_url_is_the_prefix_of_every_route(run: Callable[..., Run]) -> None:
    learner = run(servers=1, options={"prefix": "/rollouts/first"})
    assert learner.servers[0].url.endswith("/rollouts/first")
    learner.sync(1)
    assert are_right(learner.generate(2), 1)
    paths = set(learner.servers[0].paths())
    assert {"/health/", "/infer/", "/get_world_size/", "/init_communicator/"} <= paths


@pytest.mark.scenario("R08.C4", on="fake")
def test_requests_and_weights_are_all_that_a_learner_sends(run: Callable[..., Run]) -> None:
    """No target, mask or label goes to a server, in any call of two steps."""
    learner = run(servers=2)
    for version in (1, 2):
        learner.sync(version)
        assert are_right(learner.generate(5), version)
    control = {"/health/", "/get_world_size/", "/version/", "/init_communicator/", "/begin_update/"}
    weights = {"/load_bucket/", "/finish_update/"}
    for server in learner.servers:
        assert set(server.paths()) <= control | weights | {"/infer/"}
        for _, body in (call for call in server.calls if call[0] == "/infer/"):
            assert set(body) == {"infer_requests", "request_config"}
            for request in body["infer_requests"]:
                assert set(request) == {"messages", "images", "data_dict"}
                assert set(request["data_dict"]) == {"coordexp"}
                assert set(request["data_dict"]["coordexp"]) == {"seed", "guard", "size"}


@pytest.mark.scenario("R15.C1", on="fake")
def test_each_server_is_asked_for_its_world_size_which_is_kept(run: Callable[..., Run]) -> None:
    learner = run(sizes=[1, 3])
    learner.sync(1)
    assert learner.backend.pool is not None
    assert learner.backend.pool.world_sizes == (1, 3)
    assert all("/get_world_size/" in server.paths() for server in learner.servers)
    learner.clear_calls()
    learner.generate(4)
    learner.sync(2)
    learner.generate(4)
    assert not any("/get_world_size/" in server.paths() for server in learner.servers)
