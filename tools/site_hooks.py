"""Hooks of the documentation site (mkdocs.yml).

A link from a page to a file outside docs/, such as ../configs/base.yaml, works on GitHub as it is. On the site it
leads to that file in the repository."""

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BRANCH = "main"
log = logging.getLogger("mkdocs.hooks.site")  # a warning ends a strict build

_FENCE = re.compile(r"^( *)(```+|~~~+)")
_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page that leave docs/."""
    return rewrite_links(markdown, Path(page.file.src_uri), config.repo_url)


def on_post_page(output: str, **_: Any) -> str:
    """Keep the theme's script from asking the repository's host for its number of stars."""
    return output.replace(' data-md-component="source"', "")


def rewrite_links(markdown: str, page: Path, repository: str) -> str:
    """Return the text of a page with absolute addresses for files outside docs/. Code blocks stay as they are."""
    lines: list[str] = []
    fence: re.Match[str] | None = None
    for line in markdown.split("\n"):
        mark = _FENCE.match(line)
        if fence is None and mark:
            fence = mark
        elif fence and mark and mark[2].startswith(fence[2]) and len(mark[1]) < len(fence[1]) + 4:
            fence = None
        elif fence is None:
            line = _LINK.sub(lambda link: _rewrite_link(link, page, repository), line)
        lines.append(line)
    return "\n".join(lines)


def _rewrite_link(link: re.Match[str], page: Path, repository: str) -> str:
    image, text, target, rest = link.groups()
    docs = ROOT / "docs"
    path = (docs / page.parent / target).resolve()
    if ":" in target or path.is_relative_to(docs):
        return link[0]
    if image:
        log.warning("%s shows %s, which the site does not contain: move it to docs/images", page, target)
    elif not path.is_relative_to(ROOT) or not path.exists():
        log.warning("%s has a link to %s, which does not exist", page, target)
    kind = "tree" if path.is_dir() else "blob"
    return f"{image}{text}{repository}/{kind}/{BRANCH}/{path.relative_to(ROOT)}{rest}"
