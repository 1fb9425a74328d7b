"""A learner and its rollout servers, which are fakes, in one process."""

import json
from dataclasses import replace
from types import SimpleNamespace

import torch

from coordexp.config import RolloutMatching
from coordexp.rollout.backend import Decode, Picture, Request, Rollout
from coordexp.rollout.server_backend import ServerBackend
from coordexp.rollout.server_client import Patience
from coordexp.rollout.setup import Setup
from coordexp.rollout.wire import model_fingerprint
from tests.fake_server import FakeRolloutServer, answer_ids
from tests.rollouts import PROMPT
from tests.vocabularies import table

TABLE = table("small")
PATIENCE = Patience(poll=0.05, health=5, silence=20, session=20, taken=0.2, call=20)
DECODE = Decode(20, "sampling", temperature=1.0)


class OnePrompt:
    question = "detect"

    def ids(self, width, height, image=""):
        return list(PROMPT)


class OwnModel:
    """The learner's answers, where it is asked for the probe."""

    def __init__(self):
        self.asked, self.logprob = 0, -0.5

    def generate(self, requests):
        self.asked += 1
        return [Rollout(PROMPT, tuple(answer_ids(1)), "text", (self.logprob,) * 3, "stop") for _ in requests]


class Run:
    """A learner and its servers; or a learner with servers that another rank has, `at` these addresses."""

    def __init__(self, folder, servers=2, sizes=None, each=None, at=None, **changes) -> None:
        self.folder = folder
        config = {"hidden": 8, "dtype": "float32", "text": {"layers": [1, 2]}}
        (folder / "config.json").write_text(json.dumps(config))
        self.changes = changes
        guard = RolloutMatching(repeat_terminate=changes.get("guard")).repeat_terminate
        about = {"model": model_fingerprint(folder), "dtype": "float32", "guard": guard.model_dump(mode="json")}
        sizes = sizes or [1] * servers
        self.servers = [SimpleNamespace(url=url, group_port=port) for url, port in at or ()] or [
            FakeRolloutServer(
                about, end_of_turn=TABLE.end_of_turn, prompt_ids=PROMPT, world_size=size, **(each or {})
            )
            for size in sizes
        ]
        self.said, self.recorded, self.own = [], [], OwnModel()
        self.sent = {f"w{k}": torch.randn(9, 7 + k) for k in range(5)}
        self.backend = self.learner()

    def settings(self) -> RolloutMatching:
        pool = {"servers": [{"base_url": one.url, "group_port": one.group_port} for one in self.servers]}
        pool |= {"timeout_s": 20} | {
            k: v for k, v in self.changes.items() if k in ("timeout_s", "infer_timeout_s")
        }
        sync = {"timeout_s": self.changes.get("sync_timeout_s", 20), "canary_every": 100}
        return RolloutMatching(
            vllm={"mode": "server", "server": pool, "sync": sync | self.changes.get("sync", {})},
            decode_batch_size=self.changes.get("decode_batch_size", 4),
            repeat_terminate=self.changes.get("guard"),
        )

    def learner(self) -> ServerBackend:
        silence = self.changes.get("silence")
        about = Setup(self.folder, "float32", self.settings(), TABLE, torch.device("cpu"))
        return ServerBackend(
            about,
            OnePrompt(),
            self.own,
            Picture("probe.png", 8, 8),
            self.said.append,
            self.recorded.append,
            adapter=self.changes.get("adapter"),
            patience=replace(PATIENCE, health=silence / 2, silence=silence) if silence else PATIENCE,
        )

    def sync(self, version):
        self.backend.sync(lambda: iter(self.sent.items()), version)

    def generate(self, count, first=100):
        return self.backend.generate(requests(count, first))

    def has(self, server, version) -> bool:
        same = all(torch.equal(server.weights[name], weight) for name, weight in self.sent.items())
        return same and server.version == self.backend._named(version) and set(server.weights) == set(self.sent)

    def forget(self):
        for one in self.servers:
            one.calls.clear()

    def close(self):
        self.backend.close()
        for one in self.servers:
            if isinstance(one, FakeRolloutServer):
                one.thawed.set()
                one.die()


def requests(count, first=100, decode=DECODE):
    return [Request(Picture(f"{k}.png", 8, 8), decode, first + k) for k in range(count)]


def right(rollouts, version, first=100):
    """Each answer is that to its own request."""
    return [one.ids for one in rollouts] == [tuple(answer_ids(first + k)) for k in range(len(rollouts))] and all(
        one.version == version and one.finish_reason == "stop" for one in rollouts
    )
