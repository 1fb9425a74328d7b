"""One HTML file that needs nothing else: style, script and data are inside it. Headers and tables are the same on
all pages.

The page's own content policy allows no script but its own and no loading. Data goes in as JSON without any `<`, so
that no value can end the element it stands in, and the script writes it as text.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from coordexp.files import write_whole


def render_document(
    title: str,
    body: str,
    *,
    scripts: Sequence[str] = (),
    styles: Sequence[str] = ("page.css",),
    data: Mapping[str, Any] | None = None,
    live: bool = False,
    linked_images: bool = False,
) -> str:
    """Return the HTML of a page.

    `body` is trusted and inserted unchanged. `scripts` and `styles` are names of assets. Each value of `data`
    becomes a JSON element with its key as the id. A `live` page may send requests to the server that it came
    from. A page with `linked_images` may show image files of the same disk or server."""
    sources = [read_asset(name) for name in scripts]
    digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    images = "data: file: 'self'" if linked_images else "data:"
    policy = f"default-src 'none'; img-src {images}; style-src 'unsafe-inline'; script-src {allowed}"
    policy += "; connect-src 'self'" if live else ""
    elements = "".join(
        f'<script type="application/json" id="{escape(name)}">{_to_script_json(value)}</script>'
        for name, value in (data or {}).items()
    )
    style = "".join(f"<style>{read_asset(name)}</style>" for name in styles)
    script = "".join(f"<script>{source}</script>" for source in sources)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape_text(title)}</title>{style}</head><body>\n{body}\n{elements}{script}</body></html>\n"
    )


def render_header(kind: str, title: str, scope: str, controls: str = "") -> str:
    """Return the bar at the top of a page: what kind of page this is, its title, and what it covers. `controls` is
    HTML."""
    return (
        f'<header id="bar"><div id="title"><p class="kicker">coordexp {kind}</p><h1>{escape_text(title)}</h1>'
        f'<p id="scope">{escape_text(scope)}</p></div>{controls}</header>'
    )


def render_select(id: str, label: str, options: Iterable[tuple[str, str]], attributes: str = "") -> str:
    """Return a labelled list to choose from. `options` are pairs of a value and its words."""
    items = "".join(
        f'<option value="{escape_text(value)}">{escape_text(words)}</option>' for value, words in options
    )
    return f'<label>{label} <select id="{id}" {attributes}>{items}</select></label>'


def render_pager(noun: str, keys: tuple[str, str]) -> str:
    """Return buttons that go to the previous and to the next `noun`, as `keys` do. The script says where the
    reader is."""
    back, on = (
        f'<button type="button" id="{id}" aria-label="{way} {noun}" title="{way} {noun} ({key})">{arrow}</button>'
        for id, way, key, arrow in (("back", "Previous", keys[0], "&larr;"), ("on", "Next", keys[1], "&rarr;"))
    )
    return f'<nav class="pager" aria-label="{noun.capitalize()}s">{back}<output id="where"></output>{on}</nav>'


def render_table(heads: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """Return a table. Heads and cells are HTML; the first cell of a row is its head. The `style` "numbers" aligns
    cells to the right, "last-words" all but the last; the script sorts a "sortable" table."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    content = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{style}">{content}</table></div>'


def render_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return headline numbers. A tile has a value, a name and a smaller remark, which may be empty."""
    cells = "".join(
        f'<div class="tile"><b>{escape_text(value)}</b><span>{escape_text(name)}</span>'
        f"{f'<small>{escape_text(remark)}</small>' if remark else ''}</div>"
        for value, name, remark in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def render_list(items: Iterable[str], style: str = "") -> str:
    """Return a list of items, which are HTML, or nothing if there are none."""
    rows = "".join(f"<li>{item}</li>" for item in items)
    return f'<ul class="{style}">{rows}</ul>' if rows else ""


def render_look(notes: Iterable[str]) -> str:
    """Return the notes on what deserves attention, which are text, or nothing if there are none."""
    items = render_list(map(escape_text, notes))
    return f'<div class="look"><h4>What to look at</h4>{items}</div>' if items else ""


def read_asset(name: str) -> str:
    """Return a style, a script or a body from the folder `assets`."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def save_page(path: Path, page: str) -> None:
    """Write the page whole or not at all, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)


def escape_text(text: str) -> str:
    """Escape text from data for HTML. A lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    return escape(text.encode("utf-8", "replace").decode("utf-8"), quote=True)


def _to_script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
