"""Forward and backward of a step with stored parameters on the host: what of them is used is fetched before, and gradients leave.

    p -> use    becomes    p --fetch--> --arrive--> use          gradient    becomes    gradient --leave-->

The copies are put before their first use; `passes.overlap` then starts each when the one before it is there. What the backward needs of a
parameter is either the copy of the forward, which so lives until then, or the parameter, which is fetched again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.host import arrive, fetch, leave
from autopar.passes.differentiate import Halves


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
    results = output.args[0]
    placeholders = halves.forward.graph.find_nodes(op="placeholder")
    inputs = [placeholders[i] for i in sorted(hosted)]
    stays = [(handed_on if k < halves.num_outputs else again) and node in inputs for k, node in enumerate(results)]
    forward = _fetching(halves.forward, inputs, device, stays)
    if halves.backward is None or not again:
        return replace(halves, forward=forward)
    saved = halves.backward.graph.find_nodes(op="placeholder")
    from_host = [saved[k - halves.num_outputs] for k, is_host in enumerate(stays) if is_host and k >= halves.num_outputs]
    return replace(halves, forward=forward, backward=_fetching(halves.backward, from_host, device, ()))


def _fetching(module: fx.GraphModule, inputs: Sequence[fx.Node], device: torch.device, stays: Sequence[bool]) -> fx.GraphModule:
    """Fetch inputs of a graph before their first use; results that ``stays`` marks are not fetched."""
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    place = {node: i for i, node in enumerate(graph.nodes)}
    results = list(output.args[0])
    kept = [node if is_kept else None for node, is_kept in zip(results, stays, strict=True)] if stays else [None] * len(results)
    output.args = (tuple(node for node, is_kept in zip(results, kept, strict=True) if is_kept is None),)
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        users = sorted(node.users, key=place.__getitem__)
        if not users:
            continue
        with graph.inserting_before(users[0]):
            coming = graph.call_function(fetch, (node, device))
            copies[node] = graph.call_function(arrive, (coming,))
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
