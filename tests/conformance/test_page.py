import re

import pytest

from tests.conformance import page


def test_the_page_is_what_the_tests_claim() -> None:
    assert page.PAGE.read_text() == page.render(), "stale: run python tests/conformance/page.py"


def test_every_claimed_id_is_a_clause_or_a_scenario() -> None:
    unknown = set(page.claims()) - set(page.parts())
    assert not unknown, f"in neither clauses.yaml nor scenarios.yaml, or a whole requirement: {sorted(unknown)}"


def test_every_claim_says_what_it_ran_on() -> None:
    wrong = [
        f"{claim.test}: {identity} on={claim.kind!r}"
        for identity, claims in page.claims().items()
        for claim in claims
        if claim.kind not in page.KINDS
    ]
    assert not wrong, f"on= must be one of {', '.join(page.KINDS)}: {wrong}"


def test_every_part_is_proven_or_a_deviation() -> None:
    missing = [identity for identity in page.parts() if identity not in page.claims()]
    assert not set(missing) - set(page.deviations()), missing


def test_every_requirement_has_a_part_that_can_be_proven() -> None:
    requirements = {identity for identity in page.titles() if "." not in identity}
    assert requirements == {part.partition(".")[0] for part in page.parts()}


@pytest.mark.parametrize("name", ["scenarios.yaml", "clauses.yaml", "deviations.yaml"])
def test_ids_are_unique_and_in_order(name: str) -> None:
    text = (page.ROOT / "tests/conformance" / name).read_text()
    identities = re.findall(r"^(R[\w.]+):", text, re.MULTILINE)
    assert [page.sort_key(identity) for identity in identities] == sorted(
        {page.sort_key(identity) for identity in identities}
    )


def test_the_specification_has_107_requirements_and_scenarios_and_164_clauses_and_decisions_add_3() -> None:
    clauses = [part for part in page.parts() if ".C" in part]
    of_decisions = [part for part in clauses if re.search(r"\(D\d+\)$", page.titles()[part])]
    assert (len(page.titles()) - len(clauses), len(clauses) - len(of_decisions)) == (107, 164)
    assert of_decisions == ["R02.C5", "R07.C26", "R08.C5"]


def test_decisions_name_every_deviation() -> None:
    decisions = (page.ROOT / "docs/decisions.md").read_text()
    assert set(page.deviations()) <= set(page.parts())
    missing = [
        identity for identity in page.deviations() if not re.search(rf"\b{re.escape(identity)}\b", decisions)
    ]
    assert not missing, f"docs/decisions.md does not name {missing}"
