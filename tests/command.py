"""The `coordexp` command, run in the process of a test."""

from collections.abc import Mapping

from click.testing import Result
from typer.testing import CliRunner

from coordexp.cli import app


def run(*words: object, code: int | None = 0, env: Mapping[str, str] | None = None) -> Result:
    """Run `coordexp WORDS`, which must end with this code (None: any), and by no other exception."""
    result = CliRunner().invoke(app, [str(word) for word in words], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code in (result.exit_code, None), result.output
    return result
