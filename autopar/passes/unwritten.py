"""Memory that nothing was written to: what is read of it differs from rank to rank, and from step to step."""

from __future__ import annotations

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.graph import spec_of
from autopar.passes.aliases import readers

aten = torch.ops.aten

_BLANK = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided})
_READ_NO_VALUES = frozenset({aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like})
_WRITE = frozenset(
    {
        aten.fill,
        aten.zero,
        aten.where,
        aten.masked_fill,
        aten.masked_scatter,
        aten.index_put,
        aten.index_copy,
        aten.index_fill,
        aten.put,
        aten.scatter,
        aten.slice_scatter,
        aten.select_scatter,
        aten.diagonal_scatter,
        aten.as_strided_scatter,
    }
)
"""What ops become that write to an operand, perhaps to a part of it; nobody can tell whether that is all that is read."""


def refuse_unwritten(module: fx.GraphModule) -> fx.GraphModule:
    """Leave the graph as it is.

    Raises:
        CaptureError: it reads a tensor that it has not written to.
    """
    for node in module.graph.nodes:
        if _packet(node) in _BLANK and spec_of(node).numel and {*map(_packet, readers(node))} - _READ_NO_VALUES - _WRITE:
            raise CaptureError(
                f"the forward reads a tensor of shape {spec_of(node).shape} that nothing was written to ({node.meta.get('line', '')}): "
                "make it by torch.zeros, or write to all of it; trunc_normal_ of torch.nn.init writes nothing on meta, where models are "
                "captured"
            )
    return module


def _packet(node: fx.Node) -> object:
    """The op, whichever of its overloads."""
    return getattr(node.target, "overloadpacket", None)
