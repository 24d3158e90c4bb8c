"""Rows at marked places, counted sample by sample."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.graph import spec_of, specs_of, value_of, value_spec
from autopar.passes.emitter import Emitter, argument

aten = torch.ops.aten


def join_parts(module: fx.GraphModule) -> fx.GraphModule:
    """A ``cat`` of all slices that ``unbind`` makes of a tensor, in their order, is the tensor with two dims in one."""
    for node in list(module.graph.nodes):
        if node.target is not aten.cat.default:
            continue
        parts: Any = node.args[0]
        source = parts[0].args[0] if parts[0].target is operator.getitem else None
        if not isinstance(source, fx.Node) or source.target is not aten.unbind.int or len(parts) != len(specs_of(source)):
            continue
        if any(part.target is not operator.getitem or part.args != (source, i) for i, part in enumerate(parts)):
            continue
        rank = len(spec_of(node).shape)
        outer, inner = argument(source, 1, "dim", 0) % (rank + 1), argument(node, 1, "dim", 0) % rank
        others = [dim for dim in range(rank + 1) if dim != outer]
        emitter, whole = Emitter(module, node), source.args[0]
        if outer != inner:
            whole = emitter(aten.permute.default, whole, [*others[:inner], outer, *others[inner:]])
        emitter.replace_by(emitter(aten.reshape.default, whole, list(spec_of(node).shape)))
    return module


def take_marked_rows(module: fx.GraphModule) -> fx.GraphModule:
    """``x.masked_scatter(mask, rows)`` and ``x[mask] = rows``, for x [samples, places, width] and a mask of places, take for each sample
    its part of the rows, of which each has as many: the op that says which goes where raises an error for a sample that has not."""
    for node in list(module.graph.nodes):
        found = _marked_and_rows(node)
        if found is None:
            continue
        marked, rows = found
        x, (samples, places, width) = node.args[0], spec_of(node).shape
        emitter, num_rows = Emitter(module, node), value_spec(value_of(rows)).numel // (samples * width)
        marked = emitter(aten.reshape.default, marked, [samples, places])
        row = emitter(torch.ops.autopar.row_of_mark.default, marked, num_rows)
        row = emitter(aten.expand.default, emitter(aten.unsqueeze.default, row, -1), [samples, places, width])
        taken = emitter(aten.gather.default, emitter(aten.reshape.default, rows, [samples, num_rows, width]), 1, row)
        emitter.replace_by(emitter(aten.where.self, emitter(aten.unsqueeze.default, marked, -1), taken, x))
    return module


def _marked_and_rows(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """A mask of places, and rows of which each sample may have as many; None if the node writes no such rows."""
    args: Any = node.args
    if node.target is aten.masked_scatter.default:
        x, mask, rows = args
        while mask.target in (aten.expand.default, aten.expand_as.default):  # it is repeated along the last dim, or not of the shape below
            mask = mask.args[0]
        shape = (*spec_of(node).shape[:-1], 1)
    elif node.target is aten.index_put.default and len(args[1]) == 1 and not argument(node, 3, "accumulate", False):
        x, (mask,), rows = args[:3]
        shape = spec_of(node).shape[:-1]
        if value_spec(value_of(rows)).shape[1:] != spec_of(node).shape[-1:] or value_spec(value_of(rows)).shape[0] == 1:
            return None  # it is repeated
    else:
        return None
    marked, given, size = (value_spec(value_of(value)) for value in (mask, rows, x))
    if len(size.shape) != 3 or size.shape != spec_of(node).shape or marked.shape != shape or marked.dtype is not torch.bool:
        return None
    if not given.numel or given.numel % (size.shape[0] * size.shape[2]) or given.numel == size.numel:
        return None  # as many as there are places may be more than are marked
    return mask, rows
