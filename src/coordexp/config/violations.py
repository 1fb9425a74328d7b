"""What is wrong with a config, said so that it can be mended: the place, the problem, the way out."""

from dataclasses import dataclass

from coordexp.config.paths import Path, dotted


@dataclass(frozen=True)
class Violation:
    path: Path
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
