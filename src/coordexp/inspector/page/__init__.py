"""The rollout inspector's page: an index, its samples and their pictures in, one HTML file out.

The body is static and all that is shown of the data is written by the scripts, as text. Samples are JSON elements
that are parsed when they are looked at, so that a page of hundreds of them opens at once.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from coordexp.document import document, part

STYLES = ("page.css", "picture.css", "strip.css", "panels.css")
SCRIPTS = (
    "elements.js",
    "data.js",
    "distribution.js",
    "picture.js",
    "strip.js",
    "chart.js",
    "detail.js",
    "objects.js",
    "matrix.js",
    "steps.js",
    "head.js",
    "live.js",
    "page.js",
)


def page(
    index: dict[str, Any], samples: Iterable[dict[str, Any]], pictures: Mapping[str, str], *, live: bool = False
) -> str:
    """`samples` are in the order of the index; `pictures` are data addresses by the ids that the index uses."""
    data: dict[str, Any] = {"index": {**index, "live": live}}
    data.update((f"sample-{k}", sample) for k, sample in enumerate(samples))
    data.update(pictures)
    return document(
        f"Rollouts of {index['run']}",
        part(__name__, "page.html"),
        styles=[part(__name__, name) for name in STYLES],
        scripts=[part(__name__, name) for name in SCRIPTS],
        data=data,
        live=live,
    )
