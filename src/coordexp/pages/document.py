"""One HTML file that needs nothing else: style, script and data are inside it.

Pages are Jinja2 templates, which escape every value. The page's own content policy allows no script but its own
and no loading. Data goes in as JSON without any `<`, so that no value can end the element it stands in, and the
script writes it as text.
"""

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from coordexp.files import write_whole


def render_page(
    template: str,
    *,
    title: str,
    scripts: Sequence[str] = (),
    styles: Sequence[str] = ("page.css",),
    data: Mapping[str, Any] | None = None,
    live: bool = False,
    linked_images: bool = False,
    **context: Any,
) -> str:
    """Return the HTML of a page.

    `scripts` and `styles` are names of assets. Each value of `data` becomes a JSON element with its key as the id.
    A `live` page may send requests to the server that it came from. A page with `linked_images` may show image
    files of the same disk or server. A lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    sources = [_read_asset(name) for name in scripts]
    digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources]
    policy = {
        "default-src": "'none'",
        "img-src": "data: file: 'self'" if linked_images else "data:",
        "style-src": "'unsafe-inline'",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'",
        **({"connect-src": "'self'"} if live else {}),
    }
    page = (
        _make_environment()
        .get_template(template)
        .render(
            title=title,
            policy="; ".join(f"{kind} {allowed}" for kind, allowed in policy.items()),
            styles=[_read_asset(name) for name in styles],
            scripts=sources,
            data=data or {},
            **context,
        )
    )
    return page.encode("utf-8", "replace").decode("utf-8")


@functools.cache
def _make_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("coordexp.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _read_asset(name: str) -> Markup:
    """Return a style or a script from the folder `assets`."""
    return Markup(files(__package__).joinpath("assets", name).read_text(encoding="utf-8"))  # noqa: S704, our own


def save_page(path: Path, page: str) -> None:
    """Write the page whole or not at all, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)
