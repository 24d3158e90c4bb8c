"""Reductions of gradients in compressed form: those of `autopar.ops.codec` with ``torch.ops._c10d_functional`` collectives between them."""

from __future__ import annotations

import torch

from autopar.compression import Compression, packed_bytes
from autopar.ops import codec  # noqa: F401  registers the ops

_c10d = torch.ops._c10d_functional
_ops = torch.ops.autopar


def all_reduce(x: torch.Tensor, size: int, group: str, how: Compression, state: str) -> torch.Tensor:
    """The sum over a group, as nearly as ``how`` gives it; bit for bit the same on all its ranks.

    Args:
        x: gradient of this rank.
        size: ranks of the group.
        group: its name.
        how: form in which it travels.
        state: name of what is kept of it.
    """
    if how.cast is not None:
        reduced = _all_reduce(_ops.narrow(x, how.cast, _part(how, size)), group)
        return _ops.widen(reduced, x.dtype, 1 / _part(how, size))  # type: ignore[no-any-return]
    if how.kind == "int8":
        own = _sum_own(x, size, group, torch.float32)
        gathered = _all_gather(_ops.quantize(own, 1), size, group)
        return _ops.dequantize(gathered, size, x.shape, x.dtype)  # type: ignore[no-any-return]
    if how.kind == "topk":
        sent, whole = _ops.take_largest(x, how.count(x.numel()), state)
        return _ops.put_largest(_all_gather(sent, size, group), sent, whole, x.shape, x.dtype, state)  # type: ignore[no-any-return]
    assert how.kind == "powersgd"
    matrix, projected = _ops.project(x, how.rank, state)
    basis, back = _ops.project_back(matrix, _all_reduce(projected, group), x.shape, state)
    return _ops.expand(basis, _all_reduce(back, group), x.shape, x.dtype, state)  # type: ignore[no-any-return]


def reduce_scatter(parts: torch.Tensor, group: str, how: Compression) -> torch.Tensor:
    """This rank's row of the sum over a group, as nearly as a cast or int8 give it.

    Args:
        parts: [ranks, elements]; row i is for rank i.
        group: name of the group.
        how: form in which they travel.
    """
    size = parts.shape[0]
    if how.cast is not None:
        narrow = _ops.narrow(parts, how.cast, _part(how, size)).view(-1)
        reduced = _wait(_c10d.reduce_scatter_tensor(narrow, "sum", size, group))
        return _ops.widen(reduced, parts.dtype, 1 / _part(how, size))  # type: ignore[no-any-return]
    assert how.kind == "int8"
    return _sum_own(parts, size, group, parts.dtype)


def scatters(how: Compression) -> bool:
    """Whether there is a reduce-scatter that travels in less than an all-reduce."""
    return not how.remembers


def _part(how: Compression, size: int) -> float:
    """What gradients are multiplied by on their way: float16 sums would overflow where their mean does not."""
    return 1 / size if how.kind == "fp16" else 1.0


def _sum_own(x: torch.Tensor, size: int, group: str, dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of a tensor in so many, flat, summed in float32 over what comes in int8."""
    count = -(-x.numel() // size)
    splits = [packed_bytes(count)] * size
    came = _wait(_c10d.all_to_all_single(_ops.quantize(x, size), splits, splits, group))
    summed: torch.Tensor = _ops.sum_quantized(came, size, count, dtype)
    return summed


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return _wait(_c10d.all_reduce(x, "sum", group))


def _all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return _wait(_c10d.all_gather_into_tensor(x, size, group))


def _wait(x: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = _c10d.wait_tensor(x)
    return waited
