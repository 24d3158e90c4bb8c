"""Gradients that add up over micro-batches.

The first micro-batch makes the sums, those after it add to them in place: matrix products by `addmm_`, which writes what it computes
once and nowhere else (Megatron-LM's "gradient accumulation fusion").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx

from autopar.passes.aliases import owned
from autopar.passes.narrow import cast

aten = torch.ops.aten


def make_owned(
    module: fx.GraphModule, positions: Collection[int], wide: Mapping[int, torch.dtype] = MappingProxyType({})
) -> fx.GraphModule:
    """The same graph, whose results at ``positions`` have memory of their own, and those in ``wide`` the dtype of their sum."""
    graph, env = copied(module)
    results = owned(graph, [env[node] for node in results_of(module)], [i for i in positions if i not in wide])
    graph.output(tuple(cast(graph, node, wide[i]) if i in wide else node for i, node in enumerate(results)))
    graph.lint()
    return fx.GraphModule(module, graph)


def accumulate(module: fx.GraphModule, positions: Sequence[int], wide: Mapping[int, torch.dtype] = MappingProxyType({})) -> fx.GraphModule:
    """The graph that adds its results at ``positions`` to sums, which are its last inputs, and gives the others; ``wide`` has the dtypes
    of sums that are not those of the results."""
    results = results_of(module)
    graph, env = copied(module)
    for i in positions:
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            total = placeholder(graph, f"sum_{i}", results[i], wide.get(i))
        grad = env[results[i]]
        with graph.inserting_after(total if grad.op == "placeholder" else grad):
            add_to(graph, total, grad)
    graph.output(tuple(env[node] for i, node in enumerate(results) if i not in positions))
    fuse_sums(graph)
    graph.lint()
    return fx.GraphModule(module, graph)


def placeholder(graph: fx.Graph, name: str, like: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """An input for a value like that of a node, which may be of another graph; in another dtype if one is given."""
    made = graph.placeholder(name)
    made.meta = dict(like.meta)
    if dtype is not None:
        made.meta["val"] = like.meta["val"].to(dtype)
    return made


def add_to(graph: fx.Graph, total: fx.Node, grad: fx.Node) -> fx.Node:
    """The sum, with a gradient added to it in place."""
    added = graph.call_function(aten.add_.Tensor, (total, grad))
    added.meta = dict(total.meta)
    return added


def fuse_sums(graph: fx.Graph) -> None:
    """Let matrix products that are only added to a sum do that themselves."""
    for added in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        total, grad = added.args
        way = [grad]
        while way[-1].target is aten.t.default and len(way[-1].users) == 1:
            way.append(way[-1].args[0])
        product = way[-1]
        if product.target is not aten.mm.default or len(product.users) != 1 or product.meta["val"].dtype != total.meta["val"].dtype:
            continue
        is_turned = len(way) % 2 == 0
        with graph.inserting_before(added):
            onto = graph.call_function(aten.t.default, (total,)) if is_turned else total
            fused = graph.call_function(aten.addmm_.default, (onto, *product.args))
            result = graph.call_function(aten.t.default, (fused,)) if is_turned and added.users else fused
        onto.meta, fused.meta, result.meta = (dict(node.meta) for node in (product if is_turned else total, product, added))
        added.replace_all_uses_with(result)
        for node in (added, *way):
            graph.erase_node(node)


def results_of(module: fx.GraphModule) -> list[fx.Node]:
    """What a graph gives."""
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def copied(module: fx.GraphModule) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph without its output, and its nodes by the old ones."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    return graph, env
