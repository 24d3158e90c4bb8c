"""Graphs that let go of what they are given, so that each saved activation is freed after its last use and not when the backward is over.

A Python call holds its arguments until it returns. So the graph is called with one list instead, which it empties first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

_KEY = "autopar.released"


def run_released(module: fx.GraphModule, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a graph on the values in ``given``, which is empty then."""
    if _KEY not in module.meta:
        module.meta[_KEY] = _released(module)
    run: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = module.meta[_KEY]
    return list(run(given))


def _released(module: fx.GraphModule) -> fx.GraphModule:
    graph, own = fx.Graph(), {}
    given = graph.placeholder("given")
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        own[node] = graph.call_function(operator.getitem, (given, i))
    graph.call_method("clear", (given,))
    for node in module.graph.nodes:
        if node.op != "placeholder":
            own[node] = graph.node_copy(node, own.__getitem__)
    return fx.GraphModule(module, graph)
