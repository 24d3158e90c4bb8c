"""Gradients add up in place to what adding them out of place gives, and nothing that others read is written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.accumulate import accumulate, make_owned

aten = torch.ops.aten
Function = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def with_itself(value: torch.Tensor, other: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return value, other(value)


FUNCTIONS: dict[str, tuple[Function, int]] = {
    "product": (lambda a, b: (a @ b,), 1),
    "turned": (lambda a, b: ((a @ b).t(),), 1),
    "turned twice": (lambda a, b: ((a @ b).t().t(),), 1),
    "product that is read again": (lambda a, b: with_itself(a @ b, torch.exp), 0),
    "not a product": (lambda a, b: (a.exp(), b.sum(0)), 0),
    "two results are one": (lambda a, b: with_itself(a * b, lambda c: c), 0),
    "a result and a view of it": (lambda a, b: with_itself(a * b, torch.t), 0),
    "a result and a part of it": (lambda a, b: with_itself(a * b, lambda c: c[:2]), 0),
    "an operand": (lambda a, b: (a, b.t()), 0),
    "one element in many places": (lambda a, b: (a.sum(0, keepdim=True).expand(4, 4),), 0),
}
"""What is traced, and how many of its matrix products add up by themselves."""


def traced(function: Function) -> fx.GraphModule:
    return make_fx(function)(torch.ones(4, 4), torch.ones(4, 4))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sums_in_place_are_sums(name: str) -> None:
    function, num_fused = FUNCTIONS[name]
    positions = range(len(function(torch.ones(4, 4), torch.ones(4, 4))))
    first, following = make_owned(traced(function), positions), accumulate(traced(function), positions)
    torch.manual_seed(0)
    batches = [(torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)) for _ in range(3)]
    given = [(a.clone(), b.clone()) for a, b in batches]
    sums = first(*given[0])
    for pair in given[1:]:
        assert following(*pair, *sums) == ()
    for i, total in enumerate(sums):
        torch.testing.assert_close(total, sum(function(*pair)[i] for pair in batches))
    for mine, theirs in zip(given, batches, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert len(following.graph.find_nodes(op="call_function", target=aten.addmm_.default)) == num_fused


def test_what_does_not_add_up_is_given() -> None:
    module = traced(lambda a, b: (a @ b, a + b, b.exp()))
    a, b = torch.randn(2, 4, 4).unbind()
    total = torch.zeros(4, 4)
    added, grown = accumulate(module, [0])(a, b, total)[0], total
    torch.testing.assert_close(added, a + b)
    torch.testing.assert_close(grown, a @ b)
