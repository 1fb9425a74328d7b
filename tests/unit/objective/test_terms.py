"""Each loss term is compared with an independent computation, and its gradient with finite differences."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch.autograd import gradcheck

from coordexp.answers.segment import Role
from coordexp.config.sections import BBoxGeoConfig, CoordRegConfig, TokenCEConfig
from coordexp.data import BINS
from coordexp.objective.modules import nearest_bin, soft_target, wasserstein
from tests.unit.objective.streams import FIRST, MIXED, MODULES, random_logits, splitter, supervision

COORD = ~torch.isnan(MIXED.coord_targets)
CONFIGS = {
    "token_ce": TokenCEConfig(struct_ce_weight=1.0, desc_ce_weight=1.0, eos_ce_weight=1.0),
    "bbox_geo": BBoxGeoConfig(smoothl1_weight=1.0, ciou_weight=1.0),
    "coord_diag": None,
}


def coord_config(**changes):
    weights = dict.fromkeys(
        ("coord_ce_weight", "soft_ce_weight", "w1_weight", "coord_gate_weight", "text_gate_weight"), 1.0
    )
    return CoordRegConfig(**(weights | {"temperature": 1.5, "target_sigma": 2.0, "target_truncate": 8} | changes))


def run(module, logits, s=MIXED, config=None, terms=None):
    kind = MODULES[module]
    config = config or CONFIGS.get(module) or coord_config()
    return kind.run(
        config, frozenset(terms or kind.terms), splitter(logits, s), s, torch.ones(len(s.ids), dtype=bool)
    )


def explicit_target(t, sigma, truncate):
    weights = [math.exp(-0.5 * ((i - t) / sigma) ** 2) if abs(i - t) <= truncate else 0.0 for i in range(BINS)]
    return np.array(weights) / sum(weights)


@pytest.mark.scenario("R29.C2", on="pure")
def test_soft_targets_are_truncated_gaussians_around_fractions_of_a_bin():
    targets = [0.0, 3.4, 500.5, 999.0]
    rows = soft_target(torch.tensor(targets, dtype=torch.float64), 2.0, 8)
    for row, t in zip(rows.numpy(), targets, strict=True):
        assert row == pytest.approx(explicit_target(t, 2.0, 8), abs=1e-6)
    assert soft_target(torch.tensor([500.0]), 2.0, None).min() >= 0
    assert soft_target(torch.tensor([500.0]), 50.0, None)[0, 300] > 0


@pytest.mark.scenario("R29.C1", "R29.C3", on="pure")
@pytest.mark.parametrize("term", ["soft_ce", "w1", "coord_gate"])
def test_each_term_has_a_gradient_at_every_coordinate_of_prefix_and_tail_and_at_no_text(term):
    logits = random_logits().requires_grad_()
    run("coord_reg", logits, terms={term})[term].sum.backward()
    assert ((logits.grad.abs().sum(-1) > 0) == COORD).all()
    mass = torch.autograd.grad(run("coord_reg", logits, terms={"coord_gate"})["coord_gate"].sum, logits)[0]
    assert (mass[COORD, :FIRST] > 0).all(), "more mass on text costs more"


@pytest.mark.scenario("R29.C6", on="pure")
def test_token_level_terms_treat_every_coordinate_of_a_box_alone():
    """A loss of a decoded box or of its IoU would couple the four."""
    logits, whole = random_logits(4), supervision(*((Role.tail_coord, k) for k in (100, 200, 300, 400)))
    parts = [whole.at(slice(k, k + 1)) for k in range(4)]
    terms = {name for name, spec in MODULES["coord_reg"].terms.items() if name != "text_gate"}
    together = run("coord_reg", logits, whole, terms=terms)
    alone = [run("coord_reg", logits[k : k + 1], part, terms=terms) for k, part in enumerate(parts)]
    for name in terms:
        assert together[name].sum.item() == pytest.approx(sum(part[name].sum.item() for part in alone))


@pytest.mark.scenario("R29.C1", "R29.C6", on="pure")
def test_w1_is_scipys_wasserstein_distance_in_units_of_the_side():
    logits = random_logits()
    measure = run("coord_reg", logits, terms={"w1"})["w1"]
    expected = 0.0
    for row, t in zip(
        (logits[COORD, FIRST : FIRST + BINS] / 1.5).softmax(-1).numpy(), MIXED.coord_targets[COORD], strict=True
    ):
        q = explicit_target(t.item(), 2.0, 8)
        expected += wasserstein_distance(np.arange(BINS), np.arange(BINS), row, q) / 999
    assert measure.sum.item() == pytest.approx(expected, rel=1e-6)
    assert measure.count.item() == COORD.sum().item() == 8


def test_w1_and_its_gradient_are_the_same_if_algorithms_must_be_deterministic():
    """CUDA has no deterministic cumsum of floats, so the distance is then computed in another way."""
    p, q = torch.randn(2, 20, BINS, generator=torch.Generator().manual_seed(0)).softmax(-1)
    results = []
    for is_needed in (False, True):
        torch.use_deterministic_algorithms(is_needed)
        try:
            own = p.clone().requires_grad_()
            distance = wasserstein(own, q)
            distance.sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        results.append((distance.detach(), own.grad))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-4, atol=1e-7)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-4)


@pytest.mark.scenario("R29.C2", on="pure")
def test_soft_ce_is_the_explicit_sum():
    logits = random_logits()
    measure = run("coord_reg", logits, terms={"soft_ce"})["soft_ce"]
    expected = 0.0
    for row, t in zip(logits[COORD, FIRST : FIRST + BINS].numpy() / 1.5, MIXED.coord_targets[COORD], strict=True):
        log_p = row - row.max() - math.log(np.exp(row - row.max()).sum())
        expected -= sum(q * lp for q, lp in zip(explicit_target(t.item(), 2.0, 8), log_p, strict=True))
    assert measure.sum.item() == pytest.approx(expected, rel=1e-6)


def test_soft_kl_is_soft_ce_without_the_entropy_of_its_target_and_has_no_gradient():
    logits = random_logits().requires_grad_()
    measures = run("coord_reg", logits, terms={"soft_ce", "soft_kl"})
    targets = [explicit_target(t.item(), 2.0, 8) for t in MIXED.coord_targets[COORD]]
    entropy = -sum(float((q[q > 0] * np.log(q[q > 0])).sum()) for q in targets)
    assert measures["soft_kl"].sum.item() == pytest.approx(measures["soft_ce"].sum.item() - entropy, rel=1e-5)
    assert measures["soft_kl"].count.item() == measures["soft_ce"].count.item() == 8
    assert measures["soft_ce"].sum.requires_grad and not measures["soft_kl"].sum.requires_grad


def test_hard_ce_is_the_limit_of_a_small_sigma():
    whole = supervision(
        (Role.tail_coord, 0), (Role.tail_coord, 17), (Role.tail_coord, 17.3), (Role.tail_coord, 999)
    )
    logits = random_logits(4)
    small = run("coord_reg", logits, whole, coord_config(target_sigma=0.01))
    assert small["soft_ce"].sum.item() == pytest.approx(small["coord_ce"].sum.item(), rel=1e-6)
    wide = run("coord_reg", logits, whole, coord_config(target_sigma=4.0))
    assert wide["soft_ce"].sum.item() != pytest.approx(wide["coord_ce"].sum.item(), rel=1e-3)


def test_the_nearest_bin_of_a_half_is_the_upper_one():
    assert nearest_bin(torch.tensor([0.0, 0.49, 0.5, 1.5, 998.6, 999.0])).tolist() == [0, 0, 1, 2, 999, 999]


@pytest.mark.scenario("R29.C4", on="pure")
def test_token_ce_is_cross_entropy_of_the_next_token_by_kind():
    logits = random_logits()
    log_p = logits.log_softmax(-1)[torch.arange(len(MIXED.ids)), MIXED.ids]
    measures = run("token_ce", logits)
    roles = {"struct_ce": Role.tail_structure, "desc_ce": Role.tail_desc, "eos_ce": Role.end_of_turn}
    for name, role in roles.items():
        here = MIXED.roles == role
        assert measures[name].sum.item() == pytest.approx(-log_p[here].sum().item())
        assert measures[name].count.item() == here.sum().item()


def scalar_ciou_loss(a, b, alpha=None):
    """Return 1 - CIoU as defined by Zheng et al., computed on numbers. Its gradient treats `alpha` as a
    constant."""
    inter_w, inter_h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inter = max(inter_w, 0) * max(inter_h, 0)
    (aw, ah), (bw, bh) = ((box[2] - box[0], box[3] - box[1]) for box in (a, b))
    iou = inter / (aw * ah + bw * bh - inter)
    diagonal = (max(a[2], b[2]) - min(a[0], b[0])) ** 2 + (max(a[3], b[3]) - min(a[1], b[1])) ** 2
    centres = ((a[0] + a[2] - b[0] - b[2]) / 2) ** 2 + ((a[1] + a[3] - b[1] - b[3]) / 2) ** 2
    v = 4 / math.pi**2 * (math.atan(bw / bh) - math.atan(aw / ah)) ** 2
    alpha = v / (1 - iou + v) if alpha is None else alpha
    return 1 - iou + centres / diagonal + alpha * v


def box_logits(boxes):
    """Return logits whose expectations are these coordinates: two neighbouring bins share the mass."""
    logits = torch.full((4 * len(boxes), 1010), -60.0, dtype=torch.float64)
    for k, value in enumerate(value for box in boxes for value in box):
        low, part = int(value), value - int(value)
        logits[k, FIRST + low] = math.log(max(1 - part, 1e-30))
        if part:
            logits[k, FIRST + low + 1] = math.log(part)
    return logits


def test_boxes_are_decoded_as_expectations_and_compared_by_the_formulas():
    predicted = [(100.25, 200.0, 300.5, 420.75), (10.0, 10.0, 20.5, 30.0), (500.0, 600.0, 900.0, 700.0)]
    true = [(110.0, 190.5, 310.0, 400.0), (500.0, 500.0, 900.0, 950.0), (500.5, 600.0, 900.0, 700.0)]
    s = supervision(*((Role.matched_coord, value) for box in true for value in box))
    measures = run("bbox_geo", box_logits(predicted), s)
    expected = [scalar_ciou_loss(a, b) for a, b in zip(predicted, true, strict=True)]
    assert measures["ciou"].sum.item() == pytest.approx(4 * sum(expected), rel=1e-5)
    distances = [abs(x - y) for a, b in zip(predicted, true, strict=True) for x, y in zip(a, b, strict=True)]
    smooth = [0.5 * d * d if d < 1 else d - 0.5 for d in distances]
    assert measures["smoothl1"].sum.item() == pytest.approx(sum(smooth) / 999, rel=1e-6)
    assert measures["ciou"].count.item() == measures["smoothl1"].count.item() == 12


def test_inverted_and_flat_predictions_have_finite_losses_and_gradients():
    s = supervision(*((Role.tail_coord, value) for value in (100, 100, 300, 300) * 3))
    logits = box_logits([(300.0, 300.0, 100.0, 100.0), (50.0, 50.0, 50.0, 50.0), (100.0, 100.0, 300.0, 300.0)])
    logits.requires_grad_()
    measures = run("bbox_geo", logits, s)
    sum(measure.sum for measure in measures.values()).backward()
    assert torch.isfinite(logits.grad).all()
    assert all(torch.isfinite(measure.sum) for measure in measures.values())


def test_a_flat_target_has_a_finite_loss():
    s = supervision(*((Role.matched_coord, value) for value in (100, 100, 100, 300)))
    logits = box_logits([(90.0, 90.0, 200.0, 200.0)]).requires_grad_()
    loss = run("bbox_geo", logits, s)["ciou"].sum
    assert loss.item() == pytest.approx(4 * scalar_ciou_loss((90, 90, 200, 200), (100, 100, 101, 300)), rel=1e-4)


def test_a_box_weighs_the_mean_of_its_positions():
    s = supervision(*((Role.matched_coord, value) for value in (110, 190, 310, 400)))
    s.weights.copy_(torch.tensor([0.0, 1.0, 1.0, 0.5]))
    whole = supervision(*((Role.matched_coord, value) for value in (110, 190, 310, 400)))
    logits = box_logits([(100.0, 200.0, 300.0, 420.0)])
    weighed, plain = (run("bbox_geo", logits, boxes)["ciou"].sum.item() for boxes in (s, whole))
    assert weighed == pytest.approx(0.625 * plain)


def test_a_box_that_is_supervised_in_part_is_refused():
    s = supervision(*((Role.matched_coord, value) for value in (110, 190, 310, 400, 1, 2, 3, 4)))
    s.sides[[2, 7]] = 0
    with pytest.raises(ValueError, match="supervised in part"):
        run("bbox_geo", random_logits(8), s)
    s.sides[[0, 5]] = 0  # two sides of each box are missing, so that their number is a multiple of four again
    with pytest.raises(ValueError, match="supervised in part"):
        run("bbox_geo", random_logits(8), s)


def test_a_box_is_used_if_all_of_its_positions_are_allowed():
    s = supervision(*((Role.matched_coord, value) for value in (110, 190, 310, 400, 1, 2, 3, 4)))
    allowed = torch.ones(8, dtype=torch.bool)
    allowed[2] = False
    kind = MODULES["bbox_geo"]
    measures = kind.run(CONFIGS["bbox_geo"], frozenset(kind.terms), splitter(random_logits(8), s), s, allowed)
    assert measures["ciou"].count.item() == 4


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_uses_allowed_positions_only(module):
    allowed = torch.zeros(len(MIXED.ids), dtype=torch.bool)
    kind, logits = MODULES[module], random_logits()
    config = CONFIGS.get(module) or coord_config()
    measures = kind.run(config, frozenset(kind.terms), splitter(logits, MIXED), MIXED, allowed)
    assert all(measure.sum.item() == 0 and measure.count.item() == 0 for measure in measures.values())


def test_polygons_are_not_used_as_boxes():
    polygon = supervision(*((Role.tail_coord, value) for value in (10, 10, 50, 10, 50, 90)))
    polygon.sides.zero_()
    assert run("bbox_geo", random_logits(6), polygon)["ciou"].count.item() == 0


@pytest.mark.scenario("R28.C4", on="pure")
@pytest.mark.parametrize("module", ["token_ce", "coord_reg", "bbox_geo"])
@pytest.mark.parametrize("seed", [0, 1])
def test_finite_differences_agree_with_the_gradient_of_every_term(module, seed):
    logits = random_logits(seed=seed)
    columns = torch.tensor([1, 2, 3, 4, FIRST, FIRST + 10, FIRST + 201, FIRST + 700, FIRST + 999, 1007, 1009])
    narrow = logits[:, columns].clone().requires_grad_()
    # Diagnostics have no gradient, and that of ciou treats alpha as a constant.
    terms = [name for name, spec in MODULES[module].terms.items() if spec.weight is not None and name != "ciou"]

    def sums(narrow):
        measures = run(module, logits.index_copy(1, columns, narrow), terms=terms)
        return tuple(measures[name].sum for name in terms)

    assert gradcheck(sums, (narrow,), eps=1e-5, atol=1e-6)
    for total in sums(narrow):
        assert torch.autograd.grad(total, narrow, retain_graph=True)[0].abs().sum() > 0


@pytest.mark.parametrize("module", sorted(MODULES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_and_half_precision_logits_give_finite_sums_and_gradients(module, dtype, value):
    logits = random_logits(dtype=dtype)
    logits[::2, ::3] = value
    logits[1] = value
    logits.requires_grad_()
    measures = run(module, logits)
    total = sum(measure.sum for measure in measures.values())
    assert torch.isfinite(total)
    total.backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.scenario("R29.C6", on="pure")
def test_diagnostics_describe_the_distribution():
    s = supervision((Role.tail_coord, 5), (Role.tail_structure, 2))
    logits = torch.zeros(2, 1010, dtype=torch.float64)
    measures = {name: (m.sum.item(), m.count.item()) for name, m in run("coord_diag", logits, s).items()}
    assert measures == {
        "entropy": (pytest.approx(math.log(1000)), 1),
        "top_probability": (pytest.approx(1e-3), 1),
        "target_probability": (pytest.approx(1e-3), 1),
        "coord_mass": (pytest.approx(1000 / 1010), 1),
        "text_coord_mass": (pytest.approx(1000 / 1010), 1),
    }
