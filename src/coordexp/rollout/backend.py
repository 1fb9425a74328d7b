"""The data that every rollout backend takes and returns, the interface of backends, and the checks that an engine
agrees with the learner: on prompts, on the version of the weights, and on answers. Imports no torch.

Weights that were not applied, or only in part, raise no error. They lead to other tokens or other probabilities,
so the answers of both to the same image are compared.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import DecodeMode, RepeatTerminate, RolloutMatching
from coordexp.data import AnyRecord, RecordFile
from coordexp.errors import DataError, EngineError

if TYPE_CHECKING:
    from torch import Tensor

# The model wrote its end of turn, the token limit was reached, or the repeat guard ended the answer.
FinishReason = Literal["stop", "length", "repeat"]
PROBE = 16  # tokens of the answers that are compared
PROBED_IMAGES = 4
SURE_FROM = 3  # so many answers do not differ by accident
# How far the log probabilities of two implementations of the same model may differ: of every token in float32, in
# the median with 16 bits.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


@dataclass(frozen=True)
class ImageRef:
    """The address of an image, and the size that the image must have. `pixels` is the image itself, upright and
    in RGB, if it was not read from an address; `path` is then only its name."""

    path: str
    width: int
    height: int
    pixels: Any = field(default=None, compare=False, repr=False)  # an image of PIL, or None

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @classmethod
    def of(cls, records: RecordFile, record: AnyRecord) -> "ImageRef":
        return cls(records.image_address(record), record.width, record.height)


@dataclass(frozen=True)
class Decode:
    """How tokens are chosen, and when an answer ends.

    `stop_bias` is subtracted from the logits of the tokens that close the answer (`hugging_face.ClosingTokens`).
    Above 0, answers become longer; below 0, shorter. Only `predict` sets it; rollout servers refuse it."""

    max_new_tokens: int
    mode: DecodeMode = "greedy"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    num_beams: int = 1
    guard: RepeatTerminate = field(default_factory=RepeatTerminate)
    stop_bias: float = 0.0

    @classmethod
    def greedy(cls, max_new_tokens: int) -> "Decode":
        return cls(max_new_tokens)

    @classmethod
    def of(cls, settings: RolloutMatching) -> "Decode":
        """Return the decoding of training rollouts."""
        sampling = settings.decoding
        return cls(
            settings.max_new_tokens,
            settings.effective_decode_mode,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            settings.num_beams or 1,
            settings.repeat_terminate,
        )

    @classmethod
    def for_evaluation(cls, settings: RolloutMatching) -> "Decode":
        """Return greedy decoding with the token limit and the repeat guard of the settings."""
        return cls(settings.max_new_tokens, guard=settings.repeat_terminate)


@dataclass(frozen=True)
class Request:
    """One image to answer. When sampling, `seed` alone decides which tokens are drawn; the other requests of the
    batch have no influence. `question` is the text beside the image. Without one, it is that of the run."""

    image: ImageRef
    decode: Decode
    seed: int = 1
    question: str | None = None


@dataclass(frozen=True)
class TextRequest:
    """A question without an image. Only the learner's own model answers it (`HuggingFaceBackend`)."""

    question: str
    decode: Decode
    seed: int = 1
    image: None = None


def common_decode(requests: Sequence[Request | TextRequest]) -> Decode:
    """Return the decoding of all requests of a call. Raise ValueError if they differ in it."""
    decodes = {request.decode for request in requests}
    if len(decodes) != 1:
        raise ValueError(f"{len(decodes)} ways of decoding in one call; make one call for each")
    return decodes.pop()


# Seeds are distinct within a step that has at most 512 micro-steps, 1,024 ranks, and 4,095 requests of one rank in
# one micro-step. The product of these limits is below SEED_PRIME.
MOST_MICRO_STEPS, MOST_RANKS, MOST_REQUESTS = 512, 1024, 4095
SEED_PRIME = 2**31 - 1
SEED_FACTOR = 0x2545F491  # any number that is not a multiple of the prime


def request_seed(run: int, step: int, micro: int, rank: int, request: int) -> int:
    """Return the seed of a request: 31 bits, never 0, the same in a repeated run.

    The seed of the run and the step are hashed to a start. Micro-step, rank and request are numbered together, and
    that number times a constant is added to the start, modulo a prime. Two requests of one step therefore never
    share a seed."""
    limits = (("micro-step", micro, MOST_MICRO_STEPS), ("rank", rank, MOST_RANKS))
    for name, value, limit in limits:
        if not 0 <= value < limit:
            raise ValueError(f"{name} {value}: seeds are distinct for at most {limit} {name}s")
    if not 0 <= request < MOST_REQUESTS:
        raise ValueError(
            f"request {request}: seeds are distinct for at most {MOST_REQUESTS} requests of a rank per micro-step"
        )
    digest = hashlib.blake2b(f"{run} {step}".encode(), digest_size=8).digest()
    number = (micro * MOST_RANKS + rank) * MOST_REQUESTS + request
    return 1 + (int.from_bytes(digest, "big") + number * SEED_FACTOR) % SEED_PRIME


