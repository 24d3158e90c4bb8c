"""Writes of a forward become functions, without tracing it again where nobody else can see what is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.export import export
from torch.nn import functional as F

from autopar.capture.trace import capture
from autopar.capture.writes import mutates, write_anew
from autopar.errors import CaptureError

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Of(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.made = forward

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.made(x, y)


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * y
    before = z.sum()
    z += y
    z.mul_(2.0).clamp_(max=1.5)
    return z * before


def picked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    values, ids = x.topk(2, -1)
    values /= values.sum(-1, keepdim=True)
    where = torch.empty_like(ids)
    where[...] = ids
    return values.sum() + torch.zeros_like(x).scatter_(-1, ids, 1.0)


def activated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.relu((x + y), inplace=True) + F.silu(x - y, inplace=True).masked_fill_(y > 0, 0.25)


def powered(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The function takes its operands as another overload than the write."""
    z = x * y
    z **= 2
    return z.pow_(y).transpose_(0, 1)


def viewed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What was viewed before shows the write."""
    z = x + y
    first = z[:, 0]
    z.add_(1.0)
    return z * first.unsqueeze(-1)


def part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x + y
    z[:, :2].add_(1.0)
    return z


def split(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A part of a split is a view."""
    z = x + y
    first, second = z.split(2, -1)
    first.add_(1.0)
    return z * torch.cat([second, first], -1)


def wider(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum would be of float64, what is written is not."""
    z = x + y
    z.add_(y.double())
    return z


def dropped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Dropout that drops nothing gives what it is given."""
    z = x + y
    r, z = z, F.dropout(z, 0.0)
    z += y
    u = x - y
    v, u = u, F.dropout1d(u[:, :, None], 0.3, training=False).squeeze(-1)
    u *= 2
    w = F.alpha_dropout(x * y, 0.3, training=False)
    w -= 1
    return r * z + v * u + w


def turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An equation of one operand is a view if it sums over nothing."""
    z = x + y
    torch.einsum("ij->ji", z)[0] = 2.0
    torch.einsum("...ji", z)[1] *= 3.0
    outer = z.T[:3, None] * z.T[:3, :, None]
    torch.einsum("aii->ia", outer).zero_()
    summed = torch.einsum("ij->j", z)
    summed += 1.0
    return z.sum() + outer.sum(0)[:, :4] * summed


def compared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A comparison makes booleans, what is written are numbers."""
    z = x + y
    w = x - y
    return (1 - z.gt_(0)) * w.logical_not_()


def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum would be of int64, what is written wraps around."""
    z = (x > 0).to(torch.int8) * 127
    z.add_((y < 0).long())
    return z.float()


ANEW, AGAIN = [added, picked, activated, powered], [viewed, part, split, turned, dropped, wider, compared, counted]
CALL = torch.linspace(-1, 1, 24).reshape(6, 4), torch.linspace(2, -2, 24).reshape(6, 4)


def writes(module: fx.GraphModule) -> int:
    return sum(mutates(node) for node in module.graph.nodes)


@pytest.mark.parametrize("forward", [*ANEW, *AGAIN], ids=lambda forward: forward.__name__)
def test_numbers_stay(forward: Forward) -> None:
    captured = capture(Of(forward), CALL, {})
    assert writes(captured.graph) == 0
    (found,) = captured.graph(*CALL)
    assert torch.equal(found, forward(*(x.clone() for x in CALL)))
    assert found.dtype == torch.float32


@pytest.mark.parametrize("forward, left", [*((forward, 0) for forward in ANEW), *((forward, 1) for forward in AGAIN)])
def test_what_nobody_else_can_see_is_written_anew(forward: Forward, left: int) -> None:
    module = export(Of(forward), CALL, strict=False).graph_module
    assert writes(module) > 0
    write_anew(module)
    assert min(writes(module), 1) == left


def test_a_write_that_torch_has_no_function_for_is_refused() -> None:
    """The function takes its operands the other way round."""
    with pytest.raises(CaptureError, match=r"no function for .*polygamma_.*say what the value becomes by a function"):
        capture(Of(lambda x, y: (x * y + 2).polygamma_(1)), CALL, {})


def test_writes_into_inputs_stay() -> None:
    module = export(Of(lambda x, y: x.add_(y)), (CALL[0].clone(), CALL[1]), strict=False).graph_module
    write_anew(module)
    assert writes(module) == 1
