"""Put kernels back: a product followed by nothing but the addition of its bias, and the backward of SiLU, which tracing takes apart."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import spec_of

aten = torch.ops.aten


def fuse_biases(local: fx.GraphModule) -> fx.GraphModule:
    """``add(linear(x, w), b)`` becomes ``linear(x, w, b)``, ``add(mm(x, w), b)`` becomes ``addmm(b, x, w)``, where b is a vector and no
    reshard stands between (then the product is used once, by the addition)."""
    for node in list(local.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        product, bias = node.args
        if not _is_product(product) or not isinstance(bias, fx.Node) or spec_of(bias).shape != spec_of(node).shape[-1:]:
            continue
        assert isinstance(product, fx.Node)
        x, weight = product.args
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


def fuse_silu_backwards(joint: fx.GraphModule) -> fx.GraphModule:
    """``grad * (s * (1 + x * (1 - s)))`` with ``s = sigmoid(x)`` becomes ``silu_backward(grad, x)``: torch has a formula for it that
    tracing reads (``math_silu_backward``), with seven passes over memory for one."""
    for sigmoid in joint.graph.find_nodes(op="call_function", target=aten.sigmoid.default):
        x, node = sigmoid.args[0], sigmoid
        for target, *args in (
            (aten.empty_like.default, ...),
            (aten.fill.Scalar, ..., 1),
            (aten.sub.Tensor, ..., sigmoid),
            (aten.mul.Tensor, x, ...),
            (aten.add.Scalar, ..., 1),
            (aten.mul.Tensor, sigmoid, ...),
        ):
            wanted = tuple(node if arg is ... else arg for arg in args)
            node = next((user for user in node.users if user.target is target and user.args == wanted), None)
            if node is None:
                break
        for last in list(node.users) if node is not None else ():
            if last.target is aten.mul.Tensor and last.args[1] is node:
                with joint.graph.inserting_before(last):
                    fused = joint.graph.call_function(aten.silu_backward.default, (last.args[0], x))
                fused.meta = dict(last.meta)
                last.replace_all_uses_with(fused)
                joint.graph.erase_node(last)
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return joint


def _is_product(node: object) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target in (aten.linear.default, aten.mm.default)
        and len(node.args) == 2
        and len(node.users) == 1
        and len(spec_of(node).shape) >= 2
    )
