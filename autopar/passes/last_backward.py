"""The end of a step's backwards: the gradients add up, and the reductions that are done once a step (`passes.prepare`) join the last.

Each reduction starts as soon as its gradient is there, beside the rest of the backward and what else the rank still computes; all are
waited for at the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.passes.accumulate import accumulate, add_to, copied, fuse_sums, make_owned, placeholder, results_of
from autopar.passes.aliases import WAIT
from autopar.passes.buckets import collect_small, reduce_in_place
from autopar.passes.differentiate import Halves
from autopar.passes.narrow import cast
from autopar.passes.overlap import ALL_GATHER, STARTS, overlap

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends the backward of each micro-batch: the whole of it, or its second half.

    Args:
        first: inputs -> results, of which those at ``summed`` have memory of their own.
        next: inputs, then the sums so far, which it adds to -> the other results.
        summed: positions of the results that add up.
        last: for the last micro-batch, with the reductions that are done once a step; None if there are none.
    """

    first: fx.GraphModule
    next: fx.GraphModule
    summed: tuple[int, ...]
    last: LastBackward | None


@dataclass(frozen=True, slots=True)
class LastBackward:
    """A backward graph and the reductions of its gradients, in two graphs.

    Args:
        start: inputs of the backward, the sums so far, zeros for copies that get no gradient, what the preparation has saved -> results of
            the backward that do not add up, then what is on its way.
        finish: what is on its way -> gradients of stored parameters.
        num_results: how many results ``start`` gives before what is on its way.
        silent: positions of the copies that get no gradient.
    """

    start: fx.GraphModule
    finish: fx.GraphModule
    num_results: int
    silent: tuple[int, ...]


def end_backward(
    backward: fx.GraphModule,
    summed: Sequence[int],
    prepare: Halves | None,
    copy_of: Mapping[int, int],
    of_copies: Sequence[torch.dtype | None],
) -> Ending:
    """What ends the backward of each micro-batch.

    Args:
        backward: inputs -> gradients.
        summed: positions of the gradients that add up.
        prepare: whose backward takes the summed gradients of its copies; None if there is none.
        copy_of: for positions among the gradients, the copy that each belongs to.
        of_copies: for each copy the dtype that its gradients add up in, if it is another than its own.
    """
    wide = {i: dtype for i, copy in copy_of.items() if (dtype := of_copies[copy]) is not None}
    first, last = make_owned(backward, summed, wide), None
    if prepare is not None and prepare.backward is not None:
        last = join_reductions(backward, summed, prepare, copy_of, of_copies)
    return Ending(first, accumulate(backward, summed, wide), tuple(summed), last)


def drop_silent(prepare: Halves, heard: Collection[int]) -> Halves:
    """Leave out the reductions of copies that get no gradient: a parameter that has no other copy gets none either, as in plain torch.

    Args:
        prepare: parameters -> copies, and back.
        heard: positions of the copies that get a gradient.
    """
    if prepare.backward is None:
        return prepare
    graph, env = copied(prepare.backward)
    output = graph.output(tuple(env[node] for node in results_of(prepare.backward)))
    inputs = graph.find_nodes(op="placeholder")
    of_copy = dict(zip(prepare.differentiable, inputs[len(inputs) - len(prepare.differentiable) :], strict=True))
    reached = {of_copy[copy] for copy in heard if copy in of_copy}
    for node in graph.nodes:
        terms = reached.intersection(node.all_input_nodes)
        if node.target is aten.add.Tensor and len(terms) == 1 < len(node.all_input_nodes):
            node.replace_all_uses_with(*terms)  # the other is made of zeros
        elif terms:
            reached.add(node)
    results: Any = output.args[0]
    kept = [i for i, node in enumerate(results) if node in reached]
    output.args = (tuple(results[i] for i in kept),)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))  # collectives that nobody waits for go too
    left = tuple(copy for copy, node in of_copy.items() if copy in heard or node.users)
    for copy in set(of_copy).difference(left):
        graph.erase_node(of_copy[copy])
    backward = fx.GraphModule(prepare.backward, graph) if kept else None
    return replace(prepare, backward=backward, differentiable=left, with_grad=tuple(prepare.with_grad[i] for i in kept))


