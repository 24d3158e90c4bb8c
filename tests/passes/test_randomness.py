"""Random numbers in a graph: dropout in all its forms, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError


class Noisy(nn.Module):
    """Draws random numbers other than by dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.linear(x + torch.randn_like(x)).sum()
        return total


class DroppedInPlace(nn.Module):
    """In-place ops bring decompositions, and with them ``native_dropout``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x).mul_(2.0), 0.3, self.training).sum()


def test_random_numbers_other_than_dropout_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"randn_like.*draws random numbers"):
        autopar.plan(Noisy(), 2, (torch.randn(4, 8),))


def test_native_dropout_becomes_dropout() -> None:
    plan = autopar.plan(DroppedInPlace(), 2, (torch.randn(4, 8),))
    targets = {node.target for node in plan.graph.graph.nodes}
    assert torch.ops.aten.dropout.default in targets
    assert torch.ops.aten.native_dropout.default not in targets
