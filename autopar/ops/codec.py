"""The ops that code and decode compressed gradients, as ``torch.ops.autopar.*``, and what they keep from step to step.

Graphs are traced through them as they stand: each is one node between collectives, with a fake form that gives shapes. Some keep a state
under a name, as graphs find process groups by name: the text of a graph is the same on all ranks, and `use_states` says whose states are
meant. Nothing here communicates.

A gradient that is infinite or NaN stays so, in some element, on all ranks, and leaves every state as it was.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.compression import BLOCK, SCALE_NUM_BYTES, packed_bytes

LARGEST_INT8 = 127
DEPENDENT = 1e-5
"""A column that has no more left than this part of its length after those before it are taken out depends on them."""


@dataclass(slots=True)
class States:
    """What this rank has not sent of its gradients, and bases of PowerSGD, by name.

    Args:
        scale: of the losses of this step; what is kept is without it, since it changes from step to step.
    """

    scale: float = 1.0
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def error(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """What was not sent of a gradient, in float32 and its shape; zeros at first."""
        return self._get(f"{name}{list(like.shape)}.error", lambda: torch.zeros(like.shape, dtype=torch.float32, device=like.device))

    def basis(self, name: str, rows: int, rank: int, device: torch.device) -> torch.Tensor:
        """Columns of length 1, float32 [rows, rank]; at first random, the same on all ranks."""

        def draw() -> torch.Tensor:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(rows, rank, generator=generator, dtype=torch.float32, device="cpu")
            columns: torch.Tensor = drawn / drawn.norm(dim=0)
            return columns.to(device)

        return self._get(f"{name}[{rows}, {rank}].basis", draw)

    def _get(self, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self.held:
            self.held[key] = make()
        return self.held[key]


_used: list[States] = [States()]
_library = torch.library.Library("autopar", "DEF")


def use_states(states: States, scale: float) -> None:
    """Let the names in graphs mean these states, in a step whose losses are scaled."""
    states.scale = scale
    _used[:] = [states]


def _op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an op by its schema, its fake form and what it does."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        name = _library.define(schema)
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopar::{name}", fake, lib=_library)
        return run

    return register


def _cast_fake(x: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@_op("narrow(Tensor x, ScalarType dtype, float factor) -> Tensor", _cast_fake)
def _narrow(x: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """The gradient times a factor, in a narrower dtype."""
    return (x if factor == 1.0 else x * factor).to(dtype, memory_format=torch.contiguous_format)


@_op("widen(Tensor x, ScalarType dtype, float factor) -> Tensor", _cast_fake)
def _widen(x: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """The reduced gradient in its own dtype, times a factor."""
    wide = x.to(dtype)
    return wide if factor == 1.0 else wide.mul_(factor)


def _quantize_fake(x: torch.Tensor, parts: int) -> torch.Tensor:
    return x.new_empty((parts * packed_bytes(-(-x.numel() // parts)),), dtype=torch.int8)


@_op("quantize(Tensor x, int parts) -> Tensor", _quantize_fake)
def _quantize(x: torch.Tensor, parts: int) -> torch.Tensor:
    """A tensor in so many equal parts, one after the other: of each the blocks of int8, then their float32 scales. Zeros fill it up."""
    flat, count = x.float().reshape(-1), -(-x.numel() // parts)
    if count % BLOCK or flat.numel() < parts * count:
        flat = torch.nn.functional.pad(flat, (0, parts * count - flat.numel())).view(parts, count)
        flat = torch.nn.functional.pad(flat, (0, -count % BLOCK))
    blocks = flat.view(parts, -1, BLOCK)
    scale = blocks.abs().amax(2, keepdim=True) / LARGEST_INT8
    coded = (blocks / torch.where(scale == 0.0, 1.0, scale)).round_().clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)
    return torch.cat((coded.view(parts, -1), scale.view(parts, -1).view(torch.int8)), 1).view(-1)


def _dequantize_fake(packed: torch.Tensor, parts: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(tuple(shape), dtype=dtype)


@_op("dequantize(Tensor packed, int parts, SymInt[] shape, ScalarType dtype) -> Tensor", _dequantize_fake)
def _dequantize(packed: torch.Tensor, parts: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Parts of a tensor that were quantized one by one, put together."""
    numel = math.prod(shape)
    whole = _blocks(packed, parts).view(parts, -1)[:, : -(-numel // parts)]
    return whole.reshape(-1)[:numel].to(dtype, copy=True).view(tuple(shape))


def _sum_quantized_fake(packed: torch.Tensor, parts: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty((count,), dtype=dtype)


@_op("sum_quantized(Tensor packed, int parts, int count, ScalarType dtype) -> Tensor", _sum_quantized_fake)
def _sum_quantized(packed: torch.Tensor, parts: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of parts of so many elements that were quantized one by one."""
    return _blocks(packed, parts).sum(0).view(-1)[:count].to(dtype, copy=True)


def _blocks(packed: torch.Tensor, parts: int) -> torch.Tensor:
    """What was quantized, float32 [parts, blocks, BLOCK]."""
    rows = packed.view(parts, -1)
    end = rows.shape[1] // (BLOCK + SCALE_NUM_BYTES) * BLOCK
    scale = rows[:, end:].contiguous().view(torch.float32)
    return rows[:, :end].reshape(parts, -1, BLOCK) * scale.unsqueeze(2)


def _take_largest_fake(x: torch.Tensor, count: int, state: str) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((2 * count,), dtype=torch.int32), x.new_empty((x.numel(),), dtype=torch.float32)


@_op("take_largest(Tensor x, int count, str state) -> (Tensor, Tensor)", _take_largest_fake)
def _take_largest(x: torch.Tensor, count: int, state: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What to send of a gradient, int32 [2 * count]: places of the largest elements, then the bits of their values in float32. And the
    gradient with what was not sent before, float32, flat."""
    whole = _compensated(x, state).view(-1)
    places = whole.abs().topk(count, sorted=False).indices
    return torch.cat((places.int(), whole[places].view(torch.int32))), whole


def _put_largest_fake(
    gathered: torch.Tensor, sent: torch.Tensor, whole: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, state: str
) -> torch.Tensor:
    return whole.new_empty(tuple(shape), dtype=dtype)


@_op("put_largest(Tensor gathered, Tensor sent, Tensor whole, SymInt[] shape, ScalarType dtype, str state) -> Tensor", _put_largest_fake)
def _put_largest(
    gathered: torch.Tensor, sent: torch.Tensor, whole: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, state: str
) -> torch.Tensor:
    """The sum of what all ranks sent; the rest of ``whole`` is kept. One rank after the other: all ranks add in the same order."""
    count = sent.numel() // 2
    places, bits = gathered.view(-1, 2, count).unbind(1)
    values = bits.contiguous().view(torch.float32)
    total = torch.zeros_like(whole)
    for own, value in zip(places, values, strict=True):
        total.index_add_(0, own, value)
    left = whole.index_fill(0, sent[:count].long(), 0.0).view(tuple(shape))
    _keep(state, left, torch.isfinite(values).all())
    return total.view(tuple(shape)).to(dtype)


def _project_fake(x: torch.Tensor, rank: int, state: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    return x.new_empty((rows, x.numel() // rows), dtype=torch.float32), x.new_empty((rows, rank), dtype=torch.float32)


@_op("project(Tensor x, int rank, str state) -> (Tensor, Tensor)", _project_fake)
def _project(x: torch.Tensor, rank: int, state: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient with what was not sent before, as a float32 matrix M, and M Q [rows, rank]."""
    matrix = _compensated(x, state).view(x.shape[0], -1)
    return matrix, matrix @ _used[0].basis(state, matrix.shape[1], rank, x.device)


def _project_back_fake(
    matrix: torch.Tensor, projected: torch.Tensor, shape: Sequence[int], state: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return projected.new_empty(projected.shape), projected.new_empty((matrix.shape[1], projected.shape[1]))


@_op("project_back(Tensor matrix, Tensor projected, SymInt[] shape, str state) -> (Tensor, Tensor)", _project_back_fake)
def _project_back(
    matrix: torch.Tensor, projected: torch.Tensor, shape: Sequence[int], state: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """P, the reduced M Q made orthonormal, and M^T P [columns, rank]; M - P P^T M is kept."""
    basis = orthonormal(projected)
    back = matrix.t() @ basis
    _keep(state, torch.addmm(matrix, basis, back.t(), alpha=-1.0).view(tuple(shape)), torch.isfinite(projected).all())
    return basis, back


def _expand_fake(basis: torch.Tensor, back: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, state: str) -> torch.Tensor:
    return basis.new_empty(tuple(shape), dtype=dtype)


@_op("expand(Tensor basis, Tensor back, SymInt[] shape, ScalarType dtype, str state) -> Tensor", _expand_fake)
def _expand(basis: torch.Tensor, back: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, state: str) -> torch.Tensor:
    """P (sum of M^T P)^T; the columns of that sum are the next Q. A column that has vanished would stay so: the one before it is kept."""
    held, length = _used[0].basis(state, back.shape[0], back.shape[1], back.device), back.norm(dim=0)
    held.copy_(torch.where((length > 0.0) & torch.isfinite(length), back / length, held))
    return (basis @ back.t()).view(tuple(shape)).to(dtype)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns of length 1 that span those of a matrix, by Gram and Schmidt; zeros for one that depends on those before it."""
    columns: list[torch.Tensor] = []
    for column in matrix.unbind(1):
        length = column.norm()
        for other in columns:
            column = column - torch.dot(other, column) * other
        left = column.norm()
        columns.append(torch.where(left <= DEPENDENT * length, 0.0, column / left))
    return torch.stack(columns, 1)


def _compensated(x: torch.Tensor, state: str) -> torch.Tensor:
    """The gradient with what was not sent before, float32, row by row."""
    states = _used[0]
    return torch.add(x.float(), states.error(state, x), alpha=states.scale).contiguous()


def _keep(state: str, left: torch.Tensor, is_finite: torch.Tensor) -> None:
    """Keep what was not sent, unless what all ranks sent is infinite or NaN, on whichever: then no rank takes the step."""
    states = _used[0]
    held = states.error(state, left)
    torch.where(is_finite, left if states.scale == 1.0 else left / states.scale, held, out=held)


_ops = torch.ops.autopar
OPS = frozenset(
    {
        _ops.narrow.default,
        _ops.widen.default,
        _ops.quantize.default,
        _ops.sum_quantized.default,
        _ops.dequantize.default,
        _ops.take_largest.default,
        _ops.put_largest.default,
        _ops.project.default,
        _ops.project_back.default,
        _ops.expand.default,
    }
)
"""All of them."""
