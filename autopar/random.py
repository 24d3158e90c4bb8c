"""Random masks that follow the layout: every element's number depends on the seed and its global position alone.

So a mask is the same whatever the plan, equal where the tensor is replicated, different where it is sharded, and the same again in a
recomputation. The generator is a 32-bit integer hash in counter mode (lowbias32, Ellis 2018: https://nullprogram.com/blog/2018/07/31/).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.layout import Layout

_MASK = 0xFFFFFFFF


Pieces = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim its pieces, major first, as (size, mesh axis), with axis -1 for what each rank keeps; graphs can print plain numbers."""


def layout_pieces(layout: Layout) -> Pieces:
    """The pieces of every dim, as `dropout` wants them."""
    return tuple(
        tuple((piece.size, -1 if piece.axis is None else piece.axis) for piece in layout.pieces(dim)) for dim in range(len(layout.atoms))
    )


def dropout(
    x: torch.Tensor,
    seed: torch.Tensor,
    coordinates: Sequence[torch.Tensor],
    *,
    probability: float,
    salt: int,
    pieces: Pieces,
) -> torch.Tensor:
    """Dropout on the local shard of a tensor.

    Args:
        x: local shard.
        seed: int64 [1], equal on all ranks, different at every step.
        coordinates: int64 [1] for every mesh axis.
        probability: of an element to become zero; the others are scaled by 1 / (1 - probability).
        salt: tells the dropouts of one graph apart.
        pieces: layout of ``x``.
    """
    shape = [math.prod(size for size, _ in dim) for dim in pieces]
    position: torch.Tensor = torch.zeros_like(seed)
    for dim, splits in enumerate(pieces):
        along = _positions(splits, coordinates, seed)
        stride = math.prod(shape[dim + 1 :])
        position = position + (along * stride).view(-1, *[1] * (len(pieces) - dim - 1))
    number = _hash((position & _MASK) ^ _hash((position >> 32) + seed * 0x9E3779B1 + salt))
    keep = number >= int(probability * 2**32)
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    return torch.where(keep, x * scale, 0.0)  # keeps a boolean mask for the backward


def _positions(splits: Sequence[tuple[int, int]], coordinates: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Global positions along one dim of what this rank holds."""
    position = torch.zeros_like(like)
    for size, axis in splits:
        inner = torch.arange(size, device=like.device) if axis < 0 else coordinates[axis]
        position = (position.unsqueeze(-1) * size + inner).flatten()
    return position


def _hash(x: torch.Tensor) -> torch.Tensor:
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
