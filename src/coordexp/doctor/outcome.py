"""Judge what engines answered: the decisions of the checks that need no engine. This module imports no torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from coordexp.doctor.machine import CheckOutcome
from coordexp.rollout.backend import PROBED_IMAGES, TOLERANCE, Rollout, count_needed, find_differences

# The share of tokens before the first difference that two models must have in common. With 16 bits, a close choice
# may go either way, and the rest of the answer with it: a random model shares two thirds of its tokens with itself
# in float32, and none with a model of other weights.
ENOUGH = {"float32": 0.75, "bfloat16": 0.25, "float16": 0.25}
QUICK_MS = 100.0  # the median time in which a server should report its health
PATIENT_MS = 2000.0  # after this time a learner takes a server for lost
REPORT = "please report it, with this table"


@dataclass(frozen=True)
class Agreement:
    """A comparison of the learner's greedy answers with an engine's answers to the same images."""

    answers: int
    equal: int
    tokens: int
    common: int  # tokens before the first difference
    largest_gap: float  # between the log probabilities of common tokens
    differences: tuple[str, ...]  # those that rounding does not explain
    dtype: str

    @classmethod
    def of(cls, own: Sequence[Rollout], theirs: Sequence[Rollout], dtype: str) -> "Agreement":
        """Compare the learner's `own` answers with those of an engine."""
        pairs = list(zip(own, theirs, strict=True))
        gaps: list[float] = []
        for mine, other in pairs:
            for my_id, other_id, my_logprob, other_logprob in zip(
                mine.ids, other.ids, mine.logprobs, other.logprobs, strict=False
            ):
                if my_id != other_id:
                    break
                gaps.append(abs(my_logprob - other_logprob))
        differences = tuple(find_differences(own, theirs, dtype))
        equal = sum(mine.ids == other.ids for mine, other in pairs)
        tokens = sum(len(mine.ids) for mine in own)
        return cls(len(pairs), equal, tokens, len(gaps), max(gaps, default=0.0), differences, dtype)

    @property
    def is_same(self) -> bool:
        """True if both have the same weights, as far as the answers show."""
        return not self.differences and self.common >= ENOUGH[self.dtype] * self.tokens

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.answers} answers equal, {self.common} of {self.tokens} tokens, "
            f"log probabilities within {self.largest_gap:.2g} (allowed: {TOLERANCE[self.dtype]:g})"
        )


def judge_losses(check: str, losses: Sequence[float], steps: int, seconds: float) -> CheckOutcome:
    """Judge the losses of a run, one per step."""
    measured = f"losses {', '.join(f'{loss:.3f}' for loss in losses)} in {seconds:.0f} s"
    if len(losses) != steps or not all(map(math.isfinite, losses)):
        return CheckOutcome(check, measured, f"{steps} finite losses were expected", REPORT)
    return CheckOutcome(check, measured)


def judge_parity(check: str, agreement: Agreement, fix: str) -> CheckOutcome:
    """Return a failure if the engine does not answer as the learner does."""
    if agreement.is_same:
        return CheckOutcome(check, str(agreement))
    too_few = f"less than {ENOUGH[agreement.dtype]:.0%} of the tokens are the same"
    reason = agreement.differences[0] if agreement.differences else too_few
    return CheckOutcome(check, str(agreement), f"the engine does not answer as the learner does: {reason}", fix)


def judge_detection(check: str, agreements: Sequence[Agreement]) -> CheckOutcome:
    """Return a failure if a learner does not notice that the engine has other weights.

    There is one agreement per image. Training looks at the first images only."""
    noticed = sum(bool(agreement.differences) for agreement in agreements)
    measured = f"in {noticed} of {len(agreements)} answers"
    probes = agreements[:PROBED_IMAGES]
    seen = [agreement.differences[0] for agreement in probes if agreement.differences]
    if len(seen) >= count_needed(len(probes), probes[0].dtype):
        return CheckOutcome(check, f"{measured}: {seen[0]}")
    problem = "a server with other weights than the learner's answers as if it had the same weights"
    return CheckOutcome(check, measured, problem, f"{REPORT}: the check after a weight sync cannot be relied on")


def judge_guard(check: str, rollouts: Sequence[Rollout], free: Sequence[Rollout], most: int) -> CheckOutcome:
    """Return a failure if the repeat guard did not end every one of `rollouts`, or ended one of `free`.

    All are answers of a model that repeats one token. The guard was switched off for those in `free`."""
    ended = sum(rollout.finish_reason == "repeat" for rollout in rollouts)
    longest = max(len(rollout.ids) for rollout in rollouts)
    measured = f"ended {ended} of {len(rollouts)} looping answers after {longest} of {most} tokens"
    if ended < len(rollouts):
        reasons = ", ".join(sorted({rollout.finish_reason for rollout in rollouts}))
        problem = f"the repeat guard did not end a looping answer ({reasons})"
        fix = f"{REPORT}; to run without the guard: repeat_terminate.enabled: false"
        return CheckOutcome(check, measured, problem, fix)
    if any(rollout.finish_reason != "length" for rollout in free):
        problem = "the repeat guard ended an answer that it was switched off for"
        return CheckOutcome(check, measured, problem, REPORT)
    return CheckOutcome(check, measured)


def judge_health(check: str, milliseconds: Sequence[float]) -> CheckOutcome:
    """Return a failure if a busy server took too long to report its health."""
    median, longest = statistics.median(milliseconds), max(milliseconds)
    measured = f"median {median:.1f} ms, longest {longest:.1f} ms, asked {len(milliseconds)} times"
    if median <= QUICK_MS and longest <= PATIENT_MS:
        return CheckOutcome(check, measured)
    return CheckOutcome(
        check,
        measured,
        f"health requests took longer than {QUICK_MS:g} ms in the median, or one took longer than "
        f"{PATIENT_MS:g} ms: a learner may take a busy server for a lost one",
        "check whether other processes use the machine's cores, and try again",
    )


def format_rate(seconds: float, size: int) -> str:
    """Return the size and speed of a transfer as words."""
    return f"{size / 1e6:.2f} MB in {seconds:.3f} s ({size / 1e6 / max(seconds, 1e-9):.0f} MB/s)"
