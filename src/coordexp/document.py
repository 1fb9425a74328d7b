"""One HTML file that needs nothing else: style, script and data are inside it.

The page's own content policy allows no script but its own and no loading. Data goes in as JSON without any `<`, so
that no value can end the element it stands in, and the script writes it as text. This module imports nothing
heavy, so every package can make a page.
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


def render_document(
    title: str,
    body: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: Mapping[str, Any] | None = None,
    live: bool = False,
) -> str:
    """Return the HTML of a page.

    `body`, `styles` and `scripts` are trusted and inserted unchanged. Each value of `data` becomes a JSON element
    with its key as the id. A `live` page may send requests to the server that it came from."""
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    policy += "; connect-src 'self'" if live else ""
    elements = "".join(
        f'<script type="application/json" id="{escape(name)}">{_to_script_json(value)}</script>'
        for name, value in (data or {}).items()
    )
    style = "".join(f"<style>{text}</style>" for text in styles)
    script = "".join(f"<script>{text}</script>" for text in scripts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape_text(title)}</title>{style}</head><body>\n{body}\n{elements}{script}</body></html>\n"
    )


def read_resource(package: str, name: str) -> str:
    """Return a style, a script or a body that is stored beside the modules of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def save_page(path: Path, page: str) -> None:
    """Write the page whole or not at all, so that a reader never sees half of it. A lone surrogate, which UTF-8
    cannot encode, becomes a character reference."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode("utf-8", "xmlcharrefreplace"))


def escape_text(text: str) -> str:
    """Escape text from data for HTML. A lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    return escape(text.encode("utf-8", "replace").decode("utf-8"), quote=True)


def _to_script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
