"""What a server says when it does not do what it was asked: a status, a code for programs, words for people."""

from typing import Any


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.fix = status, code, message, fix

    def told(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.message, "fix": self.fix}}


def bad_request(message: str, fix: str = "") -> Refusal:
    return Refusal(400, "bad_request", message, fix)
