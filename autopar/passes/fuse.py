"""Put kernels back: a product followed by nothing but the addition of its bias."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import spec_of

aten = torch.ops.aten


def fuse_biases(local: fx.GraphModule) -> fx.GraphModule:
    """``add(linear(x, w), b)`` becomes ``linear(x, w, b)``, ``add(mm(x, w), b)`` becomes ``addmm(b, x, w)``, where b is a vector and no
    reshard stands between (then the product is used once, by the addition)."""
    for node in list(local.graph.nodes):
        product = biased_product(node)
        if product is None:
            continue
        (x, weight), bias = product.args, node.args[1]
        with local.graph.inserting_before(node):
            if product.target is aten.linear.default:
                fused = local.graph.call_function(aten.linear.default, (x, weight, bias))
            else:
                fused = local.graph.call_function(aten.addmm.default, (bias, x, weight))
        fused.meta = {**node.meta, "custom": product.meta.get("custom", {})}
        node.replace_all_uses_with(fused)
        local.graph.erase_node(node)
        local.graph.erase_node(product)
    local.recompile()
    return local


def biased_product(node: fx.Node) -> fx.Node | None:
    """The product to which an addition adds its bias, and nothing reads it but that; None for any other op."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    product, bias = node.args
    if not _is_product(product) or not isinstance(bias, fx.Node) or spec_of(bias).shape != spec_of(node).shape[-1:]:
        return None
    assert isinstance(product, fx.Node)
    return product


def _is_product(node: object) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target in (aten.linear.default, aten.mm.default)
        and len(node.args) == 2
        and len(node.users) == 1
        and len(spec_of(node).shape) >= 2
    )
