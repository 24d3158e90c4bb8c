"""Warnings point at the user's line, whatever lies between."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, Manual
from autopar.callers import user_level
from autopar.errors import PlanError
from autopar.factors import MissingRuleWarning
from autopar.solve.manual import UnusedSettingWarning


class Bags(nn.Module):
    """Bags that differ in size have no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.table(ids, torch.tensor([0, 1, 3])).sum()
        return loss


class Inside(nn.Module):
    """Plans in a forward, as the first call of a parallel model does."""

    def forward(self) -> None:
        autopar.plan(Bags(), Cluster(1, 2, "h100"), (torch.zeros(4, dtype=torch.long),), plan=Manual(tp=2, zero=1))


def test_warnings_point_at_the_user() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Inside()()
    lines = {one.category: (one.filename, one.lineno) for one in caught}
    assert {*lines} >= {MissingRuleWarning, UnusedSettingWarning}
    here = (__file__, Inside.forward.__code__.co_firstlineno + 1)
    assert lines[MissingRuleWarning] == lines[UnusedSettingWarning] == here


class Ours(nn.Module):
    """As a parallel model: torch calls what is ours."""

    forward = staticmethod(user_level)


def test_calls_by_torch_are_passed_over() -> None:
    """From the caller of `user_level`, frames of torch, to this one."""
    level, frames = Ours()(), ["_call_impl", "_wrapped_call_impl"]
    assert level == len(frames) + 1


def test_a_profile_that_is_no_file() -> None:
    with pytest.raises(PlanError, match=r"^profile='cpu' is no file; it takes .* a file that `autopar profile --out` wrote"):
        autopar.plan(nn.Linear(4, 4), 2, (torch.zeros(2, 4),), profile="cpu")
