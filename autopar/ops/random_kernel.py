"""The kernel of Triton behind `random`: a mask or a number by element, from its global position alone, with nothing in memory beside it."""

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
def _fill(out, begin, key, digits, threshold, numel, BITS: tl.constexpr, NUM_DIGITS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < numel
    if WIDE:
        position, rest = tl.load(begin), index
    else:  # 32 bits hold all positions; their divisions are several times as fast
        position, rest = tl.load(begin).to(tl.uint32), index.to(tl.uint32)
    for i in tl.static_range(NUM_DIGITS):
        size, weight = tl.load(digits + 2 * i).to(rest.dtype), tl.load(digits + 2 * i + 1).to(rest.dtype)
        if i < NUM_DIGITS - 1:
            position = position + rest % size * weight
            rest = rest // size
        else:  # what is left is the last digit
            position = position + rest * weight
    if WIDE:
        inner = _hash(((position >> 32) + tl.load(key)).to(tl.uint32))
    else:
        inner = _hash(tl.load(key).to(tl.uint32))
    number = _hash(position.to(tl.uint32) ^ inner)
    if BITS == 0:
        tl.store(out + index, number.to(tl.int64) >= threshold, mask=is_there)
    elif BITS == 32:
        tl.store(out + index, (number.to(tl.float64) + 0.5) * 2.0**-32, mask=is_there)
    else:
        upper = (number >> (32 - BITS)).to(tl.float32)
        tl.store(out + index, ((upper + 0.5) * 2.0**-BITS).to(out.dtype.element_ty), mask=is_there)


def fill(
    found: torch.Tensor,
    begin: torch.Tensor,
    key: torch.Tensor,
    digits: torch.Tensor,
    *,
    is_wide: bool,
    threshold: int = 0,
    bits: int = 0,
) -> None:
    """Fill a mask, or with ``bits`` a tensor of numbers in (0, 1).

    Args:
        found: [elements], contiguous; bool, or of the dtype whose `random.BITS` are ``bits``.
        begin: int64 [1], the global position of the shard's first element.
        key: int64 [1], of seed and salt.
        digits: int64 [digits, 2], of positions beyond ``begin``: size and weight, minor digit first.
        is_wide: whether there are positions beyond 32 bits.
        threshold: of 2**32, from which on numbers are kept by the mask.
    """
    grid = (triton.cdiv(found.numel(), BLOCK),)
    _fill[grid](found, begin, key, digits, threshold, found.numel(), BITS=bits, NUM_DIGITS=len(digits), WIDE=is_wide, BLOCK=BLOCK)
