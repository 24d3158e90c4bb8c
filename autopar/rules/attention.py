"""Scaled dot-product attention: batch dims, heads and value features are free, so are queries unless the mask is causal.

With grouped queries the heads of q are ``(h g)`` and those of k and v are ``h``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.rules.lines import line, whole
from autopar.rules.notation import Rule
from autopar.rules.registry import Call, register

aten = torch.ops.aten


def _attention(call: Call) -> str | Rule:
    """``b h s d!, b h t! d!, b h t! e -> b h s e``, linear in the values."""
    if call.argument(4, "dropout_p", 0.0) != 0.0:
        return whole(call)
    query, key, value = (spec.shape for spec in call.operands[:3])
    result = call.results[0].shape[:-2]
    names = [f"b{i}" for i in range(len(result))]
    sizes: dict[str, int] = {}
    grouped = bool(call.argument(7, "enable_gqa", False)) and query[-3] != key[-3]
    if grouped:
        sizes = {"h": key[-3], "g": query[-3] // key[-3]}
        names[-1] = "(h g)" if sizes["h"] > 1 else "g"
    kv_names = [*names[:-1], "h"] if grouped else names
    rows = "s!" if call.argument(5, "is_causal", False) else "s"

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


register(aten.scaled_dot_product_attention.default, _attention)