@dataclass(frozen=True)
class Rollout:
    """One answer, as token ids without the stop token, and as their text.

    `logprobs` are those of the model itself, before stop bias, temperature, top-k and top-p; beam search has none.
    `version` is the version of the weights that made the answer. Backends build rollouts with `of`."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version: int = 0

    @classmethod
    def of(
        cls,
        table: VocabularyTable,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: FinishReason,
        version: int = 0,
    ) -> "Rollout":
        """Return the rollout of `ids`, with their text. `logprobs` may be longer than `ids`; the rest is
        dropped."""
        text = table.text_of(ids)
        return cls(tuple(prompt_ids), tuple(ids), text, tuple(logprobs[: len(ids)]), finish_reason, version)


# A function that returns a new pass over all weights: whole tensors under checkpoint names, each gathered when the
# caller reaches it.
Weights = Callable[[], Iterator[tuple[str, "Tensor"]]]


AdapterConfig = dict[str, Any]  # in the format of peft


AdapterWeights = tuple[AdapterConfig, Iterator[tuple[str, "Tensor"]]]


class RolloutBackend(Protocol):
    """Generates rollouts with the current weights. All ranks make the same calls in the same order.

    Only the code that builds a backend knows which kind it is."""

    @property
    def requests_per_call(self) -> int:
        """How many requests to pass to `generate`, per rank, if there are many and the caller wants to do
        something between calls. It is enough to keep the devices busy, the same on all ranks, and known after the
        first sync."""

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """Return one rollout per request, in the order of the requests, which all decode in the same way.

        Each rollout answers, token by token, the prompt that training uses, with the weights of the last sync."""

    def session(self) -> AbstractContextManager[None]:
        """Return a context for syncs and generation without training in between. A backend that needs the
        learner's memory holds it until the end of the session."""
        return nullcontext()

    def sync(self, weights: Weights, version: int) -> None:
        """Send the weights to the backend. Later rollouts come from them and carry `version`, which no other
        weights may have."""

    def describe(self) -> dict[str, Any]:
        """Return the facts about the backend that the run's manifest records."""
        return {}

    def close(self) -> None:
        """End all processes and connections of the backend."""
        return


class StartedRollouts(Protocol):
    """Rollouts of one rank that are being made."""

    @property
    def rollouts(self) -> "list[Rollout | None]":
        """One per request; None for those that are not there."""

    @property
    def seconds(self) -> float:
        """From asking to the newest answer."""

    def wait(self) -> None:
        """Wait until no answer is expected any more: all are there, or nothing can make the others."""


@runtime_checkable
class RolloutStarter(Protocol):
    """A backend that makes rollouts while the learner trains. Its calls are those of `RolloutBackend`, and
    these."""

    def start(self, steps: Sequence[Sequence[Request]]) -> Sequence[StartedRollouts]:
        """Begin to make the rollouts of one or several steps, and return at once. They are finished in this order.
        No rollout may be in the making when weights are synced: the caller waits for all of them before."""

    def finish(self, started: Any, version: int) -> list[Rollout]:
        """Wait for rollouts, on all ranks. Those that could not be made from the weights of the last sync are made
        from the learner's weights of now, which are `version`."""


def check_length(request: Request, prompt_length: int, max_length: int) -> None:
    """Raise DataError if the prompt of a request leaves the engine no room for an answer."""
    if prompt_length >= max_length:
        raise DataError(
            f"{request.image.path}: the engine takes at most {max_length} tokens, but the prompt alone has "
            f"{prompt_length}",
            "raise global_max_length (and rollout_matching.vllm.max_model_len, if it is set; max_length of a "
            "Detector, --max-model-len of `vllm serve`), or let images be scaled down with model.max_pixels",
        )


def check_prompt(image: str, engine_ids: Sequence[int], learner_ids: Sequence[int]) -> None:
    """Raise DataError unless the engine read the prompt that training uses, token by token."""
    if tuple(engine_ids) == tuple(learner_ids):
        return
    pairs = zip(engine_ids, learner_ids, strict=False)
    shorter = min(len(engine_ids), len(learner_ids))
    start = next((k for k, (engine_id, learner_id) in enumerate(pairs) if engine_id != learner_id), shorter)
    actual, expected = (list(ids[start : start + 4]) or "the end" for ids in (engine_ids, learner_ids))
    raise DataError(
        f"{image}: the engine's prompt ({len(engine_ids)} tokens) is not the one that is trained on "
        f"({len(learner_ids)}); they differ from token {start} on: {actual} where {expected} should be",
        "the record's width and height must be those of the image (run `coordexp data doctor`), and the engine "
        "must use the same processor, with the same model.max_pixels and model.min_pixels",
    )


