"""The loss of chat records, and the losses of the data sets of a mixture."""

import pytest
import torch

from coordexp.answers.segment import Role
from coordexp.objective.collate import ExampleSpan, Row
from coordexp.objective.pipeline import Objective, SetTally
from tests.rows import chat_settings, measure_logits, settings
from tests.unit.config.trees import CHAT_CE, TOKEN_CE, load, stage2
from tests.unit.objective.streams import FIRST, MIXED, random_logits, splitter, supervision

ANSWER = supervision((Role.answer, 2), (Role.answer, 700), (Role.answer, 4), channels="AAA")
COUNTS = torch.tensor([0, 20, 10, 16, 2, 3])


def test_the_loss_of_an_answer_is_its_mean_cross_entropy_over_the_vocabulary():
    objective, logits = Objective(chat_settings(), FIRST), random_logits(3)
    measures = measure_logits(objective, logits, ANSWER)
    expected = torch.nn.functional.cross_entropy(logits, ANSWER.ids)
    assert objective.shares(measures, COUNTS)["chat_ce/answer_ce"].item() == pytest.approx(expected.item())
    assert objective.loss(measures, COUNTS).item() == pytest.approx(expected.item())


def test_answers_change_no_other_term_and_no_denominator_of_it():
    without, with_chat = Objective(settings(), FIRST), Objective(chat_settings(), FIRST)
    logits = random_logits(len(MIXED.ids) + 3)
    joined = MIXED.map(lambda tensor: tensor)
    fields = {name: torch.cat((getattr(MIXED, name), getattr(ANSWER, name))) for name in vars(joined)}
    both = type(MIXED)(**fields)
    alone = without.shares(measure_logits(without, logits[: len(MIXED.ids)], MIXED), COUNTS[:5])
    mixed = with_chat.shares(measure_logits(with_chat, logits, both), COUNTS)
    assert all(torch.equal(alone[name], mixed[name]) for name in alone)


@pytest.mark.parametrize("variant", ["stage2_rollout_aligned", "stage2_two_channel"])
def test_chat_records_are_trained_on_channel_a_in_every_kind_of_run(variant):
    pipeline = {"objective": [TOKEN_CE, CHAT_CE], "diagnostics": []}
    b_ratio = {"stage2__b_ratio": 0.5} if variant == "stage2_two_channel" else {}
    tree = stage2(custom__trainer_variant=variant, rollout_matching__pipeline=pipeline, **b_ratio)
    objective = Objective(load(tree).settings, FIRST)
    assert Role.answer in objective.roles()["A"]
    assert Role.answer not in objective.roles()["B"]
    assert measure_logits(objective, random_logits(3), ANSWER)["chat_ce/answer_ce"].count == 3


def spans(*sets):
    """Return spans over the positions of MIXED and of ANSWER, with the data set of each."""
    sizes, counts = (len(MIXED.ids), 3), (torch.tensor([0, 2, 1, 8, 1, 0]), torch.tensor([0, 0, 0, 0, 0, 3]))
    ends = (sizes[0], sum(sizes))
    return tuple(
        ExampleSpan(None, slice(end - size, end), torch.arange(size).numpy(), count, size + 5, data_set)
        for end, size, count, data_set in zip(ends, sizes, counts, sets, strict=True)
    )


def test_the_loss_of_a_data_set_is_that_of_its_samples_alone():
    objective = Objective(chat_settings(), FIRST)
    fields = {name: torch.cat((getattr(MIXED, name), getattr(ANSWER, name))) for name in vars(MIXED)}
    both, logits = type(MIXED)(**fields), random_logits(len(MIXED.ids) + 3)
    split = splitter(logits, both)
    tally = SetTally(objective, ("scenes", "questions", "unused"))
    row = Row({}, both, spans(0, 1))
    tally.add(row, split, objective.measure(split, both))
    report = tally.report()
    first, second = row.spans
    for name, span, s, part in (
        ("scenes", first, MIXED, logits[: len(MIXED.ids)]),
        ("questions", second, ANSWER, logits[len(MIXED.ids) :]),
    ):
        expected = objective.loss(measure_logits(objective, part, s), span.counts)
        assert report[f"set/{name}/loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert report[f"set/{name}/samples"] == 1
        assert report[f"set/{name}/tokens"] == span.length
    assert report["set/unused/samples"] == 0 and "set/unused/loss" not in report
    assert tally.report()["set/scenes/samples"] == 0
