"""The memory of small models that are no transformers is as predicted, too."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import Manual
from tests import models
from tests.marks import few

pytestmark = pytest.mark.slow


class Pooled(nn.Module):
    """A convolution, a norm by groups, and products with a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(8, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        z = functional.elu(self.norm(self.first(x)))
        z = z * z.mean(-1, keepdim=True)
        return functional.cross_entropy(self.last(z.mean(-1)), labels)


class Convolved(nn.Module):
    """Convolutions with norms by batches beside what they read."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
        layer = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.layers = nn.ModuleList(deepcopy(nn.Sequential(*layer)) for _ in range(layers))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = functional.relu(x + layer(x))
        return functional.cross_entropy(self.last(x.mean((2, 3))), labels)


def pooled() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Pooled(), {"x": torch.empty(24, 8, 64), "labels": torch.zeros(24, dtype=torch.long)}


def convolved() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Convolved(), {"x": torch.empty(24, 3, 16, 16), "labels": torch.zeros(24, dtype=torch.long)}


CASES: list[tuple[Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]], Manual]] = [
    (pooled, Manual(dp=4)),  # parts of inputs, and gradients that are views
    (convolved, Manual(dp=1)),  # statistics of channels, and one gradient of two summands
    (models.nn_transformer, Manual(dp=4)),  # parts of weights are views
    (pooled, Manual(dp=2, tp=2)),
    (pooled, Manual(dp=2, microbatches=4)),
    (pooled, Manual(dp=4, zero=3)),
    (models.nn_transformer, Manual(dp=2, tp=2)),
]


@pytest.mark.parametrize("make, config", few(3, CASES))
def test_memory_is_as_predicted(make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]], config: Manual) -> None:
    model, batch = make()
    plan = autopar.plan(model, autopar.Cluster(1, config.dp * config.tp, "h200"), batch, plan=config)
    found = autopar.check(model, plan, batch)
    assert not found.findings
    assert all(0.95 <= memory.ratio <= 1.01 for memory in found.memory)
