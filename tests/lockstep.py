"""Words for tests on virtual ranks: whole tensors to what every rank holds and back, operations and plans run in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple

from autopar.layout import PARTIAL, REPLICATED, Kind, Layout, assemble, take_shard
from autopar.mesh import Mesh
from autopar.virtual import run_lockstep

Local = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""A local function: (shard, this rank's coordinates) -> shard."""


def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of a tensor lies: whole for a partial sum, a partial sum for R*."""
    turned = {Kind.PARTIAL: REPLICATED, Kind.REPLICATED_PARTIAL_GRAD: PARTIAL}
    return replace(layout, placements=tuple(turned.get(p.kind, p) for p in layout.placements))


def value_layout(layout: Layout) -> Layout:
    """How the value itself lies: R* is R."""
    return replace(layout, placements=tuple(REPLICATED if p.holds_whole else p for p in layout.placements))


def spread(whole: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """What every rank holds of ``whole``; partial sums are random parts that add up to it."""
    mesh = layout.mesh
    partial = [axis for axis, p in enumerate(layout.placements) if p.kind is Kind.PARTIAL]
    plain = replace(layout, placements=tuple(p if p.is_sharded else REPLICATED for p in layout.placements))
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in range(mesh.num_ranks):
        parts.setdefault(tuple(mesh.coordinate(rank)[axis] for axis in partial), torch.randn_like(whole))
    *_, last = parts
    parts[last] = whole - sum(part for key, part in parts.items() if key != last)
    return [
        take_shard(parts[tuple(mesh.coordinate(rank)[axis] for axis in partial)], plain, mesh.coordinate(rank)).contiguous()
        for rank in range(mesh.num_ranks)
    ]


def collect(values: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor from what every rank holds; fails unless replicas are equal and shapes as the layout says."""
    mesh = layout.mesh
    assert {tuple(value.shape) for value in values} == {layout.local_shape}
    for axis, placement in enumerate(layout.placements):
        if placement.holds_whole:
            for first, *others in mesh.groups(axis):
                assert all(torch.allclose(values[first], values[other]) for other in others), f"replicas differ on axis {axis}"
    return assemble(values, layout)


def coordinates(mesh: Mesh, rank: int) -> list[torch.Tensor]:
    return [torch.tensor([position]) for position in mesh.coordinate(rank)]


def joint_graph(function: Local, source: Layout) -> fx.GraphModule:
    """Forward and backward of a local function in one graph: (shard, coordinates, gradient) -> (result, gradient of the shard)."""
    example = torch.empty(source.local_shape, dtype=torch.float64, requires_grad=True)
    inputs = (example, *coordinates(source.mesh, 0))
    traced = aot_export_joint_simple(lambda x, *given: (function(x, given).clone(),), inputs, trace_joint=True)
    assert isinstance(traced, fx.GraphModule)
    return traced


def check_function(function: Local, source: Layout, target: Layout) -> None:
    """Fail unless a local function carries any whole tensor from ``source`` to ``target``, and its gradient back."""
    mesh = source.mesh
    whole, grad = torch.randn(2, *source.shape, dtype=torch.float64)
    xs, grads = spread(whole, value_layout(source)), spread(grad.reshape(target.shape), gradient_layout(target))
    results = run_lockstep(
        joint_graph(function, source), [[xs[r], *coordinates(mesh, r), grads[r]] for r in range(mesh.num_ranks)], mesh
    )
    torch.testing.assert_close(collect([y for y, *_ in results], value_layout(target)), whole.reshape(target.shape))
    torch.testing.assert_close(collect([dx for _, dx, *_ in results], gradient_layout(source)), grad)
