"""What a check has found, and the decisions that need no engine. Imports no torch."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from coordexp.rollout.backend import Rollout
from coordexp.rollout.canary import TOLERANCE, difference

# Of all tokens, those before the first one that differs. In 16 bits close choices fall either way, and the rest of
# an answer with them: a random model agrees with itself in float32 on two thirds; with other weights, on none.
ENOUGH = {"float32": 0.75, "bfloat16": 0.25, "float16": 0.25}
QUICK_MS = 100.0  # in which health should be told
PATIENT_MS = 2000.0  # after which a learner takes a server for silent
REPORT = "please report it, with this table"


@dataclass(frozen=True)
class Outcome:
    """`problem` goes on with the way out. What could not be checked is no problem by itself."""

    what: str
    found: str
    problem: str = ""
    checked: bool = True

    @property
    def state(self) -> str:
        return "failed" if self.problem else "ok" if self.checked else "not checked"


@dataclass(frozen=True)
class Agreement:
    """Of greedy answers of the learner and of an engine to the same pictures."""

    answers: int
    equal: int
    tokens: int
    common: int  # tokens before the first that differs
    apart: float  # the most that log probabilities of common tokens are
    told: tuple[str, ...]  # differences that rounding does not explain
    dtype: str

    @classmethod
    def of(cls, own: Sequence[Rollout], theirs: Sequence[Rollout], dtype: str) -> "Agreement":
        common, apart = 0, 0.0
        for one, other in zip(own, theirs, strict=True):
            for mine, its, probable, there in zip(one.ids, other.ids, one.logprobs, other.logprobs, strict=False):
                if mine != its:
                    break
                common, apart = common + 1, max(apart, abs(probable - there))
        pairs = list(zip(own, theirs, strict=True))
        told = tuple(text for one, other in pairs if (text := difference(one, other, dtype)))
        equal = sum(one.ids == other.ids for one, other in pairs)
        return cls(len(pairs), equal, sum(len(one.ids) for one in own), common, apart, told, dtype)

    @property
    def same(self) -> bool:
        return not self.told and self.common >= ENOUGH[self.dtype] * self.tokens

    def __str__(self) -> str:
        allowed = TOLERANCE[self.dtype]
        return (
            f"{self.equal} of {self.answers} answers equal, {self.common} of {self.tokens} tokens, "
            f"log probabilities within {self.apart:.2g} (allowed: {allowed:g})"
        )


def parity(what: str, agreement: Agreement, advice: str) -> Outcome:
    if agreement.same:
        return Outcome(what, str(agreement))
    least = f"less than {ENOUGH[agreement.dtype]:.0%} of the tokens are the same"
    told = agreement.told[0] if agreement.told else least
    return Outcome(what, str(agreement), f"the engine does not answer as the learner does: {told}\n  {advice}")


def noticed(what: str, probe: int, agreements: Sequence[Agreement]) -> Outcome:
    """`agreements`, of one picture each, are those of a learner with other weights than the engine's; `probe` is
    the picture that training looks at."""
    found = sum(bool(one.told) for one in agreements)
    shown = f"in {found} of {len(agreements)} answers"
    if agreements[probe].told:
        return Outcome(what, f"{shown}: {agreements[probe].told[0]}")
    problem = "a server with other weights than the learner's answers as if it had them"
    return Outcome(what, shown, f"{problem}\n  {REPORT}: the check of a sync cannot be relied on")


def guarded(what: str, rollouts: Sequence[Rollout], free: Sequence[Rollout], most: int) -> Outcome:
    """`rollouts` of weights that repeat one token, which the guard is to end; `free` are those without it."""
    ended, lengths = sum(one.finish_reason == "repeat" for one in rollouts), [len(one.ids) for one in rollouts]
    shown = f"ended {ended} of {len(rollouts)} looping answers after {max(lengths)} of {most} tokens"
    if ended < len(rollouts):
        reasons = ", ".join(sorted({one.finish_reason for one in rollouts}))
        problem = f"the repeat guard did not end a looping answer ({reasons})"
        return Outcome(what, shown, f"{problem}\n  {REPORT}; without the guard: repeat_terminate.enabled: false")
    if any(one.finish_reason != "length" for one in free):
        return Outcome(what, shown, f"the repeat guard ended an answer that it was switched off for\n  {REPORT}")
    return Outcome(what, shown)


def health(what: str, milliseconds: Sequence[float]) -> Outcome:
    middle, most = statistics.median(milliseconds), max(milliseconds)
    shown = f"median {middle:.1f} ms, most {most:.1f} ms, asked {len(milliseconds)} times"
    if middle <= QUICK_MS and most <= PATIENT_MS:
        return Outcome(what, shown)
    return Outcome(
        what,
        shown,
        f"health takes longer than {QUICK_MS:g} ms, or once {PATIENT_MS:g} ms: a learner may take a busy server "
        "for one that is lost\n  see whether other processes use the machine's cores, and try again",
    )


def rate(seconds: float, size: int) -> str:
    return f"{size / 1e6:.2f} MB in {seconds:.3f} s ({size / 1e6 / max(seconds, 1e-9):.0f} MB/s)"
