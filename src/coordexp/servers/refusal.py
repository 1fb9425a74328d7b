"""Refusals: what a rollout server answers when it does not do what it was asked."""

from typing import Any

from coordexp.errors import UserError


class Refusal(UserError):
    """An HTTP status, a code for programs, and the problem and the fix for people."""

    def __init__(self, status: int, code: str, problem: str, fix: str = "") -> None:
        super().__init__(problem, fix)
        self.status, self.code = status, code

    def to_json(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.problem, "fix": self.fix}}


def bad_request(problem: str, fix: str = "") -> Refusal:
    return Refusal(400, "bad_request", problem, fix)
