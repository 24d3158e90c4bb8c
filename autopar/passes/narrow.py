"""Narrower copies of parameters (`autopar.precision`), made where the least has to travel.

A local graph narrows what comes of a parameter behind its reshards, so that their backwards sum gradients in the wider dtype. Forward
that would gather what is wide: here the cast moves before the gathers. It moves data only, so not a bit of the result changes.

    parameter --all-gather--> whole --cast--> use    becomes    parameter --cast--> narrow --all-gather--> use
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.passes.aliases import SAME_ELEMENTS

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_GATHERS = frozenset({_c10d.all_gather_into_tensor.default, _c10d.all_to_all_single.default})
_MOVES = SAME_ELEMENTS | _GATHERS | {aten.clone.default, aten.slice.Tensor, aten.select.int, aten.index_select.default, aten.expand.default}
"""What gives elements of its first operand and nothing else."""


def narrow(x: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """A copy in a narrower dtype, whose gradient comes back in that of ``x``."""
    return x.to(dtype)


def narrow_results(module: fx.GraphModule, dtypes: Sequence[torch.dtype | None]) -> fx.GraphModule:
    """Give the first results of a graph of plain tensors in other dtypes; None leaves one as it is."""
    (output,) = module.graph.find_nodes(op="output")
    results = list(output.args[0])
    with module.graph.inserting_before(output):
        for i, dtype in enumerate(dtypes):
            if dtype is not None:
                results[i] = cast(module.graph, results[i], dtype)
    output.args = (tuple(results),)
    module.recompile()
    return module


def narrow_early(module: fx.GraphModule) -> fx.GraphModule:
    """Move casts to a narrower dtype before the gathers that they come after; the graph is one of plain tensors, with ``meta["val"]``."""
    graph, known = module.graph, dict[tuple[fx.Node, torch.dtype], fx.Node]()

    def narrowed(node: fx.Node, dtype: torch.dtype) -> fx.Node:
        key = node, dtype
        if key not in known:
            if node.target in _MOVES:
                source = narrowed(node.all_input_nodes[0], dtype)
                with graph.inserting_after(node):
                    known[key] = graph.node_copy(node, lambda used: source if used is node.all_input_nodes[0] else used)
                known[key].meta["val"] = node.meta["val"].to(dtype)
            else:
                with graph.inserting_after(_last_placeholder(graph) if node.op == "placeholder" else node):
                    known[key] = cast(graph, node, dtype)
        return known[key]

    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if _is_narrowing(node) and any(step.target in _GATHERS for step in _moves_before(node)):
            node.replace_all_uses_with(narrowed(node.args[0], node.kwargs["dtype"]))
            for dead in (node, *_moves_before(node)):
                if not dead.users:
                    graph.erase_node(dead)
    graph.lint()
    module.recompile()
    return module


def cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a cast at the graph's insertion point."""
    made = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    made.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return made


def _is_narrowing(node: fx.Node) -> bool:
    source, dtype = node.all_input_nodes[0].meta["val"], node.kwargs.get("dtype")
    if not isinstance(dtype, torch.dtype) or set(node.kwargs) != {"dtype"}:
        return False
    return source.dtype.is_floating_point and dtype.is_floating_point and dtype.itemsize < source.dtype.itemsize


def _moves_before(node: fx.Node) -> list[fx.Node]:
    """The moves from which a node comes, last first."""
    way: list[fx.Node] = []
    node = node.all_input_nodes[0]
    while node.target in _MOVES:
        way.append(node)
        node = node.all_input_nodes[0]
    return way


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    last: fx.Node = graph.find_nodes(op="placeholder")[-1]
    return last
