"""The objective computes what the pipeline declares and nothing else (R01 to R04, D5 to D7, D15, D19)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from coordexp.answers.correct import correct
from coordexp.answers.formats import NativeAnswers
from coordexp.answers.segment import Role, TokenKind
from coordexp.config import parse_settings
from coordexp.data import Geometry, TrueObject
from coordexp.objective.carry import Example
from coordexp.objective.collate import Supervision, _supervision, kind_counts
from coordexp.objective.pipeline import BROKEN, LossTally, Objective
from tests.rows import DIAGNOSTICS, MATCHING, measure_logits, on_both_channels, settings
from tests.unit.config.trees import BBOX_GEO, COORD_REG, TOKEN_CE, stage1
from tests.unit.objective.streams import FIRST, MIXED, SIZE, random_logits, supervision
from tests.vocabularies import encode, table

COUNTS = torch.tensor([0, 20, 10, 16, 2])  # in the order of TokenKind: none, structure, desc, coord, end_of_turn


def make_objective(*modules, **options):
    return Objective(settings(*modules, **options), FIRST)


def compute_loss(objective: Objective, logits=None, s: Supervision = MIXED, counts=COUNTS):
    logits = random_logits() if logits is None else logits
    return objective.loss(measure_logits(objective, logits, s), counts)


@pytest.mark.scenario("R01.C1", on="pure")
def test_only_declared_terms_with_a_weight_are_computed():
    objective = make_objective(
        on_both_channels(TOKEN_CE, desc_ce_weight=0.0),
        on_both_channels(COORD_REG, coord_ce_weight=0.0, text_gate_weight=0.0),
    )
    names = [term.name for term in objective.terms]
    assert names == [
        "token_ce/struct_ce",
        "token_ce/eos_ce",
        "coord_reg/soft_ce",
        "coord_reg/w1",
        "coord_reg/coord_gate",
        "coord_reg/soft_kl",
    ]
    assert list(measure_logits(objective, random_logits(), MIXED)) == [*names, BROKEN]


def test_a_part_of_a_term_is_computed_with_the_term_only_and_divided_like_it():
    objective = make_objective(on_both_channels(COORD_REG, soft_ce_weight=0.5))
    tally = LossTally(objective)
    measures = measure_logits(objective, random_logits(), MIXED)
    tally.add(measures, COUNTS)
    report = tally.report()
    assert report["coord_reg/soft_kl"] == pytest.approx(measures["coord_reg/soft_kl"].sum.item() / 16)
    assert report["coord_reg/soft_kl/mean"] == pytest.approx(measures["coord_reg/soft_kl"].sum.item() / 8)
    assert report["loss"] == pytest.approx(objective.loss(measures, COUNTS).item())
    divisors = {term["term"]: term["divided_by"] for term in objective.manifest()["terms"]}
    assert divisors["coord_reg/soft_kl"] == divisors["coord_reg/soft_ce"] == ["coord"]
    without = make_objective(on_both_channels(COORD_REG, soft_ce_weight=0.0))
    assert "coord_reg/soft_kl" not in [term.name for term in without.terms]


@pytest.mark.scenario("R01.C1", "R29.C1", on="pure")
def test_the_loss_is_the_weighted_sum_of_terms_over_positions_of_their_kind():
    """D19: a term is divided by all positions of its kind, including those that are not supervised."""
    modules = (
        on_both_channels(TOKEN_CE, desc_ce_weight=0.5) | {"weight": 2.0},
        on_both_channels(COORD_REG),
        on_both_channels(BBOX_GEO) | {"weight": 0.3},
    )
    objective = make_objective(*modules)
    sums = {
        name: measure.sum.item() for name, measure in measure_logits(objective, random_logits(), MIXED).items()
    }
    divisors = {"struct_ce": 20, "desc_ce": 10, "eos_ce": 2, "text_gate": 32}
    expected = 0.0
    for module in modules:
        for key, weight in module["config"].items():
            if key.endswith("_weight"):
                term = key.removesuffix("_weight")
                expected += module["weight"] * weight * sums[f"{module['name']}/{term}"] / divisors.get(term, 16)
    assert compute_loss(objective).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("alone", [TOKEN_CE, COORD_REG, BBOX_GEO])
def test_modules_do_not_depend_on_each_other(alone):
    """There is one exception: where token_ce masks desc, no module supervises it (tested below)."""
    others = [
        on_both_channels(module) for module in (TOKEN_CE, COORD_REG, BBOX_GEO) if module["name"] != alone["name"]
    ]
    alone = on_both_channels(alone, **({"desc_ce_weight": 1.0} if alone is TOKEN_CE else {}))
    others = [on_both_channels(m, desc_ce_weight=1.0) if m["name"] == "token_ce" else m for m in others]
    by_itself = measure_logits(make_objective(alone), random_logits(), MIXED)
    among = measure_logits(make_objective(alone, *others), random_logits(), MIXED)
    for name, measure in by_itself.items():
        assert among[name].sum.item() == pytest.approx(measure.sum.item())


@pytest.mark.scenario("R04.C2", on="pure")
def test_the_text_gate_is_positive_exactly_where_supervised_text_has_coordinate_mass():
    objective = make_objective(on_both_channels(COORD_REG, text_gate_weight=0.1))
    text, coord = (supervision((role, 2)) for role in (Role.tail_structure, Role.tail_coord))
    clean, leaking = torch.full((1, SIZE), -1e4), torch.zeros(1, SIZE)
    clean[0, 2] = 0.0
    assert measure_logits(objective, leaking, text)["coord_reg/text_gate"].sum.item() == pytest.approx(
        np.log(SIZE / 10), rel=1e-5
    )
    assert measure_logits(objective, clean, text)["coord_reg/text_gate"].sum.item() == 0.0
    assert measure_logits(objective, leaking, coord)["coord_reg/text_gate"].sum.item() == 0.0
    without = make_objective(on_both_channels(COORD_REG, text_gate_weight=0.0))
    assert "coord_reg/text_gate" not in measure_logits(without, leaking, text)


ROLLOUT = (
    '{"object_1": {"desc": "cat", "bbox_2d": [<|coord_100|>, <|coord_100|>, <|coord_300|>, <|coord_300|>]}, '
    '"object_2": {"desc": "ghost", "bbox_2d": [<|coord_700|>, <|coord_700|>, <|coord_800|>, <|coord_800|>]}}'
)
TRUTH = [
    TrueObject("cat", Geometry("bbox_2d", (105, 98, 310, 305))),
    TrueObject("black dog", Geometry("bbox_2d", (400, 100, 600, 350))),
]


def make_example(text=ROLLOUT, channel="B"):
    vocabulary = table("qwen")
    ids = encode(text, vocabulary)
    correction = correct((11, 12), ids, TRUTH, table=vocabulary, order="desc_first", settings=MATCHING)
    return Example(correction.segment, "image.png", (64, 64), channel)


def positions_to_keep(objective: Objective, example: Example):
    roles = list(objective.roles()[example.channel])
    return np.flatnonzero(np.isin(example.segment.roles, roles) & (example.segment.weights > 0))


@pytest.mark.scenario("R29.C1", "R29.S1", on="pure")
@pytest.mark.parametrize("desc_weight", [0.0, 1.0])
def test_matched_coordinates_and_the_tail_get_a_gradient_and_nothing_else_does(desc_weight):
    vocabulary, example = table("qwen"), make_example()
    objective = Objective(
        settings(on_both_channels(TOKEN_CE, desc_ce_weight=desc_weight), on_both_channels(COORD_REG)),
        vocabulary.first_coord,
    )
    kept = positions_to_keep(objective, example)
    roles = example.segment.roles
    supervised = {Role.matched_coord, Role.tail_structure, Role.tail_coord, Role.end_of_turn} | (
        {Role.tail_desc} if desc_weight else set()
    )
    assert kept.tolist() == np.flatnonzero(np.isin(roles, list(supervised))).tolist()
    matched = [vocabulary.pieces[id] for id in example.segment.ids[roles == Role.matched_coord]]
    assert matched == [b"<|coord_100|>", b"<|coord_100|>", b"<|coord_300|>", b"<|coord_300|>"]
    logits = torch.zeros(len(kept), len(vocabulary.pieces), requires_grad=True)
    s = _supervision([example], [kept])
    objective.loss(measure_logits(objective, logits, s), kind_counts([example])).backward()
    assert (logits.grad.abs().sum(-1) > 0).all()


@pytest.mark.scenario("R04.C3", on="pure")
def test_false_positives_add_nothing_to_any_term():
    """A ghost in the prefix precedes the tail, but changes nothing about which tokens are supervised."""
    ghost = ROLLOUT.index(', "object_2"')
    with_ghost, without = make_example(), make_example(ROLLOUT[:ghost] + "}")
    objective = Objective(
        settings(on_both_channels(TOKEN_CE), on_both_channels(COORD_REG)), table("qwen").first_coord
    )
    kept = [positions_to_keep(objective, example) for example in (with_ghost, without)]
    a, b = [example.segment.roles[k].tolist() for example, k in zip((with_ghost, without), kept, strict=True)]
    assert a.count(Role.matched_coord) == b.count(Role.matched_coord) == 4
    assert a.count(Role.tail_coord) == b.count(Role.tail_coord) == 4
    ghosts = np.isin(with_ghost.segment.ids - table("qwen").first_coord, (700, 800))
    assert ghosts.sum() == 4
    assert not set(np.flatnonzero(ghosts)) & set(kept[0])
    added = kind_counts([with_ghost]) - kind_counts([without])
    assert added[TokenKind.coord] == 4  # it counts in the denominators, as every masked token does (D19)


@pytest.mark.scenario("R04.C2", "R29.C5", on="pure")
def test_masked_desc_takes_no_part_in_the_text_gate_either():
    masked = make_objective(on_both_channels(TOKEN_CE, desc_ce_weight=0.0), on_both_channels(COORD_REG))
    supervised = make_objective(on_both_channels(TOKEN_CE, desc_ce_weight=1.0), on_both_channels(COORD_REG))
    measures = [measure_logits(objective, random_logits(), MIXED) for objective in (masked, supervised)]
    counts = [measure["coord_reg/text_gate"].count.item() for measure in measures]
    assert counts == [3, 4]
    assert Role.tail_desc not in masked.roles()["B"]
    assert Role.tail_desc in supervised.roles()["B"]


@pytest.mark.scenario("R29.C5", on="pure")
def test_desc_is_masked_on_the_channels_of_the_token_ce_that_masks_it():
    on_a = on_both_channels(TOKEN_CE, desc_ce_weight=0.0) | {"channels": ["A"]}
    objective = make_objective(on_a, on_both_channels(COORD_REG))
    assert Role.tail_desc not in objective.roles()["A"]
    assert Role.tail_desc in objective.roles()["B"]
    mixed = supervision((Role.tail_desc, 2), (Role.tail_desc, 3), channels="AB")
    assert measure_logits(objective, random_logits(2), mixed)["coord_reg/text_gate"].count.item() == 1
    assert objective.manifest()["masked_desc"] == ["A"]


def test_a_position_of_weight_zero_is_not_counted():
    light = Supervision(**{**vars(MIXED), "weights": MIXED.weights.clone()})
    light.weights[0] = light.weights[4] = 0.0
    measures = measure_logits(
        make_objective(on_both_channels(TOKEN_CE), on_both_channels(COORD_REG)), random_logits(), light
    )
    assert measures["coord_reg/w1"].count.item() == 7
    assert measures["token_ce/struct_ce"].count.item() == 1


def test_a_kind_without_any_token_does_not_cause_a_division_by_zero():
    objective = make_objective(on_both_channels(TOKEN_CE, desc_ce_weight=1.0), on_both_channels(COORD_REG))
    only_text = supervision((Role.end_of_turn, 4))
    counts = torch.zeros_like(COUNTS)
    counts[TokenKind.end_of_turn] = 1
    measures = measure_logits(objective, random_logits(1), only_text)
    assert torch.isfinite(objective.loss(measures, counts))
    tally = LossTally(objective)
    tally.add(measures, counts)
    report = tally.report()
    assert report["coord_reg/w1"] == report["coord_reg/w1/mean"] == 0.0


@pytest.mark.scenario("R02.C5", on="pure")
def test_a_module_runs_on_its_channels_only_and_an_idle_one_is_named():
    only_a = on_both_channels(TOKEN_CE, desc_ce_weight=1.0) | {"channels": ["A"]}
    objective = make_objective(only_a, on_both_channels(COORD_REG))
    mixed = supervision((Role.tail_structure, 2), (Role.tail_structure, 3), channels="AB")
    measures = measure_logits(objective, random_logits(2), mixed)
    assert measures["token_ce/struct_ce"].count.item() == 1
    assert objective.roles()["B"] >= {Role.tail_structure, Role.tail_coord}
    coords = supervision((Role.tail_coord, 2), (Role.tail_coord, 3), channels="AB")
    alone = measure_logits(
        make_objective(on_both_channels(COORD_REG) | {"channels": ["A"]}), random_logits(2), coords
    )
    assert alone["coord_reg/w1"].count.item() == 1
    aligned = make_objective(
        only_a, on_both_channels(COORD_REG), custom__trainer_variant="stage2_rollout_aligned", stage2__b_ratio=None
    )
    assert aligned.idle == {"token_ce": "inactive: it runs on channel A, and this run on B"}
    assert aligned.manifest()["idle"] == aligned.idle
    assert not aligned.roles()["A"]


@pytest.mark.scenario("R29.C6", on="pure")
def test_without_bbox_geo_no_coordinate_is_decoded(monkeypatch):
    """D7: box losses and expectations are computed by one module, which is not called."""
    from coordexp.objective import modules

    def fail(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(modules, "BBOX_GEO", replace(modules.BBOX_GEO, run=fail))
    for declared in (
        (),
        (on_both_channels(BBOX_GEO) | {"weight": 0.0},),
        (on_both_channels(BBOX_GEO, smoothl1_weight=0.0, ciou_weight=0.0),),
    ):
        objective = make_objective(
            on_both_channels(TOKEN_CE), on_both_channels(COORD_REG), *declared, diagnostics=DIAGNOSTICS
        )
        measure_logits(objective, random_logits(), MIXED)
        assert not any("iou" in term.name or "bbox" in term.name for term in objective.terms)
    with pytest.raises(AssertionError, match="decoded"):
        measure_logits(make_objective(on_both_channels(BBOX_GEO)), random_logits(), MIXED)


def test_diagnostics_do_not_change_the_loss_or_its_gradient():
    with_diagnostics = make_objective(on_both_channels(COORD_REG), diagnostics=DIAGNOSTICS)
    logits = random_logits().requires_grad_()
    measures = measure_logits(with_diagnostics, logits, MIXED)
    assert not any(m.sum.requires_grad for name, m in measures.items() if name.startswith("coord_diag"))
    assert with_diagnostics.loss(measures, COUNTS).item() == pytest.approx(
        compute_loss(make_objective(on_both_channels(COORD_REG))).item()
    )


def test_a_row_without_any_supervised_position_gives_a_zero_loss_with_a_graph():
    logits = torch.zeros(0, SIZE, requires_grad=True)
    empty = Supervision(**{name: stream[:0] for name, stream in vars(MIXED).items()})
    total = compute_loss(make_objective(diagnostics=DIAGNOSTICS), logits, empty)
    assert total.item() == 0.0
    total.backward()
    assert logits.grad is not None


def test_logits_and_supervision_of_different_length_are_refused():
    with pytest.raises(ValueError, match="3 rows of logits for 12 supervised positions"):
        measure_logits(make_objective(), random_logits(3), MIXED)


def test_a_tally_reports_sums_over_rows_and_counts_broken_logits():
    objective = make_objective(
        on_both_channels(TOKEN_CE, desc_ce_weight=1.0), on_both_channels(COORD_REG), diagnostics=DIAGNOSTICS
    )
    logits = random_logits()
    logits[0, 0] = float("nan")
    tally = LossTally(objective)
    for _ in range(2):
        tally.add(measure_logits(objective, logits, MIXED), 2 * COUNTS)
    report, once = tally.report(), measure_logits(objective, logits, MIXED)
    assert report["loss"] == pytest.approx(objective.loss(once, COUNTS).item())
    assert report["token_ce/struct_ce"] == pytest.approx(once["token_ce/struct_ce"].sum.item() / 20)
    assert report["token_ce/struct_ce/mean"] == pytest.approx(once["token_ce/struct_ce"].sum.item() / 2)
    assert report["coord_diag/entropy"] == pytest.approx(once["coord_diag/entropy"].sum.item() / 8)
    assert report[BROKEN] == pytest.approx(1 / 12)
    assert set(tally.report().values()) == {0.0}  # a rank without rows adds zeros


def test_a_tally_over_several_steps_reports_the_mean_of_their_reports():
    objective = make_objective(on_both_channels(TOKEN_CE, desc_ce_weight=1.0))
    steps = [(random_logits(seed=1), COUNTS), (random_logits(seed=2), 3 * COUNTS)]
    alone, together = [], LossTally(objective)
    for logits, counts in steps:
        single = LossTally(objective)
        for tally in (single, together):
            tally.add(measure_logits(objective, logits, MIXED), counts)
        alone.append(single.report())
    report = together.report(steps=2)
    for name in ("loss", "token_ce/struct_ce", "token_ce/struct_ce/mean"):
        assert report[name] == pytest.approx((alone[0][name] + alone[1][name]) / 2)


NUMBER_CE = {"name": "number_ce", "enabled": True, "weight": 1.0, "channels": ["A"], "config": {"ce_weight": 3.0}}


def test_the_digits_of_native_answers_have_a_term_of_their_own_and_need_no_coordinate_tokens():
    """Every token of the answer is in exactly one term, and each term is divided by its own kind."""
    vocabulary = table("small")
    truth = [TrueObject("red cup", Geometry("bbox_2d", (10, 20, 300, 400)))]
    segment = NativeAnswers(vocabulary).write((1, 2), truth)
    example = Example(segment, "a.png", (8, 8), "A")
    supervised = np.flatnonzero(segment.weights)
    s = _supervision([example], [supervised])
    modules = [TOKEN_CE | {"channels": ["A"], "config": TOKEN_CE["config"] | {"desc_ce_weight": 2.0}}, NUMBER_CE]
    pipeline = {"objective": modules, "diagnostics": []}
    tree = stage1(custom__answer_format="native", stage1__pipeline=pipeline)
    objective = Objective(parse_settings(tree).settings, None)
    logits = torch.randn(len(supervised), 700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    own = replace(s, ids=s.ids % 700)
    measures = measure_logits(objective, logits, own)
    losses = torch.nn.functional.cross_entropy(logits, own.ids, reduction="none")
    kinds = torch.from_numpy(segment.kinds[supervised])
    for name, kind in {
        "token_ce/struct_ce": TokenKind.structure,
        "token_ce/desc_ce": TokenKind.desc,
        "token_ce/eos_ce": TokenKind.end_of_turn,
        "number_ce/ce": TokenKind.coord,
    }.items():
        assert measures[name].count == (kinds == kind).sum() > 0
        torch.testing.assert_close(measures[name].sum, losses[kinds == kind].sum())
    counts = kind_counts([example])
    weights = {TokenKind.structure: 1.0, TokenKind.desc: 2.0, TokenKind.end_of_turn: 1.0, TokenKind.coord: 3.0}
    expected = sum(weight * losses[kinds == kind].mean() for kind, weight in weights.items())
    loss = objective.loss(measures, counts)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
