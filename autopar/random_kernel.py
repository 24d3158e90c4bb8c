"""The kernel of Triton behind `random.dropout`: a mask by element, from its global position alone, without anything in memory beside it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    """lowbias32 of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _fill(out, begin, key, digits, threshold, numel, NUM_DIGITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < numel
    position, rest = tl.load(begin), index
    for i in tl.static_range(NUM_DIGITS):
        size, weight = tl.load(digits + 2 * i), tl.load(digits + 2 * i + 1)
        position = position + rest % size * weight
        rest = rest // size
    inner = _hash(((position >> 32) + tl.load(key)).to(tl.uint32))
    number = _hash(position.to(tl.uint32) ^ inner)
    tl.store(out + index, number.to(tl.int64) >= threshold, mask=is_there)


def fill(found: torch.Tensor, begin: torch.Tensor, key: torch.Tensor, threshold: int, digits: torch.Tensor) -> None:
    """Fill a mask.

    Args:
        found: bool [elements], contiguous.
        begin: int64 [1], the global position of the shard's first element.
        key: int64 [1], of seed and salt.
        threshold: of 2**32, from which on numbers are kept.
        digits: int64 [digits, 2], of positions beyond ``begin``: size and weight, minor digit first.
    """
    grid = (triton.cdiv(found.numel(), BLOCK),)
    _fill[grid](found, begin, key, digits, threshold, found.numel(), NUM_DIGITS=len(digits), BLOCK=BLOCK)
