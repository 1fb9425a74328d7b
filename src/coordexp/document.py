"""One HTML file that needs nothing else: style, script and data are inside of it.

By its own content policy the page runs no script but its own and loads nothing. Values go into it as JSON in which
no `<` is left, so that nothing in them can end the element they stand in; the script writes them as text. Imports
nothing heavy, so that every package can make a page.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from coordexp.files import write_whole


def document(
    title: str,
    body: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: Mapping[str, Any] | None = None,
    live: bool = False,
) -> str:
    """`body`, `styles` and `scripts` are ours and go in as they are. Each value of `data` is the JSON text of the
    element with its name as id. A `live` page may ask the server that it came from."""
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    policy += "; connect-src 'self'" if live else ""
    elements = "".join(
        f'<script type="application/json" id="{escape(name)}">{as_json(value)}</script>'
        for name, value in (data or {}).items()
    )
    style = "".join(f"<style>{text}</style>" for text in styles)
    script = "".join(f"<script>{text}</script>" for text in scripts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{written(title)}</title>{style}</head><body>\n{body}\n{elements}{script}</body></html>\n"
    )


def part(package: str, name: str) -> str:
    """A style, a script or a body that lies beside the modules of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def save(path: Path, page: str) -> None:
    """Whole or not at all: a page that is open somewhere is not written over half-way. Half of a character, which
    UTF-8 cannot say, is written as its number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode("utf-8", "xmlcharrefreplace"))


def as_json(value: Any) -> str:
    """For the inside of a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def written(text: str) -> str:
    """Text from data, for HTML. Half of a character, which UTF-8 cannot say, becomes a question mark."""
    return escape(text.encode("utf-8", "replace").decode("utf-8"), quote=True)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
