"""Backward graph -> the gradients of what was received, and the gradients of parameters, as two graphs.

Zero-bubble schedules run the first as early as the stage before waits for it, and the second where the rank would be idle (Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """A backward graph in two.

    Args:
        inputs: placeholders of the backward -> gradients of received values, then what ``weights`` needs of the way.
        weights: what ``inputs`` left, then the placeholders of the backward at ``saved`` -> the other gradients.
        num_left: how many values ``inputs`` leaves.
        saved: positions of the placeholders of the backward that ``weights`` takes.
        to_inputs: positions of the results of ``inputs`` among those of the backward; the others come from ``weights``, in order.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule
    num_left: int
    saved: tuple[int, ...]
    to_inputs: tuple[int, ...]


def split_backward(backward: fx.GraphModule, received: Collection[int]) -> SplitBackward:
    """Split a backward graph; ``received`` are the positions of those of its outputs that are gradients of received values."""
    (output,) = backward.graph.find_nodes(op="output")
    results = list(output.args[0])
    placeholders = backward.graph.find_nodes(op="placeholder")
    first = tuple(i for i in range(len(results)) if i in received)
    early = _ancestors([results[i] for i in first])
    early |= {node for node in backward.graph.nodes if node.target is operator.getitem and node.args[0] in early}  # no tuples are left
    late = [node for node in backward.graph.nodes if node.op not in ("placeholder", "output") and node not in early]
    late_results = [results[i] for i in range(len(results)) if i not in received]
    read = dict.fromkeys([*(used for node in late for used in node.all_input_nodes), *late_results])
    left = [node for node in read if node in early and node.op != "placeholder"]
    saved = tuple(i for i, node in enumerate(placeholders) if node in read)
    inputs = _graph(placeholders, [node for node in backward.graph.nodes if node in early], [*(results[i] for i in first), *left])
    weights = _graph([*left, *(placeholders[i] for i in saved)], late, late_results)
    return SplitBackward(
        fx.GraphModule(backward, inputs), fx.GraphModule(backward, weights), len(left), saved, first
    )


def _ancestors(roots: list[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return seen


def _graph(taken: list[fx.Node], body: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in taken:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in body:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results))
    return graph
