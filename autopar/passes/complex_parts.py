"""Writes into parts of complex tensors: torch has no gradient for them, and has one for the same writes into pairs of real numbers."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import spec_of
from autopar.passes.emitter import Emitter, argument

aten = torch.ops.aten

_WRITES = frozenset({aten.slice_scatter.default, aten.select_scatter.default})


def write_pairs(module: fx.GraphModule) -> fx.GraphModule:
    """``slice_scatter`` and ``select_scatter`` of complex tensors become those of their real and imaginary parts, a last dim of two."""
    for node in list(module.graph.nodes):
        if node.target not in _WRITES or not spec_of(node).dtype.is_complex:
            continue
        emitter, dim = Emitter(module, node), argument(node, 2, "dim", 0) % len(spec_of(node).shape)
        pairs = [emitter(aten.view_as_real.default, emitter(aten.resolve_conj.default, x)) for x in node.args[:2]]
        rest = {name: value for name, value in node.kwargs.items() if name != "dim"}
        written = emitter(node.target, *pairs, dim, *node.args[3:], **rest)
        emitter.replace_by(emitter(aten.view_as_complex.default, emitter(aten.contiguous.default, written)))
    return module
