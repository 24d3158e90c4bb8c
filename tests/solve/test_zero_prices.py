"""Of several ZeRO axes, what the outer one moves is still split by the inner ones."""

from __future__ import annotations

import pytest

import autopar
from tests.models import mlp


@pytest.mark.parametrize("outer, inner, split", [("zero3", "zero3", 2), ("replicated", "zero2", 2), ("zero3", "replicated", 1)])
def test_bytes_of_the_outer_axis(outer: str, inner: str, split: int) -> None:
    """Hierarchical gathering: the buffer that crosses the outer link is a part of what crosses the inner one."""
    example = mlp()
    name = next(n for n, p in example.model.named_parameters() if p.dim() == 2)
    pins = [autopar.pin(name, outer=outer, inner=inner), autopar.pin("*linear*", outer="b0", inner="b0")]
    plan = autopar.plan(example.model, autopar.Mesh(("outer", "inner"), (2, 2)), example.batch, constraints=pins)
    whole = 4
    for size in plan.parameter(name).shape:
        whole *= size
    moved = {(c.axis, c.phase, c.kind): c.num_bytes for c in plan.collectives if c.value == name}
    outer_bytes = {num_bytes for (axis, _, _), num_bytes in moved.items() if axis == "outer"}
    assert outer_bytes == {whole // split}, moved
    if inner != "replicated":
        assert {num_bytes for (axis, _, _), num_bytes in moved.items() if axis == "inner"} == {whole}
