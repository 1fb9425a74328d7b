"""The split of the vocabulary that all losses and diagnostics use, and how it treats extreme logits (R38)."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck

from coordexp.data import BINS
from coordexp.objective.split import Split, SplitRequest, SplittingHead, split_vocabulary
from tests.unit.objective.streams import FIRST, MIXED, MODULES, SIZE, random_logits, splitter

COORDS = slice(FIRST, FIRST + BINS)
IDS = MIXED.ids


@pytest.mark.scenario("R29.C3", on="pure")
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_gates_are_minus_log_of_explicit_probabilities(temperature):
    logits = random_logits()
    p = (logits / temperature).softmax(-1)
    mass = p[:, COORDS].sum(-1)
    split = split_vocabulary(logits, IDS, FIRST, temperature)
    assert torch.allclose(split.coord_gate(), -mass.log())
    assert torch.allclose(split.text_gate(), -(1 - mass).log())
    assert torch.allclose(split.coord_mass(), mass)
    assert torch.allclose(split.cross_entropy(), -p[torch.arange(len(IDS)), IDS].log())


@pytest.mark.scenario("R29.C4", on="pure")
def test_cross_entropy_and_its_gradient_are_equal_to_those_of_torch():
    ours, theirs = (random_logits().requires_grad_() for _ in range(2))
    split_vocabulary(ours, IDS, FIRST).cross_entropy().sum().backward()
    torch.nn.functional.cross_entropy(theirs, IDS, reduction="sum").backward()
    assert torch.allclose(ours.grad, theirs.grad)


def test_gates_stay_exact_where_one_side_has_nearly_all_mass():
    logits = torch.full((2, SIZE), -40.0)
    logits[0, FIRST + 7] = logits[1, 2] = 40.0
    split = split_vocabulary(logits, torch.tensor([2, FIRST]), FIRST)
    exact = 80 - math.log(SIZE - BINS)
    assert split.text_gate()[0].item() == pytest.approx(exact, rel=1e-6)
    assert split.coord_gate()[1].item() == pytest.approx(80 - math.log(BINS), rel=1e-6)
    assert split.coord_gate()[0].item() == pytest.approx(math.exp(-exact), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_finite_differences_agree_with_every_output(temperature):
    logits = torch.randn(3, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([2, FIRST + 3, 1008])  # text, a coordinate, behind the coordinates
    narrow = torch.cat((logits[:, :8], logits[:, -6:]), dim=1).requires_grad_()

    def outputs(narrow: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all differences between the three outputs. Losses depend on nothing else."""
        wide = torch.cat((narrow[:, :8], logits[:, 8:-6], narrow[:, 8:]), dim=1)
        split = split_vocabulary(wide, ids, FIRST, temperature)
        coord, target, log_text = split.coord, split.target, split.log_text
        return coord - log_text[:, None], target - log_text, coord - target[:, None]

    assert gradcheck(outputs, (narrow,))


BROKEN = [math.nan, math.inf, -math.inf, 3e38, -3e38]


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_broken_logits_give_finite_outputs_and_are_counted(value, dtype):
    logits = random_logits(dtype=dtype)
    logits[:, FIRST + 3] = value
    logits[1] = value
    logits[3, 2] = logits[7, 1007] = value
    leaf = logits.clone().requires_grad_()
    split = split_vocabulary(leaf, IDS, FIRST)
    assert split.broken.tolist() == (~(logits.abs() <= 1e4)).sum(1).tolist()
    outputs = [split.cross_entropy(), split.coord_gate(), split.text_gate(), split.coord_mass(), split.coord]
    assert all(torch.isfinite(output).all() for output in outputs)
    sum(output.sum() for output in outputs).backward()
    assert torch.isfinite(leaf.grad).all()
    assert (leaf.grad[1] == 0).all()


@pytest.mark.scenario("R38.C1", "R38.S1", on="pure")
@pytest.mark.parametrize("value", BROKEN)
def test_every_consumer_sees_the_same_gate_values(value):
    """Loss terms and diagnostics on the same logits equal the values of the split."""
    logits = random_logits(dtype=torch.float32)
    logits[0, FIRST + 5] = logits[4, 9] = logits[11, 2] = value
    helper = split_vocabulary(logits, IDS, FIRST, 2.0)
    everything = torch.ones(len(IDS), dtype=torch.bool)

    class Config:
        temperature, target_sigma, target_truncate = 2.0, 2.0, 8

    terms = frozenset({"coord_gate", "text_gate"})
    trained = MODULES["coord_reg"].run(Config(), terms, splitter(logits, MIXED), MIXED, everything)
    coord = ~torch.isnan(MIXED.coord_targets)
    assert trained["coord_gate"].sum.item() == pytest.approx(helper.coord_gate()[coord].sum().item(), rel=1e-6)
    assert trained["text_gate"].sum.item() == pytest.approx(helper.text_gate()[~coord].sum().item(), rel=1e-6)
    plain = split_vocabulary(logits, IDS, FIRST)
    diagnostics = MODULES["coord_diag"].run(
        None, frozenset({"coord_mass", "text_coord_mass"}), splitter(logits, MIXED), MIXED, everything
    )
    assert diagnostics["coord_mass"].sum.item() == pytest.approx(
        (-plain.coord_gate()[coord]).exp().sum().item(), rel=1e-5
    )
    assert diagnostics["text_coord_mass"].sum.item() == pytest.approx(
        (1 - (-plain.text_gate()[~coord]).exp()).sum().item(), rel=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_logits_in_several_chunks_give_the_result_of_one_chunk(monkeypatch, temperature):
    results = []
    for chunk in (1 << 20, 2 * SIZE + 1):
        monkeypatch.setattr("coordexp.objective.split._CHUNK", chunk)
        logits = random_logits().requires_grad_()
        split = split_vocabulary(logits, IDS, FIRST, temperature)
        weights = torch.linspace(0.5, 2, len(IDS))
        ((split.cross_entropy() + split.coord_gate() + split.coord.square().sum(-1)) * weights).sum().backward()
        results.append((split.log_text.detach(), logits.grad))
    assert torch.allclose(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1])


