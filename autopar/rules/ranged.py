"""Forms of an op for a rank that holds a range of an index: rows of an embedding, classes of a cross entropy, queries of an attention.

Several mesh axes may share one range, major first; ``coordinates`` are this rank's positions on them, int64 tensors of shape [1].
An index that no rank has is out of bounds on all of them, as it is on one device: torch raises, on CUDA by an assertion of the device.
They are ordinary differentiable torch code that is traced with its backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.ops.collectives import group_name

_c10d = torch.ops._c10d_functional


def embedding_range(
    weight: torch.Tensor,
    ids: torch.Tensor,
    coordinates: Sequence[torch.Tensor],
    axis_sizes: Sequence[int],
    padding_idx: int = -1,
) -> torch.Tensor:
    """The partial look-up in this rank's rows: rows that other ranks hold come out as zeros, and the sum over ranks is the look-up.

    Args:
        weight: this rank's rows.
        ids: row numbers in the whole weight; others are out of bounds of the look-up.
        coordinates: position on every axis that shards the rows, major first.
        axis_sizes: sizes of these axes.
        padding_idx: a row that gets no gradient; -1 for none.
    """
    rows = weight.shape[0]
    local = ids - _start(coordinates, axis_sizes, rows)
    inside = (local >= 0) & (local < rows)
    found = torch.nn.functional.embedding(torch.where(inside, local, _zero_or_beyond(ids, rows * math.prod(axis_sizes))), weight)
    if padding_idx >= 0:
        found = torch.where((ids == padding_idx).unsqueeze(-1), found.detach(), found)
    return torch.where(inside.unsqueeze(-1), found, 0.0)


def cross_entropy_range(
    logits: torch.Tensor,
    target: torch.Tensor,
    coordinates: Sequence[torch.Tensor],
    axis_sizes: Sequence[int],
    axis_names: Sequence[str],
    ignore_index: int,
) -> torch.Tensor:
    """Summed cross entropy of logits [..., classes] whose classes are shared out; the same number on every rank of the axes.

    The logits are never gathered: a maximum, a sum and the target's logit travel for each row.
    """
    start = _start(coordinates, axis_sizes, logits.shape[-1])
    classes = logits.shape[-1] * math.prod(axis_sizes)
    total: torch.Tensor = _CrossEntropyRange.apply(logits, target, start, classes, tuple(axis_names), ignore_index)
    return total


def attention_range(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    coordinates: Sequence[torch.Tensor],
    axis_sizes: Sequence[int],
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's queries [..., heads, queries, width] to all keys and values [..., heads, keys, width]; where several
    heads of queries share one of keys, they stand next to each other.

    With a mask, so scores of keys that come later are computed and thrown away, on every rank as many.
    """
    rows, columns = query.shape[-2], key.shape[-2]
    own = _start(coordinates, axis_sizes, rows) + torch.arange(rows, device=query.device)
    mask = own.unsqueeze(-1) >= torch.arange(columns, device=query.device)
    if query.dim() > 2:
        key, value = (x.repeat_interleave(max(1, query.shape[-3] // x.shape[-3]), -3) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def mean_part(loss: Callable[..., torch.Tensor], parts: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A rank's share of a mean over as many ``parts`` of equal size; a sum over its part might be beyond float16."""
    return loss(*args, **kwargs) / parts


class _CrossEntropyRange(torch.autograd.Function):
    """Saves the logits with one maximum and one sum a row; the gradient needs no collective."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, start: torch.Tensor, classes: int, axes: tuple[str, ...], ignore_index: int
    ) -> torch.Tensor:
        wide = _widened(logits)
        maximum = _all_reduce(wide.amax(-1), "max", axes)
        total = _all_reduce((wide - maximum.unsqueeze(-1)).exp().sum(-1), "sum", axes)
        local = target - start
        inside = (local >= 0) & (local < logits.shape[-1])
        counted = target != ignore_index
        index = torch.where(inside, local, torch.where(counted, _zero_or_beyond(target, classes), 0))
        own = wide.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        picked = _all_reduce(torch.where(inside, own, 0.0), "sum", axes)
        ctx.save_for_backward(logits, index, inside & counted, counted, maximum, total)
        loss = torch.where(counted, total.log() + maximum - picked, 0.0).sum()
        return loss.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, index, own, counted, maximum, total = ctx.saved_tensors
        softmax = (_widened(logits) - maximum.unsqueeze(-1)).exp() / total.unsqueeze(-1)
        onehot = torch.zeros_like(softmax).scatter(-1, index.unsqueeze(-1), own.unsqueeze(-1).to(softmax.dtype))
        grad = (softmax - onehot) * (counted.to(softmax.dtype) * grads[0]).unsqueeze(-1)
        return grad.to(logits.dtype), None, None, None, None, None


def _zero_or_beyond(index: torch.Tensor, length: int) -> torch.Tensor:
    """Zero for an index of ``length`` places, and else a multiple of it, which no part of them has a place for."""
    return index - index.remainder(length)


def _start(coordinates: Sequence[torch.Tensor], axis_sizes: Sequence[int], length: int) -> torch.Tensor:
    """First index of this rank's range, a scalar tensor: the coordinates as digits, major first, times the length of a range."""
    index = coordinates[0]
    for coordinate, size in zip(coordinates[1:], axis_sizes[1:], strict=True):
        index = index * size + coordinate
    return index.squeeze(0) * length


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _all_reduce(x: torch.Tensor, operation: str, axes: Sequence[str]) -> torch.Tensor:
    for axis in axes:
        x = _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), operation, group_name(axis)))
    return x
