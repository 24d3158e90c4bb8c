"""Which library computes the matrix products."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops import onednn

aten = torch.ops.aten


def lower_products(module: fx.GraphModule) -> fx.GraphModule:
    """Give the products to oneDNN that it is faster at (`autopar.ops.onednn`); the graph is one of plain tensors, with ``meta["val"]``."""
    for node in list(module.graph.nodes):
        if node.target is aten.mm.default:
            bias, (left, right) = None, node.args
        elif node.target is aten.addmm.default and not node.kwargs and node.args[0].meta["val"].dim() == 1:
            bias, left, right = node.args
        else:
            continue
        x, w = left.meta["val"], right.meta["val"]
        if not x.is_contiguous() or not onednn.takes(x.device, x.dtype, 2.0 * x.shape[0] * x.shape[1] * w.shape[1]):
            continue
        with module.graph.inserting_before(node):
            weight = right.args[0] if right.target is aten.t.default else module.graph.call_function(aten.t.default, (right,))
            weight.meta.setdefault("val", w.t())
            made = module.graph.call_function(onednn.linear, (left, weight, bias))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)
        if right.target is aten.t.default and not right.users:
            module.graph.erase_node(right)
    module.graph.lint()
    module.recompile()
    return module
