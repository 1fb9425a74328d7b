"""Neighbouring ranks that share one engine: the first of them asks for all."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import distributed as dist

from coordexp.config.rollout import RepeatTerminate
from coordexp.ranks import gather_texts, together
from coordexp.rollout.backend import Decode, Picture, Request, Rollout

Answering = Callable[[Sequence[Request]], list[Rollout]]


@dataclass(frozen=True)
class Group:
    """This rank's, of `size` ranks."""

    rank: int
    size: int

    @classmethod
    def of(cls, size: int) -> "Group":
        return cls(dist.get_rank() if dist.is_initialized() else 0, size)

    @property
    def place(self) -> int:
        return self.rank % self.size

    @property
    def leads(self) -> bool:
        return self.place == 0

    def answered(self, requests: Sequence[Request], answers: Answering) -> list[Rollout]:
        """The answers to this rank's requests. All ranks call it; in each group, the first one's `answers` gets
        those of all."""
        if self.size == 1:
            return answers(requests)
        first = self.rank - self.place
        together(lambda: None)  # all ranks have come here
        told = [gathered(text) for text in gather_texts(written(requests))[first : first + self.size]]
        wanted = [one for part in told for one in part]
        found = together(lambda: answers(wanted) if self.leads else [])
        given = json.loads(gather_texts(json.dumps([asdict(one) for one in found]))[first])
        start = sum(map(len, told[: self.place]))
        return [_rollout(one) for one in given[start : start + len(requests)]]


def written(requests: Sequence[Request]) -> str:
    return json.dumps([_plain(one) for one in requests])


def gathered(text: str) -> list[Request]:
    return [_request(one) for one in json.loads(text)]


def _plain(request: Request) -> dict[str, Any]:
    decode = asdict(request.decode) | {"guard": request.decode.guard.model_dump()}
    return asdict(request) | {"decode": decode}


def _request(plain: dict[str, Any]) -> Request:
    decode = plain["decode"] | {"guard": RepeatTerminate(**plain["decode"]["guard"])}
    return Request(Picture(**plain["picture"]), Decode(**decode), plain["seed"])


def _rollout(plain: dict[str, Any]) -> Rollout:
    lists = {name: tuple(plain[name]) for name in ("prompt_ids", "ids", "logprobs")}
    return Rollout(**(plain | lists))
