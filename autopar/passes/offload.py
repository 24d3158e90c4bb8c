"""Forward and backward of a step with values on the host: what is used of them is fetched before, and gradients and activations leave.

    parameter -> use    becomes    parameter --fetch--> --arrive--> use        gradient    becomes    gradient --leave-->
    activation -> saved    becomes    activation --leave--> saved        saved -> use    becomes    saved --fetch--> --arrive--> use

The copies are put before their first use; `passes.overlap` then starts each when the one before it is there. What the backward needs of a
parameter is either the copy of the forward, which so lives until then, or the parameter, which is fetched again. Activations leave after
their last use in the forward, and come back one ahead, in the order of their first use in the backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.ops.host import arrive, fetch, leave
from autopar.passes.aliases import base_of, readers
from autopar.passes.differentiate import Halves

LARGE_NUM_BYTES = 2**20
"""Saved activations leave if they are as large as this; for less, a copy is mostly its latency."""


def fetch_parameters(
    halves: Halves, hosted: Collection[int], device: torch.device, *, again: bool, handed_on: bool = False
) -> Halves:
    """Fetch what the graphs use of inputs that are on the host.

    Args:
        halves: graphs of plain tensors.
        hosted: positions of the inputs that are on the host.
        device: where the graphs run.
        again: the backward fetches anew, so that the copies are there about their use alone.
        handed_on: outputs that are such inputs stay what they are, on the host.
    """
    (output,) = halves.forward.graph.find_nodes(op="output")
    results = [_viewed(node) if handed_on else node for node in output.args[0]]
    output.args = (tuple(results),)
    halves.forward.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    placeholders = halves.forward.graph.find_nodes(op="placeholder")
    inputs = [placeholders[i] for i in sorted(hosted)]
    stays = [(handed_on if k < halves.num_outputs else again) and node in inputs for k, node in enumerate(results)]
    forward = _fetching(halves.forward, inputs, device, stays)
    if halves.backward is None or not again:
        return replace(halves, forward=forward)
    saved = halves.backward.graph.find_nodes(op="placeholder")
    from_host = [saved[k - halves.num_outputs] for k, is_host in enumerate(stays) if is_host and k >= halves.num_outputs]
    return replace(halves, forward=forward, backward=_fetching(halves.backward, from_host, device, ()))


def _fetching(
    module: fx.GraphModule, inputs: Sequence[fx.Node], device: torch.device, stays: Sequence[bool], *, ahead: bool = False
) -> fx.GraphModule:
    """Fetch inputs of a graph before their first use, or ``ahead``, before that of the one before; results that ``stays`` marks are not
    fetched."""
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    place = {node: i for i, node in enumerate(graph.nodes)}
    results = list(output.args[0])
    kept = [node if is_kept else None for node, is_kept in zip(results, stays, strict=True)] if stays else [None] * len(results)
    output.args = (tuple(node for node, is_kept in zip(results, kept, strict=True) if is_kept is None),)
    copies: dict[fx.Node, fx.Node] = {}
    users_of = {node: sorted(node.users, key=place.__getitem__) for node in inputs if node.users}
    before: fx.Node | None = None
    for node, users in sorted(users_of.items(), key=lambda entry: place[entry[1][0]]):
        with graph.inserting_before(before if ahead and before is not None else users[0]):
            coming = graph.call_function(fetch, (node, device))
        with graph.inserting_before(users[0]):
            copies[node] = graph.call_function(arrive, (coming,))
        before = copies[node]
        for made in (coming, copies[node]):
            made.meta = {key: value for key, value in node.meta.items() if key != "placeholder"}
        for user in users:
            user.replace_input_with(node, copies[node])
    output.args = (tuple(copies.get(node, node) if is_kept is None else is_kept for node, is_kept in zip(results, kept, strict=True)),)
    graph.lint()
    module.recompile()
    return module


def leave_gradients(backward: fx.GraphModule, positions: Collection[int]) -> fx.GraphModule:
    """Let some results of a graph leave for the host as soon as they are there."""
    graph = backward.graph
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    for i in positions:
        with graph.inserting_after(results[i]) if results[i].op != "placeholder" else graph.inserting_before(output):
            left = graph.call_function(leave, (results[i],))
        left.meta = dict(results[i].meta)
        results[i] = left
    output.args = (tuple(results),)
    graph.lint()
    backward.recompile()
    return backward


def leave_activations(halves: Halves, stored: Collection[int], device: torch.device) -> Halves:
    """Let large saved activations leave after their last use in the forward, and come back for the backward.

    What is made of parameters alone is none. Parts of one memory leave together, each as a copy of its own (query, key and value of one
    product); they stay if an output of the model is among them, or if they overlap.

    Args:
        halves: graphs of plain tensors, in their final order.
        stored: positions of the inputs that are parameters, or copies of them.
        device: where the graphs run.
    """
    if halves.backward is None:
        return halves
    graph = halves.forward.graph
    (output,) = graph.find_nodes(op="output")
    results, placeholders = list(output.args[0]), graph.find_nodes(op="placeholder")
    place, alone = {node: i for i, node in enumerate(graph.nodes)}, {placeholders[i] for i in stored}
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and all(used in alone for used in node.all_input_nodes):
            alone.add(node)
    sharing = dict[fx.Node, list[int]]()
    for k, node in enumerate(results):
        sharing.setdefault(base_of(node), []).append(k)
    last_reader = dict[int, fx.Node]()
    for base, parts in sharing.items():
        sizes = [_num_bytes(results[k]) for k in parts]
        is_own = base.op == "call_function" and base not in alone and parts[0] >= halves.num_outputs and sum(sizes) <= _num_bytes(base)
        if is_own and max(sizes) >= LARGE_NUM_BYTES:
            last = max([*(results[k] for k in parts), *(readers(base) - {output})], key=place.__getitem__)
            last_reader |= dict.fromkeys(parts, last)
    left = sorted(last_reader)
    for k in left:
        with graph.inserting_after(last_reader[k]):
            gone = graph.call_function(leave, (results[k],))
        gone.meta = dict(results[k].meta)
        results[k] = gone
    output.args = (tuple(results),)
    graph.lint()
    halves.forward.recompile()
    saved = halves.backward.graph.find_nodes(op="placeholder")
    coming = [saved[k - halves.num_outputs] for k in left]
    return replace(halves, backward=_fetching(halves.backward, coming, device, (), ahead=True))


def _viewed(node: fx.Node) -> fx.Node:
    """What a node is a view of that is all of it in its own shape, as that of a reshard which does nothing forward."""
    while node.target is torch.ops.aten.view.default and node.meta["val"].shape == node.args[0].meta["val"].shape:  # type: ignore[union-attr]
        node = node.all_input_nodes[0]
    return node


def _num_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