def check_version(rollout: Rollout, step: int, max_staleness: int = 0) -> None:
    """Raise EngineError unless the weights of this step made the rollout, or weights that are at most
    `max_staleness` updates older."""
    if not 0 <= step - rollout.version <= max_staleness:
        allowed = f"{step}" if not max_staleness else f"{step - max_staleness} to {step}"
        raise EngineError(
            f"a rollout was made by weights of version {rollout.version}, but should be of version {allowed}",
            "this should not happen; please report it",
        )


class Canary:
    """Shows at the first sync, and every `every` versions, that an engine has the learner's weights: both answer
    the images `probes`, the learner with its own model, `reference`. `dtype` is the least exact of both."""

    def __init__(
        self,
        reference: RolloutBackend,
        probes: Sequence[ImageRef],
        every: int,
        dtype: str,
        notify: Callable[[str], None],
    ) -> None:
        self.reference, self.every, self.dtype, self.notify = reference, every, dtype, notify
        self.requests = [Request(image, Decode.greedy(PROBE)) for image in probes]
        self._passed: int | None = None  # the version of the last comparison

    def is_due(self, version: int) -> bool:
        return self._passed is None or version - self._passed >= self.every

    def expected_answers(self) -> list[Rollout]:
        """Return the learner's answers. All ranks call this."""
        return self.reference.generate(self.requests)

    def compare(self, engine: str, own: Sequence[Rollout], theirs: Sequence[Rollout], otherwise: str) -> None:
        """Raise EngineError unless an engine answers as the learner does, apart from rounding. `otherwise` is what
        the user can do without the engine."""
        fix = f"this should not happen; please report it, {otherwise}"
        if warning := compare_answers(engine, own, theirs, self.dtype, fix):
            self.notify(warning)

    def pass_at(self, version: int) -> bool:
        """Note that the answers agree at this version. Return True if it is the first one."""
        is_first, self._passed = self._passed is None, version
        return is_first


def compare_answers(
    engine: str, own: Sequence[Rollout], theirs: Sequence[Rollout], dtype: str, fix: str
) -> str | None:
    """Compare an engine's answers with the learner's `own`. Raise EngineError, with this fix, if they must be
    those of other weights. Return a warning if only a few differ: with 16 bits, rounding may be the reason."""
    differences = find_differences(own, theirs, dtype)
    if not differences:
        return None
    summary = f"{len(differences)} of {len(own)} answers with version {theirs[0].version} differ: {differences[0]}"
    # So many answers must differ to prove that the weights do.
    needed = 1 if dtype == "float32" else min(SURE_FROM, len(own) // 2 + 1)
    if len(differences) >= needed:
        raise EngineError(f"{engine} does not have the learner's weights: {summary}", fix)
    return f"warning: {engine}: {summary}; this may be rounding"


def find_differences(own: Sequence[Rollout], theirs: Sequence[Rollout], dtype: str) -> list[str]:
    """Return a description for each pair of answers that two models must have made."""
    pairs = zip(own, theirs, strict=True)
    return [text for mine, other in pairs if (text := difference(mine, other, dtype))]


def difference(learner: Rollout, engine: Rollout, dtype: str) -> str | None:
    """Describe how two greedy answers to the same prompt differ, or return None if one model can have made both.

    Where the two best tokens are about equally likely, either may be chosen, and nothing is compared after that
    place. Two different tokens that are both too likely for that come from two models."""
    tolerance, is_exact = TOLERANCE[dtype], dtype == "float32"
    gaps: list[float] = []
    tokens = zip(learner.ids, engine.ids, learner.logprobs, engine.logprobs, strict=False)
    for place, (learner_id, engine_id, learner_logprob, engine_logprob) in enumerate(tokens):
        gap = abs(learner_logprob - engine_logprob)
        if is_exact and not gap <= tolerance:  # it may be NaN
            return (
                f"token {place} of the learner is {learner_id} with log probability {learner_logprob:.4f}, and "
                f"that of the engine is {engine_id} with {engine_logprob:.4f}"
            )
        if learner_id != engine_id:
            if math.exp(learner_logprob) + math.exp(engine_logprob - tolerance) <= 1:
                break
            return (
                f"token {place} of the learner is {learner_id} with probability {math.exp(learner_logprob):.3f}, "
                f"and that of the engine is {engine_id} with {math.exp(engine_logprob):.3f}: one model cannot be "
                "so sure of both"
            )
        gaps.append(gap)
    else:
        # With 16 bits, the end of the answer may have been a choice between equals too.
        if len(learner.ids) != len(engine.ids) and is_exact:
            return f"the learner wrote {len(learner.ids)} tokens and the engine {len(engine.ids)}"
    if gaps and not (median := statistics.median(gaps)) <= tolerance:
        return f"the log probabilities of {len(gaps)} tokens differ by {median:.2f} in the median"
    return None
