"""The last backward of a step joined with the reductions that are done once a step (`passes.prepare`).

Each reduction starts as soon as its gradient is there, beside the rest of the backward and what else the rank still computes; all are
waited for at the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.differentiate import Halves
from autopar.passes.overlap import ALL_GATHER

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True, slots=True)
class LastBackward:
    """A backward graph and the reductions of its gradients, in two graphs.

    Args:
        start: inputs of the backward; for each gradient of a copy its sum so far; what the preparation has saved -> results of the
            backward at ``kept``, then what is on its way.
        finish: what is on its way -> gradients of stored parameters.
        kept: positions of the results of the backward that are gradients of nothing prepared.
    """

    start: fx.GraphModule
    finish: fx.GraphModule
    kept: tuple[int, ...]


def join_reductions(backward: fx.GraphModule, prepare: Halves, copy_of: Mapping[int, int]) -> LastBackward:
    """Join the backward of a micro-batch with that of the preparation.

    Args:
        backward: inputs -> gradients.
        prepare: whose backward takes the summed gradients of its copies.
        copy_of: for positions among the gradients, the copy that each belongs to.
    """
    reductions = prepare.backward
    assert reductions is not None and not reductions.graph.find_nodes(op="get_attr")
    placeholders = reductions.graph.find_nodes(op="placeholder")
    num_saved = len(placeholders) - len(prepare.differentiable)
    sums = dict(zip(prepare.differentiable, placeholders[num_saved:], strict=True))
    results, reduced = _results(backward), _results(reductions)
    late = _in_the_end(reductions)
    early = [node for node in reductions.graph.nodes if node.op not in ("placeholder", "output") and node not in late]

    start = fx.Graph()
    of_backward = {node: _placeholder(start, node) for node in backward.graph.find_nodes(op="placeholder")}
    of_reductions = {node: _placeholder(start, node, prefix="sum_") for node in sums.values()}
    of_reductions |= {node: _placeholder(start, node, prefix="prepared_") for node in placeholders[:num_saved]}
    coming: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for i, copy in copy_of.items():
        coming[results[i]].append(sums[copy])
    waiting = {total for totals in coming.values() for total in totals}

    def reduce_what_is_there() -> None:
        for node in list(early):
            if not waiting.intersection(node.all_input_nodes) and all(used in of_reductions for used in node.all_input_nodes):
                of_reductions[node] = start.node_copy(node, of_reductions.__getitem__)
                early.remove(node)

    reduce_what_is_there()
    for node in backward.graph.nodes:
        if node.op not in ("placeholder", "output"):
            of_backward[node] = start.node_copy(node, of_backward.__getitem__)
        for total in coming.get(node, ()):
            _add(start, of_reductions, total, of_backward[node])
            waiting.remove(total)
            reduce_what_is_there()
    assert not early and not waiting
    read = dict.fromkeys([*(used for node in late for used in node.all_input_nodes), *reduced])
    left = [node for node in read if node not in late]
    kept = tuple(i for i in range(len(results)) if i not in copy_of)
    start.output((*(of_backward[results[i]] for i in kept), *(of_reductions[node] for node in left)))

    finish = fx.Graph()
    env = {node: _placeholder(finish, node) for node in left}
    for node in late:
        env[node] = finish.node_copy(node, env.__getitem__)
    finish.output(tuple(env[node] for node in reduced))
    start.lint()
    finish.lint()
    return LastBackward(fx.GraphModule(backward, start), fx.GraphModule(reductions, finish), kept)


def _results(module: fx.GraphModule) -> list[fx.Node]:
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def _in_the_end(module: fx.GraphModule) -> dict[fx.Node, None]:
    """Waits, all-gathers (the backward may have one in flight in the same group), and what comes after them, in order."""
    late: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        if node.op != "output" and (node.target in (_WAIT, ALL_GATHER) or any(used in late for used in node.all_input_nodes)):
            late[node] = None
    return late


def _placeholder(graph: fx.Graph, node: fx.Node, *, prefix: str = "") -> fx.Node:
    made = graph.placeholder(prefix + node.name)
    made.meta = dict(node.meta)
    return made


def _add(graph: fx.Graph, env: dict[fx.Node, fx.Node], total: fx.Node, grad: fx.Node) -> None:
    """Add a gradient to its sum; laid out as the reductions have been traced for."""
    added = graph.call_function(aten.add.Tensor, (env[total], grad))
    env[total] = graph.call_function(aten.contiguous.default, (added,))
    for node in (added, env[total]):
        node.meta = dict(total.meta)
