"""The tensors of a row, made from segments without a model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from coordexp.answers.segment import Role, Segment, TokenKind
from coordexp.objective.carry import Example, ExampleId
from coordexp.objective.collate import Collator, kind_counts

IMAGE = 9
ROLES = {"A": frozenset({Role.tail_structure}), "B": frozenset({Role.tail_structure, Role.tail_coord})}


def fake_rope_index(ids, mm_token_type_ids, image_grid_thw):
    return torch.arange(ids.shape[1]).expand(3, 1, -1) + 100, None


def collator() -> Collator:
    return Collator(fake_rope_index, IMAGE, 2, lambda *_: (torch.ones(4, 3), torch.tensor([[1, 2, 2]])), ROLES)


def example(channel: str = "B", **changes) -> Example:
    """Return an example with a prompt of three tokens, one of them an image token, then structure, a
    coordinate, structure."""
    streams = {
        "ids": np.array([1, IMAGE, 2, 20, 500, 21]),
        "roles": np.array([0, 0, 0, Role.tail_structure, Role.tail_coord, Role.tail_structure], dtype=np.int8),
        "kinds": np.array([0, 0, 0, TokenKind.structure, TokenKind.coord, TokenKind.structure], dtype=np.int8),
        "sides": np.zeros(6, dtype=np.int8),
        "coord_targets": np.array([np.nan] * 4 + [7.5, np.nan], dtype=np.float32),
        "weights": np.array([0, 0, 0, 1, 1, 1], dtype=np.float32),
    }
    return Example(Segment(**(streams | changes), prompt_length=3), "a.png", (32, 32), channel)


@pytest.mark.scenario("R05.C8", "R29.C4", on="pure")
def test_the_position_before_a_supervised_token_is_kept_and_offset_by_its_segment():
    row = collator()([example("B"), example("A")])
    assert row.inputs["logits_to_keep"].tolist() == [2, 3, 4, 8, 10]
    assert row.supervision.ids.tolist() == [20, 500, 21, 20, 21]
    assert row.supervision.channels.tolist() == [1, 1, 1, 0, 0]
    assert row.supervision.coord_targets[1] == 7.5
    assert row.inputs["position_ids"][:, 0, 6:].tolist() == [list(range(6)), *[list(range(100, 106))] * 3]
    assert row.inputs["image_grid_thw"].shape == (2, 3)


def test_answers_are_counted_by_kind_on_all_channels():
    examples = [example("B"), example("B"), example("A")]
    counts = kind_counts(examples)
    assert counts[[TokenKind.structure, TokenKind.coord]].tolist() == [6, 3]
    row = collator()(examples)
    assert torch.equal(sum(span.counts for span in row.spans), counts)


def test_a_token_of_weight_zero_is_not_kept():
    weights = np.array([0, 0, 0, 0, 1, 1], dtype=np.float32)
    assert collator()([example(weights=weights)]).inputs["logits_to_keep"].tolist() == [3, 4]


@pytest.mark.scenario("R06.C4", "R30.C2", on="pure")
def test_supervision_inside_of_the_prompt_is_refused():
    roles, weights = example().segment.roles.copy(), np.ones(6, dtype=np.float32)
    roles[2] = Role.tail_structure
    with pytest.raises(ValueError, match=r"a\.png: token 2 is supervised and lies in the prompt"):
        collator()([example(roles=roles, weights=weights)])


def test_an_image_that_makes_other_tokens_than_its_prompt_has_is_refused():
    ids = np.array([1, IMAGE, IMAGE, 20, 500, 21])
    with pytest.raises(
        ValueError, match=r"a\.png: the prompt has 2 image tokens, the image makes 1\n.*restore it"
    ):
        collator()([example(ids=ids)])


def test_a_row_says_which_examples_it_holds_and_which_supervised_positions_are_theirs():
    ids = [ExampleId(1, 0, 0, 0), None, ExampleId(0, 2, 0, 7)]
    examples = [replace(example(channel), id=id) for channel, id in zip("BBA", ids, strict=True)]
    row = collator()(examples)
    assert [span.id for span in row.spans] == ids
    assert [span.positions for span in row.spans] == [slice(0, 3), slice(3, 6), slice(6, 8)]
    assert [span.tokens.tolist() for span in row.spans] == [[3, 4, 5], [3, 4, 5], [3, 5]]
    for span in row.spans:
        assert row.supervision.at(span.positions).ids.tolist() == examples[0].segment.ids[span.tokens].tolist()
        assert span.counts[[TokenKind.structure, TokenKind.coord]].tolist() == [2, 1]
    assert row.to(torch.device("cpu")).spans is row.spans