def join_reductions(
    backward: fx.GraphModule,
    summed: Sequence[int],
    prepare: Halves,
    copy_of: Mapping[int, int],
    of_copies: Sequence[torch.dtype | None],
) -> LastBackward:
    """Join the backward of a micro-batch with that of the preparation; arguments as of `end_backward`."""
    reductions = prepare.backward
    assert reductions is not None and not reductions.graph.find_nodes(op="get_attr")
    placeholders = reductions.graph.find_nodes(op="placeholder")
    num_saved = len(placeholders) - len(prepare.differentiable)
    of_copy = dict(zip(prepare.differentiable, placeholders[num_saved:], strict=True))
    results, reduced = results_of(backward), results_of(reductions)
    late = _in_the_end(reductions)
    early = [node for node in reductions.graph.nodes if node.op not in ("placeholder", "output") and node not in late]

    start = fx.Graph()
    of_backward = {node: placeholder(start, node.name, node) for node in backward.graph.find_nodes(op="placeholder")}
    totals = {i: placeholder(start, f"sum_{i}", results[i], of_copies[copy_of[i]] if i in copy_of else None) for i in summed}
    of_reductions = {of_copy[copy]: totals[i] for i, copy in copy_of.items()}
    silent = tuple(copy for copy in prepare.differentiable if copy not in copy_of.values())
    copies = results_of(prepare.forward)
    zeros = {copy: placeholder(start, f"zeros_{copy}", of_copy[copy], copies[copy].meta["val"].dtype) for copy in silent}
    of_reductions |= {node: placeholder(start, f"prepared_{node.name}", node) for node in placeholders[:num_saved]}
    given = {totals[i] for i in copy_of}
    coming: dict[fx.Node, list[int]] = defaultdict(list)
    for i in summed:
        coming[results[i]].append(i)
    waiting = {of_copy[copy] for copy in copy_of.values()}
    of_reductions |= {of_copy[copy]: _in_dtype(start, made, of_copy[copy]) for copy, made in zeros.items()}

    def reduce_what_is_there() -> None:
        for node in list(early):
            if not waiting.intersection(node.all_input_nodes) and all(used in of_reductions for used in node.all_input_nodes):
                of_reductions[node] = start.node_copy(node, of_reductions.__getitem__)
                early.remove(node)

    reduce_what_is_there()
    for node in backward.graph.nodes:
        if node.op not in ("placeholder", "output"):
            of_backward[node] = start.node_copy(node, of_backward.__getitem__)
        for i in coming.get(node, ()):
            added = add_to(start, totals[i], of_backward[node])
            if i in copy_of:
                of_reductions[of_copy[copy_of[i]]] = _laid_out(start, added, of_copy[copy_of[i]])
                waiting.remove(of_copy[copy_of[i]])
            reduce_what_is_there()
    assert not early and not waiting
    read = dict.fromkeys([*(used for node in late for used in node.all_input_nodes), *reduced])
    left = [node for node in read if node not in late]
    others = [of_backward[result] for i, result in enumerate(results) if i not in summed]
    start.output((*others, *(of_reductions[node] for node in left)))
    fuse_sums(start)
    start.lint()
    started = collect_small(reduce_in_place(fx.GraphModule(backward, start), given))
    return LastBackward(started, _finish(reductions, left, list(late)), len(others), silent)


def _finish(reductions: fx.GraphModule, left: Sequence[fx.Node], late: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of the reductions that starts when what is on its way is waited for."""
    graph = fx.Graph()
    env = {node: placeholder(graph, node.name, node) for node in left}
    for node in late:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results_of(reductions)))
    graph.lint()
    finish = overlap(fx.GraphModule(reductions, graph), parameters=())
    placeholders = finish.graph.find_nodes(op="placeholder")
    collectives = [made for made, node in zip(placeholders, left, strict=True) if node.target in STARTS]
    return collect_small(reduce_in_place(finish, collectives))


def _in_the_end(module: fx.GraphModule) -> dict[fx.Node, None]:
    """Waits, all-gathers (the backward may have one in flight in the same group), and what comes after them, in order."""
    late: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        if node.op != "output" and (node.target in (WAIT, ALL_GATHER) or any(used in late for used in node.all_input_nodes)):
            late[node] = None
    return late


def _laid_out(graph: fx.Graph, total: fx.Node, like: fx.Node) -> fx.Node:
    """A sum as the reductions have been traced for."""
    total = _in_dtype(graph, total, like)
    made = graph.call_function(aten.contiguous.default, (total,))
    made.meta = dict(total.meta)
    return made


def _in_dtype(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    dtype = like.meta["val"].dtype
    return node if node.meta["val"].dtype == dtype else cast(graph, node, dtype)
