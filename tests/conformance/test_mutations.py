from tests.conformance import mutate, page


def test_every_mutation_still_applies() -> None:
    """The text that a mutation replaces occurs exactly once in its file, and the mutated file is Python."""
    stale = []
    for mutation in mutate.mutations():
        text = (page.ROOT / mutation.file).read_text()
        mutated = text.replace(mutation.old, mutation.new)
        if text.count(mutation.old) != 1 or mutated == text or not mutate.is_python(mutated):
            stale.append(f"{mutation.id}: {mutation.says}")
    assert not stale


def test_every_part_that_needs_no_engine_has_a_mutation() -> None:
    missing = mutate.provable_without_engine() - {mutation.id for mutation in mutate.mutations()}
    assert not missing, sorted(missing, key=page.sort_key)


def test_every_mutation_is_of_a_part_that_a_test_claims_without_an_engine() -> None:
    extra = {mutation.id for mutation in mutate.mutations()} - mutate.provable_without_engine()
    assert not extra, sorted(extra, key=page.sort_key)
