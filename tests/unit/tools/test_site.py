"""The documentation site (mkdocs.yml, tools/site_hooks.py) builds without a warning, and needs no other host."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from site_hooks import rewrite_links

ROOT = Path(__file__).parents[3]
HOST = "https://example.org/coordexp"


def build(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder, *options]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(map(str, command), cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.timeout(180)
def test_the_site_builds_without_a_warning_and_has_every_page(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert len(pages) > 20


@pytest.mark.timeout(180)
def test_no_page_loads_anything_from_another_host(site):
    pages = list(site.rglob("*.html"))
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"?([^\s\">]+)", page.read_text())
        assert loaded, page
        assert [address for address in loaded if ":" in address] == [], page
    assert "@import" not in (site / "site/site.css").read_text()


@pytest.mark.timeout(180)
def test_a_page_outside_the_nav_and_a_broken_link_end_the_build(tmp_path):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    (docs / "lost.md").write_text("# Lost\n\n[no such section](install.md#nowhere), [no such page](nothing.md)\n")
    (docs / "glossary.md").write_text("# Glossary\n\n[no such file](../configs/nothing.yaml)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: {docs}\nhooks: [{ROOT}/tools/site_hooks.py]\n")
    result = build(tmp_path / "site", "--config-file", config)
    assert result.returncode == 1
    for problem in (
        r"not included in the \"nav\" configuration:\s*- lost.md",
        r"lost.md' contains a link 'install.md#nowhere'",
        r"lost.md' contains a link 'nothing.md'",
        r"glossary.md has a link to ../configs/nothing.yaml, which does not exist",
    ):
        assert re.search(problem, result.stderr), result.stderr


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


def test_links_after_a_code_block_are_rewritten():
    text = "```text\ncoord     ```json\n          ```\n```\n[a](../LICENSE)"
    assert rewrite(text).endswith(f"[a]({HOST}/blob/main/LICENSE)")


def test_an_image_outside_docs_is_a_warning(caplog):
    rewrite("![curve](../examples/scenes-cpu/curve.svg)")
    assert "move it to docs/images" in caplog.text


def test_the_start_page_says_what_the_readme_says():
    readme, start = (Path(ROOT, name).read_text() for name in ("README.md", "docs/index.md"))
    _, slogan, limits, _, lead = start.split("\n\n")[:5]
    assert f"{slogan}\n\n{limits}" in readme and lead in readme
