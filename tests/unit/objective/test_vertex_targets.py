"""The targets of a matched polygon, from the text of the rollout to the soft labels in the loss (R28).

The expected values are computed independently: the transport plan with POT, its projection and the soft labels
with numpy.
"""

from dataclasses import dataclass

import numpy as np
import ot
import pytest
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from coordexp.answers import transport
from coordexp.answers.correct import correct
from coordexp.answers.segment import Role
from coordexp.answers.transport import coord_targets
from coordexp.config.rollout import OptimalTransport, RolloutMatching
from coordexp.data import BINS, Geometry, TrueObject
from coordexp.objective.carry import Example
from coordexp.objective.collate import _supervision, kind_counts
from coordexp.objective.pipeline import Objective
from tests.rows import measure_logits, on_both_channels, settings
from tests.unit.answers.conftest import PROMPT, answer, box, entry, poly
from tests.unit.config.trees import COORD_REG
from tests.vocabularies import table

Floats = NDArray[np.float64]
SMALL = table("small")

TRIANGLE = poly(604, 598, 803, 603, 699, 706)
HEPTAGON = poly(600, 610, 690, 570, 790, 590, 830, 650, 770, 720, 680, 730, 610, 690)
PENTAGON = poly(605, 600, 720, 560, 820, 620, 780, 715, 630, 720)
BOX = box(590, 575, 835, 735)
PAIRS = {
    "poly to poly with more vertices": (TRIANGLE, HEPTAGON),
    "poly to poly with fewer vertices": (HEPTAGON, PENTAGON),
    "poly to box": (PENTAGON, BOX),
    "box to poly": (BOX, HEPTAGON),
}
TRANSPORT = {
    "default": OptimalTransport(),
    "soft plan by l1": OptimalTransport(cost="l1", epsilon=0.3),
}


@pytest.fixture(autouse=True)
def exact_plans(monkeypatch):
    monkeypatch.setattr(transport, "MAX_ITERATIONS", 20_000)
    monkeypatch.setattr(transport, "TOLERANCE", 1e-9)


def points_of(shape: Geometry) -> Floats:
    if shape.kind == "poly":
        return np.array(shape.bins, dtype=np.float64).reshape(-1, 2)
    x1, y1, x2, y2 = shape.bins
    return np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], dtype=np.float64)


@dataclass(frozen=True)
class Expected:
    """The targets from the barycentric projection, and those from the most likely partner of each vertex alone."""

    barycentric: Floats
    argmax: Floats


def compute_expected(predicted: Geometry, true: Geometry, transport: OptimalTransport) -> Expected:
    """Compute targets with POT. Both shapes are centred, epsilon is relative to the smaller one (D18), and
    all points have the same weight."""
    here, there = points_of(predicted), points_of(true)
    centred = [points - (points.min(axis=0) + points.max(axis=0)) / 2 for points in (here, there)]
    epsilon = transport.epsilon * min(np.ptp(points, axis=0).max() for points in (here, there))
    plan = ot.sinkhorn(
        np.full(len(here), 1 / len(here)),
        np.full(len(there), 1 / len(there)),
        cdist(*centred, metric="cityblock" if transport.cost == "l1" else "euclidean"),
        epsilon,
        method="sinkhorn_log",
        numItermax=20_000,
        stopThr=1e-10,
    )
    shares = plan / plan.sum(axis=1, keepdims=True)
    return Expected(*(per_token(predicted, landed) for landed in (shares @ there, there[shares.argmax(axis=1)])))


def per_token(predicted: Geometry, landed: Floats) -> Floats:
    """Return one target per coordinate token. The corners of a box are x1y1, x2y1, x2y2, x1y2. The target of
    a token is the mean of the two corners that share it."""
    if predicted.kind == "poly":
        return landed.reshape(-1)
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = landed
    return np.array([(ax + dx) / 2, (ay + by) / 2, (bx + cx) / 2, (cy + dy) / 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        (box(24, 124, 488, 675), poly(251, 300, 40, 800, 139, 846, 401, 13, 491, 545, 573, 280)),
        (poly(503, 491, 536, 870, 739, 180, 783, 830, 479, 492, 962, 502), box(244, 242, 580, 331)),
    ],
)
def test_the_targets_of_unlike_shapes_have_converged_with_the_default_settings(pair):
    """With 200 iterations, they are 1 to 2 bins off."""
    (targets,) = coord_targets([pair], OptimalTransport())
    assert np.abs(np.array(targets) - compute_expected(*pair, OptimalTransport()).barycentric).max() < 0.1


