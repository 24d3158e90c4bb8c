"""What a forward reads of its modules' own attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.reads import MISSING, Read, alike, hold, reading
from autopar.capture.trace import capture
from autopar.planner.session import open_session


class Scaled(nn.Module):
    """Reads what it has, what its class has and what it lacks, and whether there is a bias; and writes a count that it never reads."""

    offset = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.scale, self.count, self._sign = 2.0, 0, -1

    @property
    def factor(self) -> float:
        return self.scale * self._sign

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset + getattr(self, "more", 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.shifted(self.inner(x)) * self.factor).sum()


def test_what_is_read_is_noted() -> None:
    """Without methods, modules and tensors; of all modules, and only while it is read."""
    model = Scaled()
    with reading(model) as found:
        model(torch.ones(2, 4))
    model.count  # noqa: B018
    assert {(read.module, read.attribute): read.value for read in found} == {
        ("", "scale"): 2.0, ("", "_sign"): -1, ("", "offset"): MISSING, ("", "more"): MISSING, ("inner", "bias"): None
    }  # fmt: skip
    assert "__getattribute__" not in vars(nn.Module)


@pytest.mark.parametrize("attribute, value", [("scale", 3.0), ("offset", 0.5), ("more", 1.0)])
def test_what_was_captured_holds_while_it_is_so(attribute: str, value: float) -> None:
    model = Scaled()
    captured = capture(model, (torch.ones(2, 4),), {})
    assert Read("", "scale", 2.0) in captured.reads
    model.count, model.scale = 7, 1.0 + 1.0
    assert hold(captured.reads, model)
    setattr(model, attribute, value)
    assert not hold(captured.reads, model)


class Twice(nn.Module):
    """Calls one module by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled()] * 2)
        self.more = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(layer(x) for layer in self.layers) * self.more
        return total


def test_what_modules_with_two_names_read_is_noted() -> None:
    """Also what others read beside them; torch.export calls stand-ins."""
    reads = capture(Twice(), (torch.ones(2, 4),), {}).reads
    assert {Read("", "more", 1.0), Read("layers.0", "scale", 2.0), Read("layers.0", "offset", MISSING)} <= {*reads}


def test_captures_are_known_by_what_they_read() -> None:
    """Also behind a loss function."""
    model, known = Scaled(), dict[Any, Any]()
    made = [open_session(model, (torch.ones(rows, 4),), {}, known=known, loss_fn=torch.sum).captured for rows in (4, 8)]
    assert made[0] is made[1]
    model.scale = 5.0
    other = open_session(model, (torch.ones(4, 4),), {}, known=known, loss_fn=torch.sum).captured
    assert other is not made[0]
    assert {read.module for read in other.reads} == {"", "inner"}


def test_values_are_alike_by_what_they_are_made_of() -> None:
    tensor, config = torch.ones(2), SimpleNamespace(a=[1, (2.0, "x")], b={"c": {3}})
    assert alike(config, SimpleNamespace(a=[1, (2.0, "x")], b={"c": {3}}))
    assert alike({"t": tensor}, {"t": torch.zeros(2)}), "tensors inside are not compared"
    assert alike(tensor, tensor)
    for one, other in ((1, 1.0), (1, True), ([1], (1,)), (tensor, torch.ones(2)), (config, SimpleNamespace(a=[1], b={})), ({1}, {2})):
        assert not alike(one, other)
    config.b["self"] = config
    assert alike(config, config.b["self"])
