"""Backward graph -> the gradients of what was received, and the gradients of parameters, as two graphs.

Zero-bubble schedules run the first as early as the stage before waits for it, and the second where the rank would be idle (Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023). What the second works on lies in memory from one to the other, so what the backward computes
again and only the second wants is computed in the first where it is smaller than what it is made of.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.aliases import base_of, only_looks, readers
from autopar.passes.differentiate import Halves
from autopar.passes.overlap import STARTS


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


def split_halves(halves: Halves, received: Collection[int], *, lasting: Collection[int]) -> SplitBackward | None:
    """Split the backward of halves, if they have one.

    Args:
        halves: of a stage.
        received: positions of those results of the backward that are gradients of received values.
        lasting: positions of the inputs of the forward that lie in memory all the step.
    """
    if halves.backward is None:
        return None
    names = [node.name for node in halves.forward.graph.find_nodes(op="placeholder")]
    saved = halves.backward.graph.find_nodes(op="placeholder")
    num_saved = len(saved) - len(halves.differentiable)
    kept = {f"saved_{names[i]}" for i in lasting}
    return split_backward(
        halves.backward, received, num_saved=num_saved, lasting=[i for i, node in enumerate(saved) if node.name in kept]
    )


def split_backward(
    backward: fx.GraphModule, received: Collection[int], *, num_saved: int, lasting: Collection[int] = ()
) -> SplitBackward:
    """Split a backward graph.

    Args:
        backward: saved values, then gradients of results -> gradients.
        received: positions of those of its outputs that are gradients of received values.
        num_saved: how many values are saved.
        lasting: positions of saved values that lie in memory anyway.
    """
    (output,) = backward.graph.find_nodes(op="output")
    results = list(output.args[0])
    placeholders = backward.graph.find_nodes(op="placeholder")
    first = tuple(i for i in range(len(results)) if i in received)
    early = _ancestors([results[i] for i in first])
    early |= {node for node in backward.graph.nodes if node.target is operator.getitem and node.args[0] in early}  # no tuples are left
    if first:
        _leave_least(backward.graph, early, {*placeholders[num_saved:]}, {placeholders[i] for i in lasting})
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


def _leave_least(graph: fx.Graph, early: set[fx.Node], tangents: set[fx.Node], lasting: set[fx.Node]) -> None:
    """Add what is computed again for the second half, and is smaller than what only it is made of."""
    of_tangents = set(tangents)
    for node in graph.nodes:
        if not of_tangents.isdisjoint(node.all_input_nodes):
            of_tangents.add(node)
        is_made_again = node.op == "call_function" and node not in early and node not in of_tangents
        if not is_made_again or only_looks(node) or node.target in STARTS or not isinstance(node.meta["val"], torch.Tensor):
            continue
        bases = {base_of(used) for used in node.all_input_nodes}
        if not all(base in early or base.op == "placeholder" for base in bases):
            continue
        freed = [base for base in bases - lasting if {reader for reader in readers(base) if reader not in early} == {node}]
        if sum(_num_bytes(base) for base in freed) > _num_bytes(node):
            early |= _ancestors([node])


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


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
