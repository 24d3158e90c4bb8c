"""What a rank runs for a kind of call knows of the stages of other ranks what it needs to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual
from autopar.cost.machine import MachineProfile
from tests.marks import few
from tests.pool import RankPool
from tests.runtime.test_train import DEVICE, LINK, whole

pytestmark = pytest.mark.slow


class Sometimes(nn.Module):
    """A weight of both stages, which some calls use in none, in the first alone, or where nothing is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.both = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        x = self.first(x).tanh()
        if kind in ("both", "first"):
            x = x + self.both(x)
        x = self.last(x)
        if kind == "both":
            x = x + self.both(x)
        if kind == "detached":
            x = x + self.both(x).detach()
        return x.square().mean()


KINDS = ("both", "none", "first", "detached", "none", "both")


def train(model: nn.Module) -> tuple[list[float], list[float | None]]:
    """Losses, and norms of the gradient of the weight."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    losses, norms = [], []
    for i, kind in enumerate(KINDS):
        loss = model(torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)), kind)
        loss.backward()
        grad = model.get_parameter("both.weight").grad
        norms.append(None if grad is None else float((grad.full_tensor() if isinstance(grad, DTensor) else grad).norm()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, norms


def train_beside_one_device(rank: int, zero: int) -> list[float | None]:
    reference, plan = Sometimes().double(), Manual(pp=2, dp=2, zero=zero, microbatches=2, stages=("last",))
    example = torch.ones(8, 8, dtype=torch.float64), "both"
    profile = MachineProfile(DEVICE, (LINK,) * len(plan.grid(4).sizes))
    model = autopar.parallelize(copy.deepcopy(reference), 4, plan=plan, profile=profile, example_batch=example)
    (losses, norms), (expected, by_one) = train(model), train(reference)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    found, weights = whole(model), whole(reference)
    torch.testing.assert_close(found, {name: weights[name] for name in found}, rtol=1e-9, atol=1e-12)
    assert [norm is None for norm in norms] == [norm is None for norm in by_one]
    return norms


@pytest.mark.parametrize("zero", few(1, [1, 0, 3]))
def test_a_parameter_of_several_stages_that_none_differentiates_has_no_gradient(ranks: RankPool, zero: int) -> None:
    """Gradients of zero would have momentum and weight decay move it."""
    for norms in ranks.run(train_beside_one_device, zero):
        assert [norm is None for norm in norms] == [False, True, False, True, True, False]
