"""Recurrent layers: right on every rank, priced by their weights, and refused where they drop what differs between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle, product

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.cost.compute import evaluate, op_cost
from autopar.errors import CaptureError
from autopar.rules import rule_of
from autopar.rules.samples import Sample, real
from tests.marks import only

pytestmark = pytest.mark.slow

LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
PLANS = (Manual(dp=2, tp=2, zero=3), Manual(dp=4, microbatches=2))


class Tagger(nn.Module):
    """A class for every step of a sequence."""

    def __init__(self, layer: Callable[..., nn.RNNBase], *, dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(16, 4)
        self.layer = layer(8, 8, num_layers=layers, dropout=dropout, bidirectional=True, batch_first=True)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(self.embed(tokens))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(16, (8, 6)), torch.randint(4, (8, 6))


@pytest.mark.parametrize("layer, plan", only(zip(LAYERS, cycle(PLANS)), product(LAYERS, PLANS)), ids=str)
def test_a_plan_equals_the_model(layer: Callable[..., nn.RNNBase], plan: Manual) -> None:
    torch.manual_seed(0)
    found = autopar.verify(Tagger(layer), 4, batch(), plan)
    assert found.grad_error <= 4 * found.reference_error + 1e-7, str(found)
    assert found.loss_error <= 1e-6, str(found)


def test_every_step_is_multiplied_by_all_weights() -> None:
    """Of 3 steps of 4 sequences: 4 gates of a state of 6 come of an input of 5 and of the state."""
    weights = [real(24, 5), real(24, 6), real(24), real(24)]
    call = Sample(
        torch.ops.aten.lstm.input, (real(4, 3, 5), [real(1, 4, 6)] * 2, weights, True, 1, 0.0, True, False, True)
    ).call
    rule = rule_of(call)
    assert rule is not None
    sizes = rule.bind([spec.shape for spec in call.operands], [spec.shape for spec in call.results])
    cost = op_cost(call, rule)
    assert float(evaluate(cost.flops, sizes)) == 2 * 4 * 3 * 24 * (5 + 6)


def test_dropout_between_layers_is_refused() -> None:
    """It would differ between ranks; with one layer, or while it is not trained, there is none."""
    model = Tagger(nn.LSTM, dropout=0.5)
    with pytest.raises(CaptureError, match=r"aten\.lstm\.input draws random numbers"):
        autopar.verify(model, 4, batch(), Manual(dp=4))
    assert math.isfinite(autopar.verify(model.eval(), 4, batch(), Manual(dp=4)).grad_error)
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
        single = Tagger(nn.LSTM, dropout=0.5, layers=1)
    assert math.isfinite(autopar.verify(single, 4, batch(), Manual(dp=4)).grad_error)
