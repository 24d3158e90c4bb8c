import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.solve.write import _Place, _shares


class Norms(nn.Module):
    """Four equal norms in a list, and one after it that is decided with them."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(4)])
        self.last = nn.LayerNorm(16)
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = x + block(x)
        loss: torch.Tensor = self.head(self.last(x)).square().mean()
        return loss


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return autopar.plan(Norms(), "dp=2", (torch.zeros(8, 16),), plan=autopar.Manual(dp=2))


@pytest.mark.parametrize(
    "name, told",
    [
        ("head", "of module head there are "),
        ("h.0.1.wieght", "alike are h.0.1.weight"),
        ("zzz", "print(plan) lists"),
        ("", "is called by a name"),
        (3, "got 3; print(plan) lists parameters"),
    ],
)
def test_an_unknown_name_is_told_what_there_is(plan: autopar.Plan, name: Any, told: str) -> None:
    with pytest.raises(PlanError, match=re.escape(told)):
        plan.explain(name)


def test_what_moves_is_told_of_each_place_in_the_model() -> None:
    norms = [_Place("h.0.ln_1.weight", "", 96), _Place("ln_f.weight", "", 1)]
    whole = _Place("h.0.ln_1.weight", "", 97 * 48)
    assert [place.number for place in _shares(whole, norms)] == [96 * 48, 48]
    assert _shares(whole._replace(number=5), norms) == [whole._replace(number=5)]
