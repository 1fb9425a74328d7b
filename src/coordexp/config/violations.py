"""What is wrong with a config, said so that it can be mended: the place, the problem, the way out."""

from dataclasses import dataclass

Key = str | int


def dotted(path: tuple[Key, ...]) -> str:
    """("servers", 0, "base_url") is `servers[0].base_url`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


@dataclass(frozen=True)
class Violation:
    path: tuple[Key, ...]
    problem: str
    fix: str
    origin: str | None = None

    def __str__(self) -> str:
        place = f"{dotted(self.path)}: " if self.path else ""
        where = f"  ({self.origin})" if self.origin else ""
        return f"{place}{self.problem}{where}\n  {self.fix}"


class ConfigError(ValueError):
    """Every violation found, at once (D4)."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(map(str, violations)))
