"""One pass over the weights, to servers that are fakes and fail when a test says so."""

from types import SimpleNamespace

import pytest
import torch

from coordexp.servers import sender as module
from coordexp.servers.sender import send

CPU = torch.device("cpu")


class FakeLink:
    """Records its calls. `error` is raised by the call that `fails_at` names."""

    def __init__(self, index, fails_at="", error=None):
        self.client, self.calls = SimpleNamespace(index=index, name=f"server {index}"), []
        self.fails_at, self.error = fails_at, error

    def check(self):
        pass

    def begin(self, version, adapter, until):
        self._record("begin")

    def load(self, bucket, until):
        self._record("load")

    def finish(self, version, until):
        self._record("finish")

    def _record(self, name):
        self.calls.append(name)
        if name == self.fails_at:
            raise self.error


@pytest.mark.parametrize("fails_at", ["begin", "load", "finish"])
def test_whatever_a_server_raises_it_alone_is_left_out(fails_at):
    links = [FakeLink(0), FakeLink(1, fails_at, ValueError("a defect"))]
    sent = send(links, [("w", torch.ones(8))], "7", CPU, seconds=20)
    assert links[0].calls == ["begin", "load", "finish"] and links[1].calls[-1] == fails_at
    assert list(sent.errors) == [1] and "a defect" in str(sent.errors[1])


def test_a_pass_that_fails_at_the_sender_takes_part_in_gathering_all_weights(monkeypatch):
    """Other ranks gather the same weights at the same time, and would wait for this one."""
    gathered = []

    def weights():
        for number in range(9):
            gathered.append(number)
            yield f"w{number}", torch.ones(8)

    monkeypatch.setattr(module, "BUCKET_BYTES", 16)
    monkeypatch.setattr(module, "flatten", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        send([FakeLink(0)], weights(), "7", CPU, seconds=20)
    assert gathered == [*range(9)]
