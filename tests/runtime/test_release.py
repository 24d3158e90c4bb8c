"""Graphs that free what they are given after its last use."""

from __future__ import annotations

import weakref

import torch
from torch import fx

from autopar.ops.collectives import group_name
from autopar.runtime.release import _waits_in_place, released, run_released

_c10d = torch.ops._c10d_functional


def chain() -> fx.GraphModule:
    """Two values, used one after the other, and a constant."""
    module = torch.nn.Module()
    module.register_buffer("constant", torch.tensor(2.0))
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (a, graph.get_attr("constant")))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (doubled, b)), b))
    return fx.GraphModule(module, graph)


def test_the_same_results_from_an_emptied_list() -> None:
    module = chain()
    for _ in range(2):
        given = [torch.tensor(3.0), torch.tensor(1.0)]
        expected = module(*given)
        results = run_released(module, given)
        assert given == []
        assert [float(x) for x in results] == [float(x) for x in expected] == [7.0, 1.0]


def test_a_value_is_freed_after_its_last_use() -> None:
    seen: list[bool] = []
    given = [torch.tensor(3.0), torch.tensor(1.0)]
    first = weakref.ref(given[0])

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(first() is None)
        return x

    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    before = graph.call_function(look, (b,))
    doubled = graph.call_function(torch.add, (a, before))
    graph.output((graph.call_function(look, (doubled,)),))
    run_released(fx.GraphModule(torch.nn.Module(), graph), given)
    assert seen == [False, True]


def test_reduced_in_place_is_what_nobody_else_reads() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(torch.ops.aten.mm.default, (x, x)) for _ in range(2)]
    started = [
        graph.call_function(_c10d.reduce_scatter_tensor.default, (operand, "sum", 2, group_name("dp"))) for operand in (x, *made)
    ]
    waits = [graph.call_function(_c10d.wait_tensor.default, (node,)) for node in started]
    graph.output((*waits, made[1]))
    assert _waits_in_place(graph) == {waits[1]: started[1]}


def test_rows_are_copied_into_what_only_they_read() -> None:
    """Zeros that are made for them; an input and what is read again stay as they are."""
    aten, graph = torch.ops.aten, fx.Graph()
    x, rows, at = (graph.placeholder(name) for name in ("x", "rows", "at"))
    alone, shared = (graph.call_function(aten.new_zeros.default, (rows, [4, 2])) for _ in range(2))
    copied = [graph.call_function(aten.index_copy.default, (whole, 0, at, rows)) for whole in (x, alone, shared)]
    graph.output((*copied, shared))
    module, values = fx.GraphModule(torch.nn.Module(), graph), [torch.ones(4, 2), torch.ones(2, 2), torch.tensor([3, 1])]
    expected, given = module(*values), values[0]
    for found, wanted in zip(run_released(module, values), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert given.equal(torch.ones(4, 2))
    assert len(released(module).graph.find_nodes(op="call_function", target=aten.index_copy_.default)) == 1
