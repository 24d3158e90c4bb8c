"""Scaled dot-product attention: batch dims, heads, value features and queries are free.

With grouped queries the heads of q are ``(h g)`` and those of k and v are ``h``. A rank with a part of the queries has all keys and values,
gathered (context parallelism as in Llama 3: Dubey et al. 2024, section 3.3.2); if the mask is causal it is told which part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.rules.lines import line, whole
from autopar.rules.notation import Rule
from autopar.rules.ranged import attention_range
from autopar.rules.registry import Arguments, Call, Coordinate, Local, register

aten = torch.ops.aten


def _attention(call: Call) -> str | Rule:
    """``b h s d!, b h t! d!, b h t! e -> b h s e``, linear in the values; ``s@`` if the mask is causal."""
    query, key, value = (spec.shape for spec in call.operands[:3])
    is_grouped = bool(call.argument(7, "enable_gqa", False))
    if call.argument(4, "dropout_p", 0.0) != 0.0 or (is_grouped and key[-3] != value[-3]):
        return whole(call)
    result = call.results[0].shape[:-2]
    names = [f"b{i}" for i in range(len(result))]
    sizes: dict[str, int] = {}
    grouped = is_grouped and query[-3] != key[-3]
    if grouped:
        sizes = {"h": key[-3], "g": query[-3] // key[-3]}
        names[-1] = "(h g)" if sizes["h"] > 1 else "g"
    kv_names = [*names[:-1], "h"] if grouped else names
    rows = "s@" if call.argument(5, "is_causal", False) else "s"

    def batch(shape: Sequence[int], of: list[str]) -> list[str]:
        return ["1" if size == 1 else of[len(result) - len(shape) + i] for i, size in enumerate(shape)]

    terms = [
        [*batch(query[:-2], names), rows, "d!"],
        [*batch(key[:-2], kv_names), "t!", "d!"],
        [*batch(value[:-2], kv_names), "t!", "e"],
    ]
    for mask in call.operands[3:]:
        last = ["1" if size == 1 else letter for size, letter in zip(mask.shape[-2:], (rows, "t!"), strict=True)]
        terms.append([*batch(mask.shape[:-2], names), *last])
    return Rule.parse(line(terms, [[*batch(result, names), rows, "e"]], "2"), **sizes)


def _local_attention(call: Call, local: Local) -> Arguments:
    axes = local.axes.get("s", ())
    if not axes or not call.argument(5, "is_causal", False):
        return call.target, call.args, call.kwargs
    sizes = [local.mesh_sizes[axis] for axis in axes]
    return attention_range, (*call.args[:3], [Coordinate(axis) for axis in axes], sizes), {"scale": call.argument(6, "scale")}


register(aten.scaled_dot_product_attention.default, _attention, local=_local_attention)
