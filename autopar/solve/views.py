"""Which ops of the model give views, and which pass a gradient on as it is."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import Value, operands_of, value_spec

aten = torch.ops.aten

ALIASES = frozenset(
    {
        aten.reshape.default,
        aten.transpose.int,
        aten.permute.default,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
        aten.detach.default,
    }
)
"""Ops whose results share the storage of their operand, as a rule (`is_view`)."""


def is_view(node: fx.Node) -> bool:
    """Whether an op's results share the storage of its operand; what is repeated and then reshaped is a copy."""
    if node.target not in ALIASES:
        return False
    before = operands_of(node)[0].node
    return node.target is not aten.reshape.default or before.target is not aten.expand.default or not _is_repeated(before)


def _is_repeated(node: fx.Node) -> bool:
    """Whether the result of an expansion has more elements than what is stored of it."""
    return value_spec(operands_of(node)[0]).num_bytes < value_spec(Value(node)).num_bytes


def passes_gradient(node: fx.Node, value: Value) -> bool:
    """Whether the gradient of an op's result is that of a value which it reads: of views and sums."""
    result, read = value_spec(Value(node)), value_spec(value)
    if node.target is aten.add.Tensor:
        return result.shape == read.shape
    return node.target in ALIASES and result.num_bytes == read.num_bytes