@pytest.mark.scenario("R28.C1", "R28.C2", "R28.C3", "R28.C5", on="pure")
@pytest.mark.parametrize("transport", TRANSPORT)
@pytest.mark.parametrize("pair", PAIRS)
def test_targets_are_the_barycentric_projection_of_pots_plan(pair, transport):
    predicted, true = PAIRS[pair]
    expected = compute_expected(predicted, true, TRANSPORT[transport])
    apart = np.abs(expected.barycentric - expected.argmax).max()
    assert apart > 4, "with these shapes, a mixture with the most likely vertex would be noticed"
    (targets,) = coord_targets([(predicted, true)], TRANSPORT[transport])
    assert np.abs(np.array(targets) - expected.barycentric).max() < 1e-3


@pytest.mark.scenario("R28.C1", "R28.C5", on="pure")
def test_the_tokens_of_a_box_are_left_top_right_and_bottom():
    """The true polygon has its four sides at different distances, so that no two tokens have the same target."""
    predicted, true = box(100, 200, 300, 400), poly(90, 190, 330, 190, 330, 450, 90, 450)
    (targets,) = coord_targets([(predicted, true)], TRANSPORT["default"])
    assert targets == pytest.approx((90, 190, 330, 450), abs=1)


def soft_labels(example: Example) -> tuple[NDArray[np.int64], Floats]:
    """Return the labels that the loss uses, from its gradient. If all logits are equal, the gradient of soft cross
    entropy is the uniform distribution minus the label."""
    only_soft = dict.fromkeys(("coord_ce_weight", "w1_weight", "coord_gate_weight", "text_gate_weight"), 0.0)
    objective = Objective(
        settings(on_both_channels(COORD_REG, soft_ce_weight=1.0, **only_soft)), SMALL.first_coord
    )
    kept = np.flatnonzero(np.isin(example.segment.roles, (Role.matched_coord, Role.tail_coord)))
    counts = kind_counts([example])
    logits = torch.zeros(len(kept), len(SMALL.pieces), dtype=torch.float64, requires_grad=True)
    objective.loss(measure_logits(objective, logits, _supervision([example], [kept])), counts).backward()
    assert logits.grad is not None
    gradient = logits.grad[:, SMALL.first_coord : SMALL.first_coord + BINS].numpy() * len(kept)
    return kept, 1 / BINS - gradient


def gaussian(target: float, sigma: float, truncate: int) -> Floats:
    distance = np.arange(BINS) - target
    label = np.where(np.abs(distance) <= truncate, np.exp(-0.5 * (distance / sigma) ** 2), 0.0)
    return label / label.sum()


@pytest.mark.scenario("R28.S1", on="pure")
@pytest.mark.parametrize("pair", PAIRS)
def test_each_coordinate_token_of_a_matched_shape_has_a_soft_label_around_its_projection(pair):
    predicted, true = PAIRS[pair]
    transport = TRANSPORT["default"]
    expected = compute_expected(predicted, true, transport)
    text = answer(entry("object_1", "roof", predicted))
    correction = correct(
        PROMPT,
        SMALL.encode(text.encode()),
        [TrueObject("roof", true)],
        table=SMALL,
        order="desc_first",
        settings=RolloutMatching(optimal_transport=transport, maskiou_gate=0.1),
    )
    assert correction.match.pairs == ((0, 0),)
    where = len(PROMPT) + np.array(correction.parsed.valid[0].coord_indices)
    assert (correction.segment.ids[where] - SMALL.first_coord).tolist() == list(predicted.bins)
    kept, labels = soft_labels(Example(correction.segment, "image.png", (64, 64), "B"))
    assert kept.tolist() == where.tolist(), "each of its coordinates, and no other token"
    for target, label in zip(expected.barycentric, labels, strict=True):
        assert np.abs(label - gaussian(target, sigma=2.0, truncate=8)).max() < 1e-3
        peak = int(label.argmax())
        assert (np.diff(label[: peak + 1]) >= -1e-9).all()
        assert (np.diff(label[peak:]) <= 1e-9).all(), "one mode"
        assert abs(peak - target) <= 0.51
