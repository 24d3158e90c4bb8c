"""Virtual ranks: groups by axis, every collective, values freed after their last use."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import fx

from autopar.mesh import Mesh
from autopar.ops.collectives import group_name
from autopar.runtime.groups import activate, device_mesh
from autopar.virtual import run_lockstep
from tests.pool import RankPool

pytestmark = pytest.mark.slow

_c10d = torch.ops._c10d_functional
MESH = Mesh(("dp", "tp"), (2, 2))


def collective_graph() -> fx.GraphModule:
    """Every collective on both axes, once each."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    results = []
    for axis in MESH.names:
        name = group_name(axis)
        for target, args in (
            (_c10d.all_reduce.default, ("sum", name)),
            (_c10d.all_reduce.default, ("max", name)),
            (_c10d.all_reduce.default, ("min", name)),
            (_c10d.all_gather_into_tensor.default, (2, name)),
            (_c10d.reduce_scatter_tensor.default, ("sum", 2, name)),
            (_c10d.all_to_all_single.default, ([2, 2], [2, 2], name)),
        ):
            started = graph.call_function(target, (x, *args))
            results.append(graph.call_function(_c10d.wait_tensor.default, (started,)))
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)


def values() -> list[torch.Tensor]:
    return list(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def run_on_rank(rank: int) -> list[torch.Tensor]:
    assert dist.get_world_size() == MESH.num_ranks
    activate(device_mesh(MESH, "cpu"))
    return list(collective_graph()(values()[rank]))


def test_collectives_are_those_of_gloo(ranks: RankPool) -> None:
    virtual = run_lockstep(collective_graph(), [[x] for x in values()], MESH)
    for real, ours in zip(ranks.run(run_on_rank), virtual, strict=True):
        torch.testing.assert_close(ours, real)


def test_groups_are_those_of_the_axis() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(_c10d.all_reduce.default, (x, "sum", group_name(axis))) for axis in MESH.names))
    results = run_lockstep(fx.GraphModule({}, graph), [[torch.tensor(10.0**rank)] for rank in range(4)], MESH)
    assert [[int(x) for x in result] for result in results] == [[101, 11], [1010, 11], [101, 1100], [1010, 1100]]


def test_a_reduction_keeps_its_dtype() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(_c10d.all_reduce.default, (graph.placeholder("x"), "sum", group_name("tp"))),))
    results = run_lockstep(fx.GraphModule({}, graph), [[torch.ones(2, dtype=torch.int32)]] * 4, MESH)
    assert results[0][0].dtype is torch.int32


def test_results_of_a_collective_are_not_shared() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    reduced = graph.call_function(_c10d.all_reduce.default, (x, "sum", group_name("tp")))
    graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (reduced, x)),))
    results = run_lockstep(fx.GraphModule({}, graph), [[torch.tensor([float(rank)])] for rank in range(4)], MESH)
    assert [float(result[0]) for result in results] == [1.0, 2.0, 7.0, 8.0]


def test_values_are_freed_after_their_last_use() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def remember(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        made.append(weakref.ref(y))
        return y

    def count(x: torch.Tensor) -> int:
        return sum(ref() is not None for ref in made)

    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(torch.ops.aten.sum.default, (graph.call_function(remember, (x,)),))
    graph.output((graph.call_function(count, (total,)),))
    results = run_lockstep(fx.GraphModule({}, graph), [[torch.zeros(2)]] * 4, MESH)
    assert [result[0] for result in results] == [0, 0, 0, 0]


def test_an_unknown_collective_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(_c10d.broadcast.default, (x, 0, group_name("tp"))),))
    with pytest.raises(AssertionError, match="virtual ranks do not know the collective"):
        run_lockstep(fx.GraphModule({}, graph), [[torch.zeros(2)]] * 4, MESH)
