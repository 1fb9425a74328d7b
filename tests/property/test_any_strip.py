"""The inspector assigns every token to the object that it belongs to, for random answers, valid and broken."""

import random

from hypothesis import given
from hypothesis import strategies as st

from coordexp.config.rollout import RolloutMatching
from coordexp.correction import Role, correct
from coordexp.dumps import describe_correction
from coordexp.pages.rollout_sample import CUT, Strip
from tests.examples import examples
from tests.rollouts import PROMPT, random_rollout, random_truth
from tests.vocabularies import table

VOCABULARIES = ["qwen", "small", *(f"random-{k}" for k in range(30))]


@examples(1500)
@given(st.sampled_from(VOCABULARIES), st.integers(0, 2**60), st.sampled_from(["desc_first", "geometry_first"]))
def test_every_token_belongs_to_the_object_that_it_writes(vocabulary, seed, order):
    chooser, vocabulary_table = random.Random(seed), table(vocabulary)
    truth = random_truth(chooser)
    ids = random_rollout(chooser, truth, vocabulary_table)
    correction = correct(list(PROMPT), ids, truth, table=vocabulary_table, order=order, settings=RolloutMatching())
    result = describe_correction(correction)
    strip = Strip({"result": result, "rollout": {"ids": list(ids)}}, rebuilt=None)
    tokens = strip.tokens(vocabulary_table, desc_is_masked=False)
    owners = tokens["owner"]
    for k, prediction in enumerate(result["objects"]):
        assert all(owners[at] == k for at in prediction["at"])
    for j in result["missed"]:
        own = [
            id
            for id, owner in zip(tokens["ids"], owners, strict=True)
            if owner == -2 - j and vocabulary_table.is_coord(id)
        ]
        assert [id - vocabulary_table.first_coord for id in own] == list(truth[j].geometry.bins)
    valid = [k for k, prediction in enumerate(result["objects"]) if prediction["reason"] is None]
    matched = {valid[i] for i, _ in result["pairs"]}
    for at, (role, owner) in enumerate(zip(tokens["roles"], owners, strict=True)):
        assert (role == CUT) == (strip.prefix <= at < strip.prefix + strip.cut)
        assert role != Role.matched_coord or owner in matched
        assert role not in (Role.tail_coord, Role.tail_desc) or owner <= -2
        assert role not in (Role.masked_prefix, CUT) or owner >= -1
        assert (role == Role.end_of_turn) == (at == len(owners) - 1)
