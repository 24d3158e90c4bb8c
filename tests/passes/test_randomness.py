"""Random numbers in a graph: torch's in distribution, one and the same under every plan, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import Manual
from autopar.errors import CaptureError, InputError
from autopar.planner.session import open_session
from autopar.verify import _run_staged, _run_whole, _Virtual
from tests.marks import few

aten = torch.ops.aten

SAMPLES, CHANNELS, PLACES = 64, 12, 4
BY_CHANNEL = SAMPLES * CHANNELS
BY_ELEMENT = BY_CHANNEL * PLACES

DRAWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "dropout": (lambda x: functional.dropout(x, 0.3), BY_ELEMENT),
    "dropout1d": (lambda x: functional.dropout1d(x, 0.3), BY_CHANNEL),
    "dropout2d": (lambda x: functional.dropout2d(x.unsqueeze(-1), 0.3).squeeze(-1), BY_CHANNEL),
    "alpha_dropout": (lambda x: functional.alpha_dropout(x, 0.3, training=True), BY_ELEMENT),
    "feature_alpha_dropout": (lambda x: functional.feature_alpha_dropout(x, 0.3, training=True), BY_CHANNEL),
    "rrelu": (lambda x: functional.rrelu(x, 0.1, 0.6, training=True), BY_ELEMENT),
    "rrelu at rest": (lambda x: functional.rrelu(x, 0.1, 0.6), BY_ELEMENT),
    "bernoulli": (lambda x: x * torch.bernoulli(torch.sigmoid(x)), BY_ELEMENT),
    "bernoulli of a number": (lambda x: x * torch.bernoulli(x, 0.7), BY_ELEMENT),
    "stochastic depth": (lambda x: x * (torch.rand(x.shape[0], 1, 1, device=x.device) + 0.7).floor(), SAMPLES),
    "rand_like": (lambda x: x + torch.rand_like(x), BY_ELEMENT),
    "randn_like": (lambda x: x + 2 * torch.randn_like(x), BY_ELEMENT),
    "randn": (lambda x: x + torch.randn(x.shape, device=x.device), BY_ELEMENT),
    "randint": (lambda x: x + torch.randint(-3, 5, x.shape, device=x.device), BY_ELEMENT),
    "randint_like": (lambda x: x + torch.randint_like(x, 2, 7), BY_ELEMENT),
    "normal of a mean": (lambda x: x + torch.normal(x.detach(), 3.0), BY_ELEMENT),
    "normal of a deviation": (lambda x: x + torch.normal(1.0, torch.arange(1.0, 5.0, device=x.device).expand_as(x)), BY_ELEMENT),
    "normal of numbers": (lambda x: x + torch.normal(1.0, 3.0, x.shape, device=x.device), BY_ELEMENT),
}
IN_PLACE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "dropout": (lambda x: functional.dropout(x.clone(), 0.3, inplace=True), BY_ELEMENT),
    "rrelu": (lambda x: functional.rrelu(x.clone(), 0.1, 0.6, training=True, inplace=True), BY_ELEMENT),
    "bernoulli_": (lambda x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.8).div_(0.8), SAMPLES),
    "bernoulli_ of probabilities": (lambda x: x * torch.empty_like(x).bernoulli_(torch.sigmoid(x[0])), BY_ELEMENT),
    "uniform_": (lambda x: x + torch.empty_like(x).uniform_(-3, 2), BY_ELEMENT),
    "normal_": (lambda x: x + torch.empty_like(x).normal_(1, 3), BY_ELEMENT),
    "exponential_": (lambda x: x + torch.empty_like(x).exponential_(0.7), BY_ELEMENT),
    "gumbel_softmax": (lambda x: functional.gumbel_softmax(x, tau=0.5), BY_ELEMENT),
}
FAMILIES = {"functional": DRAWS, "in place": IN_PLACE}
PLANS = (
    Manual(dp=4),
    Manual(tp=4),
    Manual(dp=2, tp=2, recompute="full"),
    Manual(dp=4, tp=1, zero=3, micro_batch=16),
    Manual(dp=1, tp=2, pp=2, micro_batch=16),
)


class Drawn(nn.Module):
    """Hidden numbers of -1, 0 and 1, worked out without rounding, and everything that is drawn for them."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.draws = FAMILIES[family]
        self.up = nn.Linear(8, CHANNELS * PLACES, bias=False)
        self.down = nn.Linear(CHANNELS * PLACES, 1, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(torch.randint(-2, 3, self.up.weight.shape))
            self.down.weight.copy_(torch.randint(-2, 3, self.down.weight.shape))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.up(x).clamp(-1, 1).unflatten(1, (CHANNELS, PLACES))
        drawn = [draw(hidden) for draw, _ in self.draws.values()]
        total = drawn[0]
        for other in drawn[1:]:
            total = total + other
        return self.down(total.flatten(1)).mean(), *drawn


@cache
def on_virtual_ranks(family: str, manual: Manual) -> _Virtual:
    torch.manual_seed(0)
    model, x = Drawn(family), torch.randint(-1, 2, (SAMPLES, 8)).float()
    plan, normal = autopar.plan(model, 4, (x,), plan=manual), open_session(model, (x,), {}, symbolic=False).normal
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()} | {"x": x}
    is_whole = plan.pipeline.stages == plan.pipeline.microbatches == 1
    return (_run_whole if is_whole else _run_staged)(normal, plan, tensors)


