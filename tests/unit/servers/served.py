"""A learner and its rollout servers in one process. The servers are fakes."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import torch

from coordexp.config import RolloutMatching
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
from coordexp.rollout.start import EngineSetup
from coordexp.servers.backend import ServerBackend
from coordexp.servers.client import ClientTimeouts
from coordexp.servers.protocol import model_fingerprint
from tests.fake_server import FakeRolloutServer, answer_ids
from tests.rollouts import PROMPT
from tests.vocabularies import table

TABLE = table("small")
TIMEOUTS = ClientTimeouts(poll=0.05, health=5, silence=20, call=20)
DECODE = Decode(20, "sampling", temperature=1.0)


class OnePrompt:
    question = "detect"

    def ids(self, width, height, image="", question=None):
        return list(PROMPT)


class OwnModel:
    """A fake of the learner's own model, which answers the probe."""

    logprob = -0.5

    def generate(self, requests):
        return [Rollout(PROMPT, tuple(answer_ids(1)), "text", (self.logprob,) * 3, "stop") for _ in requests]


class Run:
    """A learner and its servers. `options` are arguments of each fake server. With `addresses`, the servers belong
    to another rank."""

    def __init__(self, folder, servers=2, sizes=None, options=None, addresses=None, **changes) -> None:
        self.folder = folder
        config = {"hidden": 8, "dtype": "float32", "text": {"layers": [1, 2]}}
        (folder / "config.json").write_text(json.dumps(config))
        self.changes = changes
        guard = RolloutMatching(repeat_terminate=changes.get("guard")).repeat_terminate
        facts = {"model": model_fingerprint(folder), "dtype": "float32", "guard": guard.model_dump(mode="json")}
        sizes = sizes or [1] * servers
        self.servers = [SimpleNamespace(url=url, group_port=port) for url, port in addresses or ()] or [
            FakeRolloutServer(
                facts, end_of_turn=TABLE.end_of_turn, prompt_ids=PROMPT, world_size=size, **(options or {})
            )
            for size in sizes
        ]
        self.messages, self.events, self.own_model = [], [], OwnModel()
        self.weights = {f"w{k}": torch.randn(9, 7 + k) for k in range(5)}
        self.backend = self.learner()

    def settings(self) -> RolloutMatching:
        pool = {"servers": [{"base_url": server.url, "group_port": server.group_port} for server in self.servers]}
        pool |= {"timeout_s": 20} | {
            name: value for name, value in self.changes.items() if name in ("timeout_s", "infer_timeout_s")
        }
        sync = {"timeout_s": self.changes.get("sync_timeout_s", 20), "canary_every": 100}
        return RolloutMatching(
            vllm={"mode": "server", "server": pool, "sync": sync | self.changes.get("sync", {})},
            decode_batch_size=self.changes.get("decode_batch_size", 4),
            repeat_terminate=self.changes.get("guard"),
        )

    def learner(self) -> ServerBackend:
        silence = self.changes.get("silence")
        setup = EngineSetup(self.folder, "float32", self.settings(), TABLE, torch.device("cpu"))
        return ServerBackend(
            setup,
            OnePrompt(),
            self.own_model,
            [ImageRef("probe.png", 8, 8)],
            self.messages.append,
            self.events.append,
            adapter=self.changes.get("adapter"),
            timeouts=replace(TIMEOUTS, health=silence / 2, silence=silence) if silence else TIMEOUTS,
        )

    def sync(self, version):
        self.backend.sync(lambda: iter(self.weights.items()), version)

    def generate(self, count, first=100):
        return self.backend.generate(requests(count, first))

    def has_weights(self, server, version) -> bool:
        same = all(torch.equal(server.weights[name], weight) for name, weight in self.weights.items())
        is_current = server.version == self.backend.asker.name_version(version)
        return same and is_current and set(server.weights) == set(self.weights)

    def clear_calls(self):
        for server in self.servers:
            server.calls.clear()

    def close(self):
        self.backend.close()
        for server in self.servers:
            if isinstance(server, FakeRolloutServer):
                server.thawed.set()
                server.die()


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def requests(count, first=100, decode=DECODE):
    return [Request(ImageRef(f"{k}.png", 8, 8), decode, first + k) for k in range(count)]


def are_right(rollouts, version, first=100):
    """Return True if every rollout is the answer to its own request, made with this version."""
    expected = [tuple(answer_ids(first + k)) for k in range(len(rollouts))]
    return [rollout.ids for rollout in rollouts] == expected and all(
        rollout.version == version and rollout.finish_reason == "stop" for rollout in rollouts
    )
