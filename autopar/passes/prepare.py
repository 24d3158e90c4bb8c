"""Local graph -> what is done to parameters once a step, and the body that runs once for every micro-batch.

A replicated parameter's gradient is reduced, and a ZeRO-1 parameter gathered and reduced, once a step, however many micro-batches there
are. So their reshards move out of the body into the *prepare* graph: stored parameters in, *copies* out. Its backward takes the gradients
of the copies, added up over the micro-batches, to those of the stored parameters.

ZeRO-2 and -3 gather and reduce-scatter for every micro-batch, and that stays in the body. What comes of it is as small as what is stored,
and adds up as it is: between replicas of the shards (hybrid sharding) it is reduced once a step too. Their copies are what is stored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from autopar.graph import spec_of
from autopar.mesh import MICROBATCH
from autopar.ops.collectives import RESHARDS, replicate
from autopar.passes.narrow import narrow


@dataclass(frozen=True, slots=True)
class Prepared:
    """A local graph in two.

    Args:
        prepare: parameters and coordinates -> copies; None if there is nothing to do.
        taken: positions of its inputs among those of the local graph.
        num_copies: of its outputs, which are the first inputs of the body.
        sources: for each copy the position of the parameter that it is made of.
        narrowed: for each copy the dtype that the body takes it in, if ``prepare`` gives it wider, for the sake of its backward.
        summed: for each copy the dtype that its gradients add up in, if it is another than its own.
        body: copies, then what else it reads -> the outputs of the local graph.
        kept: positions of the inputs after the copies among those of the local graph.
    """

    prepare: fx.GraphModule | None
    taken: tuple[int, ...]
    num_copies: int
    sources: tuple[int, ...]
    narrowed: tuple[torch.dtype | None, ...]
    summed: tuple[torch.dtype | None, ...]
    body: fx.GraphModule
    kept: tuple[int, ...]


def split_prepare(
    local: fx.GraphModule, early: Collection[int], replicas: Collection[int], coordinates: Collection[int], *, narrows: bool = True
) -> Prepared:
    """Split a local graph.

    Args:
        local: the graph.
        early: positions of the parameters that are made ready once a step.
        replicas: of those that every micro-batch gathers, and that only replicas of their shards reduce once a step.
        coordinates: positions of the coordinates.
        narrows: whether narrower copies are made once a step too; where parameters are on the host they are made about their use.
    """
    placeholders = local.graph.find_nodes(op="placeholder")
    moved = _moved(local, {placeholders[i] for i in early}, (*RESHARDS, narrow) if narrows else RESHARDS)
    shared = _moved(local, {placeholders[i] for i in replicas}, (replicate,))
    moved = {node: None for node in local.graph.nodes if node in moved or node in shared}
    copies = [node for node in moved if any(user not in moved for user in node.users)]
    read = {used for node in moved for used in node.all_input_nodes}
    taken = tuple(i for i, node in enumerate(placeholders) if node in read)
    assert all(i in early or i in replicas or i in coordinates for i in taken)
    prepare = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in (*(placeholders[i] for i in taken), *moved):
        env[node] = prepare.node_copy(node, env.__getitem__)
    wide = [node.all_input_nodes[0] if node.target is narrow else node for node in copies]
    prepare.output(tuple(_owned(prepare, env[node]) for node in wide))

    body = fx.Graph()
    env = {}
    for node in copies:
        env[node] = body.placeholder(node.name)
        env[node].meta = dict(node.meta)
    rest = [node for node in local.graph.nodes if node not in moved]
    used = {operand for node in rest for operand in node.all_input_nodes}
    kept = tuple(i for i, node in enumerate(placeholders) if node in used)
    for node in (*(placeholders[i] for i in kept), *(node for node in rest if node.op != "placeholder")):
        env[node] = body.node_copy(node, env.__getitem__)
    dtypes = [spec_of(node).dtype for node in copies]
    return Prepared(
        prepare=fx.GraphModule(local, prepare) if copies else None,
        taken=taken,
        num_copies=len(copies),
        sources=tuple(placeholders.index(_source(node)) for node in copies),
        narrowed=tuple(dtype if node.target is narrow else None for node, dtype in zip(copies, dtypes, strict=True)),
        summed=tuple(_other(spec_of(_source(node)).dtype, dtype) for node, dtype in zip(copies, dtypes, strict=True)),
        body=fx.GraphModule(local, body),
        kept=kept,
    )


def _source(node: fx.Node) -> fx.Node:
    """The parameter that a copy is made of."""
    while node.op != "placeholder":
        node = node.all_input_nodes[0]
    return node


def _other(dtype: torch.dtype, than: torch.dtype) -> torch.dtype | None:
    return None if dtype == than else dtype


def _owned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What is differentiated must not give back its inputs; `differentiate` takes the copy away again."""
    copy = graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta = dict(node.meta)
    return copy


def _moved(local: fx.GraphModule, parameters: set[fx.Node], targets: Collection[object]) -> dict[fx.Node, None]:
    """What is done to parameters, of what ``targets`` name, in order; not the parts of micro-batches, of which each has its own."""
    moved: dict[fx.Node, None] = {}
    for node in local.graph.nodes:
        if node.target in targets and node.kwargs.get("axis") != MICROBATCH and (node.args[0] in parameters or node.args[0] in moved):
            moved[node] = None
    return moved