@pytest.mark.parametrize("family, manual", few(3, [*product(["functional"], PLANS[1:]), *product(["in place"], PLANS[:0:-1])]), ids=str)
def test_numbers_do_not_depend_on_the_plan(family: str, manual: Manual) -> None:
    expected, found = on_virtual_ranks(family, PLANS[0]), on_virtual_ranks(family, manual)
    for outputs in found.outputs:
        for name, ours, theirs in zip(FAMILIES[family], outputs[1:], expected.outputs[0][1:], strict=True):
            assert torch.equal(ours, theirs), name
    for name, grad in expected.grads.items():
        torch.testing.assert_close(found.grads[name], grad)


@pytest.mark.parametrize("family, name", [(family, name) for family, draws in FAMILIES.items() for name in draws])
def test_numbers_are_distributed_as_those_of_torch(family: str, name: str) -> None:
    """By the test of Kolmogorov and Smirnov."""
    found = on_virtual_ranks(family, PLANS[0]).outputs[0][1 + [*FAMILIES[family]].index(name)]
    draw, independent = FAMILIES[family][name]
    torch.manual_seed(1)
    x = torch.randint(-1, 2, (SAMPLES, 8)).float()
    hidden = Drawn(family).up(x).detach().clamp(-1, 1).unflatten(1, (CHANNELS, PLACES))
    theirs = draw(hidden)
    assert found.dtype == theirs.dtype
    assert abs(float(found.mean() - theirs.mean())) < 5 * float(theirs.std()) * (2 / independent) ** 0.5
    samples = [x.flatten().to(torch.float64).round(decimals=4).sort().values for x in (found, theirs)]
    steps = [torch.searchsorted(sample, torch.cat(samples).unique(), right=True) / len(sample) for sample in samples]
    assert float((steps[0] - steps[1]).abs().max()) < 1.95 * (2 / independent) ** 0.5  # one in a thousand is further apart


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(self.linear(x)).sum()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x[:, torch.randperm(8, device=x.device)],
        lambda x: x * torch.multinomial(x.softmax(-1), 1),
        lambda x: x * torch.poisson(x.abs()),
    ],
    ids=["randperm", "multinomial", "poisson"],
)
def test_other_random_numbers_are_refused(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="draws random numbers"):
        autopar.plan(Noisy(draw), 2, (torch.randn(4, 8),))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_generator_is_refused(device: str) -> None:
    generator = torch.Generator()
    with pytest.raises(CaptureError, match=r"a generator of its own \(test_randomness.py:\d+ .*rand\(8, generator=generator"):
        autopar.plan(Noisy(lambda x: x + torch.rand(8, generator=generator)).to(device), 2, (torch.randn(4, 8),))
    with pytest.raises(CaptureError, match="a generator of its own"):
        autopar.plan(Noisy(lambda x: x * torch.zeros_like(x).bernoulli_(0.5, generator=generator)), 2, (torch.randn(4, 8),))


def test_verify_needs_a_model_that_draws_nothing() -> None:
    model, batch = Noisy(lambda x: x + torch.randn_like(x)), (torch.randn(4, 8),)
    with pytest.raises(InputError, match="without random numbers"):
        autopar.verify(model, 2, batch)


class DroppedInPlace(nn.Module):
    """In-place ops bring decompositions, and with them ``native_dropout``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x).mul_(2.0), 0.3, self.training).sum()


def test_native_dropout_becomes_dropout() -> None:
    plan = autopar.plan(DroppedInPlace(), 2, (torch.randn(4, 8),))
    targets = {node.target for node in plan.graph.graph.nodes}
    assert aten.dropout.default in targets
    assert aten.native_dropout.default not in targets
