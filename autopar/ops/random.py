"""Random numbers that follow the layout: every element's number depends on the seed and its global position alone.

So it is the same whatever the plan, equal where the tensor is replicated, independent where it is sharded, and the same again in a
recomputation. The generator is a 32-bit integer hash in counter mode (lowbias32, Ellis 2018: https://nullprogram.com/blog/2018/07/31/).

`torch.ops.autopar.keep` makes masks of dropout, `torch.ops.autopar.uniform` the numbers of which all others are made
(`passes.randomness`): on CUDA by a kernel of Triton (`random_kernel`), elsewhere by torch, block by block. Both want the global positions
of a shard as few digits of mixed radix (`Digits`), most often one for each dim that is sharded.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from autopar.layout import Layout

Pieces = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim its pieces, major first, as (size, mesh axis), with axis -1 for what each rank keeps; graphs can print plain numbers."""
SEED_FACTOR = 0x9E3779B1
HASH = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1))
"""Shifts and factors of lowbias32, in int32."""
BITS = {torch.float64: 32, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Of uniform numbers: so many that the centre of each of 2**bits parts of (0, 1) is a number of the dtype."""
BLOCK = 2**16
"""Elements whose numbers the torch path makes at a time; they stay in the cache of a core."""


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
    digits = Digits.of(pieces)
    keep = torch.ops.autopar.keep(
        seed, list(coordinates), salt, int(probability * 2**32), x.shape, digits.sizes, digits.weights, digits.axis_weights, digits.is_wide
    )
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    return torch.where(keep, x * scale, 0.0)  # keeps a boolean mask for the backward


def uniform(seed: torch.Tensor, coordinates: Sequence[torch.Tensor], *, salt: int, dtype: torch.dtype, pieces: Pieces) -> torch.Tensor:
    """The local shard of a tensor of independent numbers, uniform in (0, 1), neither end included; arguments are those of `dropout`.

    Args:
        dtype: one of `BITS`.
    """
    digits, shape = Digits.of(pieces), [math.prod(size for size, axis in dim if axis < 0) for dim in pieces]
    made: torch.Tensor = torch.ops.autopar.uniform(
        seed, list(coordinates), salt, dtype, shape, digits.sizes, digits.weights, digits.axis_weights, digits.is_wide
    )
    return made


class Digits(NamedTuple):
    """The global positions of a shard's elements, in its order: numbers of mixed radix, major digit first.

    Args:
        sizes: how many values each digit has.
        weights: what one more of it adds to the global position.
        axis_weights: (mesh axis, what one more of the rank's coordinate on it adds).
        is_wide: whether positions need more than 32 bits.
    """

    sizes: list[int]
    weights: list[int]
    axis_weights: list[int]
    is_wide: bool

    @staticmethod
    def of(pieces: Pieces) -> Digits:
        """Neighbouring digits become one where the positions go on from one to the other."""
        sizes, weights, axis_weights, weight = list[int](), list[int](), dict[int, int](), 1
        for size, axis in reversed([piece for dim in pieces for piece in dim]):
            if axis >= 0:
                axis_weights[axis] = weight
            elif sizes and weight == sizes[-1] * weights[-1]:
                sizes[-1] *= size
            else:
                sizes.append(size)
                weights.append(weight)
            weight *= size
        along = [axis_weights.get(axis, 0) for axis in range(max(axis_weights, default=-1) + 1)]
        return Digits(sizes[::-1], weights[::-1], along, weight > 2**32)


def _keep(
    seed: torch.Tensor,
    coordinates: Sequence[torch.Tensor],
    salt: int,
    threshold: int,
    shape: Sequence[int],
    sizes: Sequence[int],
    weights: Sequence[int],
    axis_weights: Sequence[int],
    is_wide: bool,
) -> torch.Tensor:
    """Where the number of an element is at least ``threshold`` of 2**32; the same on every device.

    Args:
        seed: int64 [1].
        coordinates: int64 [1] for every mesh axis.
        salt: tells the masks of one seed apart.
        threshold: 0 keeps all, 2**32 nothing.
        shape: of the shard.
        sizes, weights, axis_weights, is_wide: its `Digits`.
    """
    begin, key = _begin(seed, coordinates, axis_weights), _key(seed, salt)
    found = torch.empty(math.prod(shape), dtype=torch.bool, device=seed.device)
    if found.is_cuda:
        _fill(found, begin, key, sizes, weights, is_wide=is_wide, threshold=threshold)
    elif threshold >= 2**32:
        found.fill_(False)
    else:
        for block, number in _numbers(found, begin, key, sizes, weights, is_wide):
            number ^= -(2**31)  # in int32 the order of what it stands for
            torch.ge(number, threshold - 2**31, out=block)
    return found.view(tuple(shape))


def _uniform(
    seed: torch.Tensor,
    coordinates: Sequence[torch.Tensor],
    salt: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    sizes: Sequence[int],
    weights: Sequence[int],
    axis_weights: Sequence[int],
    is_wide: bool,
) -> torch.Tensor:
    """The upper bits (`BITS`) of an element's number, and a half, over 2**bits; the same on every device. For the rest see `_keep`."""
    begin, key, bits = _begin(seed, coordinates, axis_weights), _key(seed, salt), BITS[dtype]
    found = torch.empty(math.prod(shape), dtype=dtype, device=seed.device)
    if found.is_cuda:
        _fill(found, begin, key, sizes, weights, is_wide=is_wide, bits=bits)
    else:
        for block, number in _numbers(found, begin, key, sizes, weights, is_wide):
            upper = (number >> (32 - bits)).to(torch.int64).bitwise_and_(2**bits - 1)
            block.copy_(upper.to(torch.float64).add_(0.5).mul_(2.0**-bits))  # exact in every dtype
    return found.view(tuple(shape))


def _begin(seed: torch.Tensor, coordinates: Sequence[torch.Tensor], axis_weights: Sequence[int]) -> torch.Tensor:
    """The global position of a shard's first element, int64 [1]."""
    begin: torch.Tensor = torch.zeros_like(seed)
    for coordinate, weight in zip(coordinates, axis_weights, strict=False):
        begin = begin + coordinate * weight
    return begin


def _key(seed: torch.Tensor, salt: int) -> torch.Tensor:
    return seed * SEED_FACTOR + salt


def _fill(
    found: torch.Tensor,
    begin: torch.Tensor,
    key: torch.Tensor,
    sizes: Sequence[int],
    weights: Sequence[int],
    *,
    is_wide: bool,
    threshold: int = 0,
    bits: int = 0,
) -> None:
    if found.numel():
        kernel = importlib.import_module("autopar.ops.random_kernel")  # triton takes a while to import, and is not there everywhere
        digits = digits_on(found.device, tuple(sizes), tuple(weights))
        kernel.fill(found, begin, key, digits, is_wide=is_wide, threshold=threshold, bits=bits)


def _numbers(
    found: torch.Tensor, begin: torch.Tensor, key: torch.Tensor, sizes: Sequence[int], weights: Sequence[int], is_wide: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks of ``found``, each with the numbers of its elements, int32 that stand for 32 bits."""
    start = 0
    for positions in _blocks(begin, sizes, weights):
        above = positions >> 32 if is_wide else torch.zeros_like(key)
        yield (
            found[start : start + len(positions)],
            _hash_(positions.to(torch.int32).bitwise_xor_(_hash_((above + key).to(torch.int32)))),
        )
        start += len(positions)


def _blocks(begin: torch.Tensor, sizes: Sequence[int], weights: Sequence[int]) -> Iterator[torch.Tensor]:
    """Global positions, some at a time: the same table of the minor digits, moved by what the major ones add."""
    table, major = torch.zeros_like(begin), [*zip(sizes, weights, strict=True)]
    while major and len(table) * major[-1][0] <= BLOCK:
        table = _joined(*major.pop(), table)
    if not major:
        yield begin + table
        return
    size, weight = major.pop()
    inner, rows = len(table), max(1, BLOCK // len(table))
    table = _joined(rows, weight, table)
    for outer in product(*(range(0, n * step, step) for n, step in major)):
        for row in range(0, size, rows):
            yield table[: min(rows, size - row) * inner] + (begin + (sum(outer) + row * weight))


def _joined(size: int, weight: int, table: torch.Tensor) -> torch.Tensor:
    return (torch.arange(0, size * weight, weight, device=table.device).unsqueeze(-1) + table).flatten()


def _hash_(x: torch.Tensor) -> torch.Tensor:
    """Of int32 that stand for 32 bits without a sign, in place; products wrap, and shifts must not bring the sign along."""
    shifted = torch.empty_like(x)
    for shift, factor in HASH:
        torch.bitwise_right_shift(x, shift, out=shifted)
        shifted &= 2 ** (32 - shift) - 1
        x ^= shifted
        x *= factor
    return x


@lru_cache(maxsize=1024)
def digits_on(device: torch.device, sizes: tuple[int, ...], weights: tuple[int, ...]) -> torch.Tensor:
    """Digits where the kernel reads them, int64 [digits, 2], minor digit first; copied once for each layout."""
    return torch.tensor([*zip(sizes, weights, strict=True)][::-1] or [(1, 0)], dtype=torch.int64, device=device)


def _fake_mask(seed: torch.Tensor, coordinates: object, salt: int, threshold: int, shape: Sequence[int], *digits: object) -> torch.Tensor:
    return seed.new_empty(shape, dtype=torch.bool)


def _fake_numbers(
    seed: torch.Tensor, coordinates: object, salt: int, dtype: torch.dtype, shape: Sequence[int], *digits: object
) -> torch.Tensor:
    return seed.new_empty(shape, dtype=dtype)


_SHARD = "SymInt[] shape, SymInt[] sizes, SymInt[] weights, SymInt[] axis_weights, bool is_wide"
_library = torch.library.Library("autopar", "FRAGMENT")
for _name, _given, _make, _fake in (
    ("keep", "int threshold", _keep, _fake_mask),
    ("uniform", "ScalarType dtype", _uniform, _fake_numbers),
):
    _library.define(f"{_name}(Tensor seed, Tensor[] coordinates, int salt, {_given}, {_SHARD}) -> Tensor")
    _library.impl(_name, _make, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{_name}", _fake, lib=_library)