@pytest.mark.scenario("R38.C1", on="pure")
def test_logits_are_clamped_to_ten_thousand_and_nan_counts_as_zero():
    broken, mended = random_logits(), random_logits()
    for column, (value, instead) in enumerate(((math.nan, 0.0), (math.inf, 1e4), (-math.inf, -1e4), (3e4, 1e4))):
        broken[column, FIRST + 2], mended[column, FIRST + 2] = value, instead
    of_broken, of_mended = (split_vocabulary(logits, IDS, FIRST) for logits in (broken, mended))
    assert torch.equal(of_broken.coord, of_mended.coord)
    assert torch.equal(of_broken.cross_entropy(), of_mended.cross_entropy())
    assert torch.equal(of_broken.text_gate(), of_mended.text_gate())
    assert (of_broken.broken.sum().item(), of_mended.broken.sum().item()) == (4, 0)


@pytest.mark.parametrize("offset", [30.0, 3000.0])
def test_a_common_offset_of_all_logits_costs_no_precision(offset):
    gradients = []
    for shift in (0.0, offset):
        logits = (
            ((random_logits() * 8).round() / 8 + shift).float().requires_grad_()
        )  # exact in float32 with the offset
        split_vocabulary(logits, IDS, FIRST).cross_entropy().sum().backward()
        gradients.append(logits.grad)
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-7)


class FakeModel(torch.nn.Module):
    """A vocabulary projection without a model."""

    def __init__(self, hidden_size: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(hidden_size, SIZE, bias=False, dtype=torch.float64)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=SIZE))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden[None])[0]


def run_head(monkeypatch, positions: int) -> tuple[torch.Tensor, ...]:
    """Return the split of all positions, and the gradients of hidden states and weights, if the head projects so
    many positions at once."""
    monkeypatch.setattr("coordexp.objective.split.PROJECTED", positions * SIZE)
    model = FakeModel()
    head = SplittingHead(model)
    hidden = torch.randn(len(IDS), 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden.requires_grad_()
    request = SplitRequest(IDS, FIRST, (1.0, 2.0))
    with head.splitting(request):
        split = Split(model(hidden), request.temperatures)
    warm, cold = split(2.0), split(1.0)
    values = cold.cross_entropy() + warm.coord_gate() + cold.coord.square().sum(-1)
    (values * torch.linspace(0.5, 2, len(IDS))).sum().backward()
    assert model(hidden).shape == (len(IDS), SIZE), "without a request, the head returns logits"
    return split.columns.detach(), hidden.grad, model.head.weight.grad


def test_a_head_that_splits_in_chunks_gives_the_result_of_whole_logits(monkeypatch):
    whole = run_head(monkeypatch, len(IDS))
    for positions in (1, 5):
        for ours, expected in zip(run_head(monkeypatch, positions), whole, strict=True):
            assert expected.abs().max() > 0
            assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_the_split_of_whole_logits_is_that_of_every_temperature(monkeypatch):
    columns, _, _ = run_head(monkeypatch, 5)
    model = FakeModel()
    hidden = torch.randn(len(IDS), 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = model(hidden).detach()
    for temperature in (1.0, 2.0):
        ours, expected = Split(columns, (1.0, 2.0))(temperature), split_vocabulary(logits, IDS, FIRST, temperature)
        for name in ("coord", "target", "log_text"):
            assert torch.allclose(getattr(ours, name), getattr(expected, name))
    with pytest.raises(ValueError, match=r"at the temperatures 1.0, 2.0, not at 1.5"):
        Split(columns, (1.0, 2.0))(1.5)


def test_chunks_keep_no_logits_for_the_backward_pass(monkeypatch):
    """Tensors as wide as the vocabulary are dropped before the backward pass, apart from the weights."""
    monkeypatch.setattr("coordexp.objective.split.PROJECTED", 5 * SIZE)
    model, kept = FakeModel(), []
    request = SplitRequest(IDS, FIRST, (1.0,))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    hidden = torch.randn(len(IDS), 16, dtype=torch.float64, requires_grad=True)
    with SplittingHead(model).splitting(request), torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        columns = model(hidden)
    assert columns.shape == (len(IDS), BINS + 3)
    assert not [shape for shape in kept if SIZE in shape and shape != tuple(model.head.weight.shape)]
