"""Random masks that follow the layout: every element's number depends on the seed and its global position alone.

So a mask is the same whatever the plan, equal where the tensor is replicated, different where it is sharded, and the same again in a
recomputation. The generator is a 32-bit integer hash in counter mode (lowbias32, Ellis 2018: https://nullprogram.com/blog/2018/07/31/).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.layout import Layout, Piece

_MASK = 0xFFFFFFFF


def layout_pieces(layout: Layout) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of every dim, as `dropout` wants them."""
    return tuple(tuple(layout.pieces(dim)) for dim in range(len(layout.atoms)))


def dropout(
    x: torch.Tensor,
    seed: torch.Tensor,
    coordinates: Sequence[torch.Tensor],
    *,
    probability: float,
    salt: int,
    pieces: tuple[tuple[Piece, ...], ...],
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
    shape = [math.prod(piece.size for piece in dim) for dim in pieces]
    position: torch.Tensor = torch.zeros_like(seed)
    for dim, splits in enumerate(pieces):
        along = _positions(splits, coordinates, seed)
        stride = math.prod(shape[dim + 1 :])
        position = position + (along * stride).view(-1, *[1] * (len(pieces) - dim - 1))
    number = _hash((position & _MASK) ^ _hash((position >> 32) + seed * 0x9E3779B1 + salt))
    keep = number >= int(probability * 2**32)
    return x * keep.to(x.dtype) * (1.0 / (1.0 - probability) if probability < 1.0 else 0.0)


def _positions(splits: Sequence[Piece], coordinates: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Global positions along one dim of what this rank holds."""
    position = torch.zeros_like(like)
    for piece in splits:
        inner = coordinates[piece.axis] if piece.axis is not None else torch.arange(piece.size, device=like.device)
        position = (position.unsqueeze(-1) * piece.size + inner).flatten()
    return position


def _hash(x: torch.Tensor) -> torch.Tensor:
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
