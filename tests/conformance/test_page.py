import re

from tests.conformance import page


def test_the_page_is_what_the_tests_claim() -> None:
    assert page.PAGE.read_text() == page.render(), "stale: run python tests/conformance/page.py"


def test_every_claimed_id_is_known() -> None:
    unknown = set(page.claims()) - set(page.titles())
    assert not unknown, f"not in tests/conformance/scenarios.yaml: {sorted(unknown)}"


def test_ids_are_unique_and_in_order() -> None:
    identities = re.findall(
        r"^(R\S+):", (page.ROOT / "tests/conformance/scenarios.yaml").read_text(), re.MULTILINE
    )
    numbers = [tuple(map(int, re.findall(r"\d+", identity))) for identity in identities]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 107
