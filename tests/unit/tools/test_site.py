"""The documentation site (mkdocs.yml, tools/site_hooks.py) builds without a warning, and needs no other host."""

from pathlib import Path

import pytest
from site_hooks import rewrite_links

ROOT = Path(__file__).parents[3]
HOST = "https://example.org/coordexp"


def rewrite(text: str, page: str = "install.md") -> str:
    return rewrite_links(text, Path(page), HOST)


def test_links_to_files_outside_docs_lead_to_the_repository():
    assert rewrite("[a](../configs/base.yaml)") == f"[a]({HOST}/blob/main/configs/base.yaml)"
    assert rewrite("[`a`](../configs/), b") == f"[`a`]({HOST}/tree/main/configs), b"
    assert rewrite("[how](../CONTRIBUTING.md#set-up)") == f"[how]({HOST}/blob/main/CONTRIBUTING.md#set-up)"
    assert rewrite("[a](../../README.md)", "reference/cli.md") == f"[a]({HOST}/blob/main/README.md)"


@pytest.mark.parametrize(
    "text",
    [
        "[a](data.md#records) and ![b](images/loop.svg)",
        "[a](https://example.org/../x)",
        "[a](#below)",
        "```text\n[a](../configs/base.yaml)\n```",
        "```text\nnested   ```json\n         ```\n[a](../configs/base.yaml)\n```",
        "- item\n\n    ```bash\n    [a](../configs/base.yaml)\n    ```",
    ],
)
def test_other_links_and_code_stay_as_they_are(text):
    assert rewrite(text) == text


def test_an_image_outside_docs_is_a_warning(caplog):
    rewrite("![curve](../examples/scenes-cpu/curve.svg)")
    assert "move it to docs/images" in caplog.text


def test_the_start_page_says_what_the_readme_says():
    readme, start = (Path(ROOT, name).read_text() for name in ("README.md", "docs/index.md"))
    _, slogan, limits, _, lead = start.split("\n\n")[:5]
    assert f"{slogan}\n\n{limits}" in readme and lead in readme
