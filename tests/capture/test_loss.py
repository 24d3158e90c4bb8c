"""A model and its loss are called as one: with targets for the loss, without them to predict."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import Manual
from autopar.capture.loss import WithLoss
from autopar.cost.machine import MachineProfile
from autopar.errors import CaptureError, MicrobatchError
from tests.pool import RankPool
from tests.runtime.test_train import DEVICE, LINK

X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


@pytest.mark.parametrize("loss_fn", [functional.cross_entropy, nn.CrossEntropyLoss(), lambda output, y: (output - y[:, None]).sum()])
def test_a_call_without_targets_gives_outputs(loss_fn: Any) -> None:
    model = nn.Linear(8, 4)
    whole = WithLoss(model, loss_fn)
    assert torch.equal(whole(X, Y), loss_fn(model(X), Y))
    model.eval()
    assert torch.equal(whole(X, Y), loss_fn(model(X), Y))
    assert torch.equal(whole(X), model(X))


def spread(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y) / output.std()  # of all samples


class Spread(nn.Module):
    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return spread(output, y)


@torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
def decorated(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return spread(output, y)


@pytest.mark.parametrize(
    "loss_fn, line", [(spread, "/ output.std()  # of all"), (decorated, "/ output.std()  # of all"), (Spread(), "return spread(output, y)")]
)
def test_what_is_wrong_with_a_loss_is_said_of_its_own_line(loss_fn: Any, line: str) -> None:
    with pytest.raises(MicrobatchError, match=rf"aten.std.correction \(test_loss.py:\d+ .*{re.escape(line)}"):
        autopar.verify(nn.Linear(8, 4), 2, (X, Y), Manual(dp=2, microbatches=2), loss_fn=loss_fn)


def test_ops_of_a_model_of_torch_with_a_loss_have_lines_of_torch() -> None:
    plan = autopar.plan(nn.Linear(8, 4), autopar.Cluster(1, 2, "h100"), (X, Y), loss_fn=functional.cross_entropy, plan=Manual(dp=2))
    line = next(op.line for op in plan.ops if op.op.startswith("aten.linear"))
    assert line.startswith("linear.py:")


def test_losses_of_outputs_alone_are_losses_always() -> None:
    model = nn.Linear(8, 4).eval()
    for loss_fn in (lambda output: output.square().mean(), torch.sum):
        assert WithLoss(model, loss_fn)(X).shape == ()


def test_a_loss_that_brings_its_own_targets_is_one() -> None:
    """It looks like the function that it wraps, and wants less."""

    @functools.wraps(functional.cross_entropy)
    def own(output: torch.Tensor, *rest: Any) -> torch.Tensor:
        return functional.cross_entropy(output, Y, *rest)

    model = nn.Linear(8, 4)
    for made in (WithLoss(model, own), WithLoss(model.eval(), own)):
        assert torch.equal(made(X), functional.cross_entropy(model(X), Y))


def test_targets_that_lack_in_training_are_asked_for() -> None:
    model = nn.Linear(8, 4)
    text = "the call is of Linear and its loss_fn cross_entropy, and what Linear.forward does not take goes to that: .*'target'; give"
    with pytest.raises(CaptureError, match=text):
        WithLoss(model, functional.cross_entropy)(X)
    with pytest.raises(CaptureError, match="'target'; give the call"):
        WithLoss(model.eval(), functional.cross_entropy)(X, targets=Y)
    with pytest.raises(CaptureError, match="the call is of Linear and its loss_fn cross_entropy"):
        autopar.plan(nn.Linear(8, 4), 2, (X,), plan=Manual(dp=2), loss_fn=functional.cross_entropy)


def predict(rank: int) -> str:
    """Between steps, under stages; the error of a step without targets."""
    reference = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    plan = Manual(pp=2, dp=2, zero=1, microbatches=2)
    profile = MachineProfile(DEVICE, (LINK,) * len(plan.grid(4).sizes))
    model = copy.deepcopy(reference)
    model = autopar.parallelize(model, 4, plan=plan, profile=profile, loss_fn=functional.cross_entropy, example_batch=(X, Y))
    optimizers = [torch.optim.SGD(own.parameters(), 0.1) for own in (model, reference)]
    for _ in range(2):
        model(X, Y).backward()
        functional.cross_entropy(reference(X), Y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(X), reference(X))
        torch.testing.assert_close(model(X[:5]), reference(X[:5]))
        model.train()
    with pytest.raises(CaptureError) as caught:
        model(X)
    return str(caught.value)


@pytest.mark.slow
def test_predictions_between_steps(ranks: RankPool) -> None:
    for text in ranks.run(predict):
        assert text.startswith("the call is of Sequential and its loss_fn cross_entropy")
