"""A fake rollout backend: it gives the answers of a script, and records the requests.

It is only for tests of the logic around generation. Whatever depends on how a model answers is tested with real
models.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordexp.answers.formats import CoordTokenAnswers
from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.config.settings import Custom
from coordexp.data import Questions, RecordFile, TrueObject
from coordexp.rollout.backend import FinishReason, Request, Rollout, Weights
from coordexp.train.encode import TrainingSet
from tests.rollouts import PROMPT
from tests.vocabularies import encode


@dataclass(frozen=True)
class Said:
    """An answer: its text, or its ids if no text has them."""

    text: str = ""
    finish_reason: FinishReason = "stop"
    ids: tuple[int, ...] | None = None


@dataclass
class ScriptedBackend:
    """Answers each image with the script's answer for the name of its file. Of several answers, the n-th request
    for an image in a call gets the n-th."""

    script: Mapping[str, Said | Sequence[Said]]
    table: VocabularyTable
    prompt_ids: tuple[int, ...] = PROMPT
    version: int | None = None  # of all answers, instead of the version of the last sync
    requests_per_call: int = 2
    calls: list[list[Request]] = field(default_factory=list)
    synced: list[tuple[Weights, int]] = field(default_factory=list)

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        self.calls.append(list(requests))
        asked: Counter[str] = Counter()
        rollouts = []
        for request in requests:
            name = Path(request.image.path).name
            said = self.script[name]
            rollouts.append(self._answer(said if isinstance(said, Said) else said[asked[name]]))
            asked[name] += 1
        return rollouts

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sync(self, weights: Weights, version: int) -> None:
        self.synced.append((weights, version))

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass

    def _answer(self, said: Said) -> Rollout:
        ids = tuple(encode(said.text, self.table)) if said.ids is None else said.ids
        version = self.synced[-1][1] if self.version is None else self.version
        return Rollout.of(self.table, self.prompt_ids, ids, (-0.5,) * len(ids), said.finish_reason, version)


QUESTIONS = Questions.of(Custom())


class OnePrompt:
    """Stands for the prompt builder: the same few tokens for every image."""

    def ids(self, width: int, height: int, image: str = "", question: str | None = None) -> list[int]:
        return list(PROMPT)


def write_training_set(
    folder: Path, truth: Mapping[str, Sequence[TrueObject]], table: VocabularyTable, **settings: Any
) -> TrainingSet:
    """Write a file with a record per image, in their order, and return the training set of it."""
    file = folder / "train.jsonl"
    text = "".join(_record(image, objects) + "\n" for image, objects in truth.items())
    if not file.exists() or file.read_text() != text:  # a set that is in use must not change
        file.write_text(text)
    cfg = RolloutMatching(**settings)
    return TrainingSet(RecordFile(file), OnePrompt(), CoordTokenAnswers(table, settings=cfg), cfg)


def _record(image: str, objects: Sequence[TrueObject]) -> str:
    entries = [{"desc": true.desc, true.geometry.kind: list(true.geometry.bins)} for true in objects]
    return json.dumps({"image": image, "width": 64, "height": 48, "space": "bin", "objects": entries})
