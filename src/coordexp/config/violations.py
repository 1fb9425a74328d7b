"""What is wrong with a config, said so that it can be mended: the place, the problem, the way out."""

from dataclasses import dataclass

from coordexp.config.paths import Path, dotted
from coordexp.errors import UserError


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


class ConfigError(UserError, ValueError):
    """All violations of a config at once, so that they can be mended at once. `file` is the config."""

    def __init__(self, violations: list[Violation], file: str = "") -> None:
        super().__init__("\n".join(map(str, violations)))
        self.violations, self.file = tuple(violations), file
