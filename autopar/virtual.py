"""Virtual ranks: run one graph for every rank of a mesh in lockstep, in this process, without process groups.

Each node is computed for all ranks before the next, so a collective simply looks at the values of its group.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.mesh import Mesh
from autopar.ops.collectives import group_name

_c10d = torch.ops._c10d_functional
_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def run_lockstep(graph: fx.GraphModule, rank_inputs: Sequence[Sequence[object]], mesh: Mesh) -> list[list[Any]]:
    """Run ``graph`` on every rank of ``mesh``.

    Args:
        graph: a graph whose collectives are ``_c10d_functional`` ops on groups named by `autopar.ops.collectives.group_name`.
        rank_inputs: for each rank its flat placeholder values.
        mesh: gives the groups.

    Returns:
        For each rank the flat list of outputs.
    """
    groups = {group_name(name): mesh.groups(axis) for axis, name in enumerate(mesh.names)}
    values: list[dict[fx.Node, Any]] = [{} for _ in range(mesh.num_ranks)]
    inputs = [iter(given) for given in rank_inputs]
    last_use = {used: node for node in graph.graph.nodes for used in node.all_input_nodes}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last_use.items():
        dying.setdefault(node, []).append(used)

    for node in graph.graph.nodes:
        if node.op == "placeholder":
            results = [next(given) for given in inputs]
        elif node.op == "get_attr":
            results = [operator.attrgetter(str(node.target))(graph)] * mesh.num_ranks
        else:
            loaded = [fx.node.map_arg((node.args, node.kwargs), env.__getitem__) for env in values]
            if node.op == "output":
                return [_flat(args[0]) for args, _ in loaded]
            results = _call(node, loaded, groups)
        for env, result in zip(values, results, strict=True):
            env[node] = result
        for dead in dying.get(node, ()):
            for env in values:
                del env[dead]
    raise AssertionError("graph has no output")


def _flat(outputs: object) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _call(node: fx.Node, loaded: list[Any], groups: dict[str, list[list[int]]]) -> list[Any]:
    target = node.target
    assert node.op == "call_function" and callable(target), f"virtual ranks cannot run {node.format_node()}"
    if getattr(target, "namespace", None) != "_c10d_functional":
        return [target(*args, **kwargs) for args, kwargs in loaded]
    if target is _c10d.wait_tensor.default:
        return [args[0] for args, _ in loaded]
    name = loaded[0][0][-1]
    results: list[Any] = [None] * len(loaded)
    for members in groups[name]:
        args = [loaded[rank][0] for rank in members]
        if target in (_c10d.all_reduce_.default, _c10d.all_reduce_coalesced_.default):
            outputs = _in_place([a[0] for a in args], args[0][1])
        else:
            outputs = _collective(target, args)
        for rank, output in zip(members, outputs, strict=True):
            results[rank] = output
    return results


def _in_place(operands: list[Any], reduction: str) -> list[Any]:
    """All-reduce tensors, or lists of tensors, into themselves."""
    for each in zip(*([x] if isinstance(x, torch.Tensor) else x for x in operands), strict=True):
        reduced = _REDUCTIONS[reduction](torch.stack(each))
        for x in each:
            x.copy_(reduced)
    return operands


def _collective(target: object, args: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Outputs for the members of one group, in group order."""
    inputs = [a[0] for a in args]
    if target is _c10d.all_reduce.default:
        reduced = _REDUCTIONS[args[0][1]](torch.stack(inputs))
        return [reduced.clone() for _ in inputs]
    if target is _c10d.all_gather_into_tensor.default:
        gathered = torch.cat(inputs)
        return [gathered.clone() for _ in inputs]
    if target is _c10d.reduce_scatter_tensor.default:
        return list(_REDUCTIONS[args[0][1]](torch.stack(inputs)).chunk(len(inputs)))
    if target is _c10d.all_to_all_single.default:
        parts = [x.split(list(a[2])) for x, a in zip(inputs, args, strict=True)]
        return [torch.cat([part[i] for part in parts]) for i in range(len(inputs))]
    raise AssertionError(f"virtual ranks do not know the collective {target}")
