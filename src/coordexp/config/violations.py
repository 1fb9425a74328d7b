"""Problems of a config. Each names the setting, says what is wrong and what to do about it."""

from dataclasses import dataclass

from coordexp.config.paths import KeyPath, format_path
from coordexp.errors import UserError


@dataclass(frozen=True)
class Violation:
    """One problem of a config. `origin` is the file and line where the value was written, if that is known."""

    path: KeyPath
    problem: str
    fix: str
    origin: str | None = None

    def __str__(self) -> str:
        setting = f"{format_path(self.path)}: " if self.path else ""
        where = f"  ({self.origin})" if self.origin else ""
        return f"{setting}{self.problem}{where}\n  {self.fix}"


class ConfigError(UserError):
    """All violations of a config at once, so that the user can fix them in one go. `file` is the config."""

    def __init__(self, violations: list[Violation], file: str = "") -> None:
        super().__init__("\n".join(map(str, violations)))
        self.violations, self.file = tuple(violations), file
