"""Gradients of parameters travel compressed: a pass on local graphs, before they are differentiated.

    weight --replicate(axis=dp)--> use    becomes    weight --replicate(axis=dp, compress=topk:0.01, state=weight.0@dp)--> use

A reduction belongs to a parameter if nothing but reshards and casts lie between the two; it is what data, sequence and context
parallelism and ZeRO do with gradients. Reductions of activations, as tensor parallelism has them, stay exact, and so do gradients that
`Compression.reduction` leaves alone. With ZeRO, top-k and PowerSGD reduce the whole gradient, of which each rank keeps its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import fx

from autopar.compression import Compression
from autopar.graph import spec_of
from autopar.mesh import Mesh
from autopar.ops import collectives
from autopar.ops.collectives import RESHARDS
from autopar.passes.narrow import narrow


def compress_gradients(
    local: fx.GraphModule, parameters: Sequence[fx.Node], mesh: Mesh, compression: Compression, stage: int
) -> fx.GraphModule:
    """Let gradients travel compressed; the graph is changed in place.

    Args:
        local: the graph.
        parameters: its placeholders that are parameters.
        mesh: the mesh.
        compression: how.
        stage: of the pipeline; each keeps states of its own.
    """
    source = {node: node.meta["placeholder"].name for node in parameters}
    seen: Counter[str] = Counter()
    for node in local.graph.nodes:
        if node.target not in (*RESHARDS, narrow) or node.args[0] not in source:
            continue
        name = source[node] = source[node.args[0]]
        if not is_reduction(node.target, node.kwargs):
            continue
        spec, axis = spec_of(node), node.kwargs["axis"]
        size = mesh.sizes[mesh.names.index(axis)]
        if compression.reduction(spec.shape, spec.dtype.itemsize, size, is_scattered=is_scattered(node.target)) is not None:
            state = f"{name}.{stage}@{axis}"
            seen[state] += 1
            state += f".{seen[state]}" if seen[state] > 1 else ""
            node.kwargs = {**node.kwargs, "size": size, "compress": str(compression), "state": state}
    local.recompile()
    return local


def kept_bytes(local: fx.GraphModule) -> dict[str, int]:
    """Bytes that this graph keeps of gradients from step to step, by parameter."""
    found: Counter[str] = Counter()
    for node in local.graph.nodes:
        how = Compression.of(node.kwargs.get("compress"))
        if how is not None:
            spec, name = spec_of(node), node.kwargs["state"].rpartition("@")[0].rpartition(".")[0]
            reduction = how.reduction(spec.shape, spec.dtype.itemsize, node.kwargs["size"], is_scattered=is_scattered(node.target))
            assert reduction is not None
            found[name] += reduction.kept_bytes
    return dict(found)


def is_reduction(op: object, arguments: Mapping[str, object]) -> bool:
    """Whether the backward of a reshard, with its keyword arguments, adds up over ranks."""
    return op is collectives.replicate or (op is collectives.all_gather and bool(arguments["partial_grad"]))


def is_scattered(op: object) -> bool:
    """Whether each rank gets its part of the sum only."""
    return op is collectives.all_gather
