"""However many calls are open on a server, its health is asked for once per interval."""

import time

import pytest

from tests.fake_server import slow
from tests.unit.servers.served import Run, are_right

pytestmark = pytest.mark.timeout(30)


def test_many_open_calls_ask_for_the_health_of_their_server_no_more_often_than_one(tmp_path):
    learner = Run(tmp_path, servers=1, decode_batch_size=16)
    try:
        learner.sync(1)
        learner.servers[0].faults["/infer/"].extend(slow(0.5) for _ in range(32))
        learner.clear_calls()
        began = time.monotonic()
        assert are_right(learner.generate(32), 1)
        seconds, poll = time.monotonic() - began, learner.backend.clients[0].timeouts.poll
        asked = learner.servers[0].paths().count("/health/")
        assert learner.servers[0].most_open == 16
        assert 2 <= asked <= seconds / (0.9 * poll) + 2
    finally:
        learner.close()
