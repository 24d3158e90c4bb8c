"""The local operations that change how a tensor lies on one mesh axis, each with its own backward.

A rewritten graph reshards with these and nothing else; they are named as in the field. Inside they emit
``torch.ops._c10d_functional`` ops, which are traced with their backwards and run on any backend. Every mesh axis has one process group per
rank, registered under `group_name`, so that the graph text is the same on all ranks.

A *spot* says where an axis splits a tensor: dim ``dim`` of the whole side is ``(before)(size)(rest)`` and each rank keeps one of ``size``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autopar.compression import Compression
from autopar.ops import compressed

_c10d = torch.ops._c10d_functional


def group_name(axis: str) -> str:
    """Name under which this rank's process group of a mesh axis is registered."""
    return f"autopar.{axis}"


class Spot(NamedTuple):
    """Where an axis splits a tensor: ``dim``, and the size of what lies before the split inside that dim."""

    dim: int
    before: int


Local = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Forward or backward half of an operation: (local tensor, this rank's coordinate) -> local tensor."""


class _Differentiable(torch.autograd.Function):
    """Ties the forward half of an operation to its backward half."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, coordinate: torch.Tensor, forward: Local, backward: Local) -> torch.Tensor:
        ctx.save_for_backward(coordinate)
        ctx.half = backward
        return forward(x, coordinate)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (coordinate,) = ctx.saved_tensors
        return ctx.half(grads[0], coordinate), None, None, None


def replicate(
    x: torch.Tensor, coordinate: torch.Tensor, *, axis: str, size: int = 1, compress: str = "", state: str = ""
) -> torch.Tensor:
    """R -> R*: nothing forward, all-reduce of the gradient (Megatron's f; data parallelism for a parameter).

    ``compress`` is how the gradient travels over the ``size`` ranks of the axis (`Compression` as text; empty: as it is), ``state`` the
    name of what is kept of it (`passes.compress`).
    """
    how = Compression.of(compress)
    backward: Local = lambda g, _: _all_reduce(g, axis) if how is None else compressed.all_reduce(g, size, group_name(axis), how, state)  # noqa: E731
    return _apply(x, coordinate, lambda t, _: t.view_as(t), backward)


def all_reduce(x: torch.Tensor, coordinate: torch.Tensor, *, axis: str, partial_grad: bool) -> torch.Tensor:
    """P -> R (Megatron's g), or P -> R* if ``partial_grad``, which all-reduces the gradient too."""
    backward: Local = (lambda g, _: _all_reduce(g, axis)) if partial_grad else (lambda g, _: g.view_as(g))
    return _apply(x, coordinate, lambda t, _: _all_reduce(t, axis), backward)


def all_gather(
    x: torch.Tensor,
    coordinate: torch.Tensor,
    *,
    axis: str,
    size: int,
    spot: Spot,
    partial_grad: bool,
    compress: str = "",
    state: str = "",
) -> torch.Tensor:
    """S -> R* with reduce-scatter of the gradient if ``partial_grad``, else S -> R with a slice of it.

    ``compress`` and ``state`` are those of `replicate`.
    """
    how = Compression.of(compress)

    def backward(g: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        if not partial_grad:
            return _slice(g, c, size, spot)
        return _reduce_scatter(g, axis, size, spot) if how is None else _compressed_scatter(g, c, axis, size, spot, how, state)

    return _apply(x, coordinate, lambda t, _: _all_gather(t, axis, size, spot), backward)


def reduce_scatter(x: torch.Tensor, coordinate: torch.Tensor, *, axis: str, size: int, spot: Spot) -> torch.Tensor:
    """P -> S, with all-gather of the gradient."""
    return _apply(
        x, coordinate, lambda t, _: _reduce_scatter(t, axis, size, spot), lambda g, _: _all_gather(g, axis, size, spot)
    )


def shard_slice(
    x: torch.Tensor, coordinate: torch.Tensor, *, axis: str, size: int, spot: Spot, partial_grad: bool
) -> torch.Tensor:
    """R -> S with all-gather of the gradient; R* -> S, whose gradient is this rank's part among zeros, if ``partial_grad``."""
    backward: Local = lambda g, c: _pad(g, c, size, spot) if partial_grad else _all_gather(g, axis, size, spot)  # noqa: E731
    return _apply(x, coordinate, lambda t, c: _slice(t, c, size, spot), backward)


def share(x: torch.Tensor, coordinate: torch.Tensor, *, axis: str, size: int, partial_grad: bool) -> torch.Tensor:
    """R -> P, an equal part of it on each of ``axis``; R* -> P, whose gradient is an equal part too, if ``partial_grad``."""
    return _apply(x, coordinate, lambda t, _: t / size, lambda g, _: g / size if partial_grad else g.view_as(g))


def all_to_all(
    x: torch.Tensor, coordinate: torch.Tensor, *, axis: str, size: int, gather: Spot, scatter: Spot
) -> torch.Tensor:
    """S -> S': gives up the split at ``gather`` and takes the one at ``scatter``.

    ``scatter`` is read on ``x``; ``gather`` on the result.
    """
    return _apply(
        x,
        coordinate,
        lambda t, _: _all_to_all(t, axis, size, gather, scatter),
        lambda g, _: _all_to_all(g, axis, size, scatter, gather),
    )


RESHARDS = (replicate, all_reduce, all_gather, reduce_scatter, shard_slice, share, all_to_all)
"""Every operation that a rewritten graph may reshard with."""


def _apply(x: torch.Tensor, coordinate: torch.Tensor, forward: Local, backward: Local) -> torch.Tensor:
    out: torch.Tensor = _Differentiable.apply(as_real(x), coordinate, forward, backward)
    return torch.view_as_complex(out) if x.is_complex() else out


def as_real(x: torch.Tensor) -> torch.Tensor:
    """Complex numbers as a last dim of two, since NCCL sends none, and gloo not in every collective; other numbers as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _wait(x: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = _c10d.wait_tensor(x)
    return waited


def _all_reduce(x: torch.Tensor, axis: str) -> torch.Tensor:
    return _wait(_c10d.all_reduce(x.contiguous(), "sum", group_name(axis)))


def _open(x: torch.Tensor, size: int, spot: Spot) -> torch.Tensor:
    """View ``x`` with the split as a dim of its own, at ``spot.dim + 1``."""
    shape = x.shape
    rest = shape[spot.dim] // (spot.before * size)
    return x.reshape(*shape[: spot.dim], spot.before, size, rest, *shape[spot.dim + 1 :])


def _close(x: torch.Tensor, spot: Spot) -> torch.Tensor:
    """Inverse of `_open` on what is left of its three dims."""
    return x.flatten(spot.dim, spot.dim + 2)


def _all_gather(x: torch.Tensor, axis: str, size: int, spot: Spot) -> torch.Tensor:
    gathered = _wait(_c10d.all_gather_into_tensor(x.reshape(-1).contiguous(), size, group_name(axis)))
    parts = gathered.view(size, *_open(x, 1, spot).shape)
    return _close(parts.movedim(0, spot.dim + 1).squeeze(spot.dim + 2), spot)


def _reduce_scatter(x: torch.Tensor, axis: str, size: int, spot: Spot) -> torch.Tensor:
    parts = _open(x, size, spot).movedim(spot.dim + 1, 0)
    reduced = _wait(_c10d.reduce_scatter_tensor(parts.reshape(-1).contiguous(), "sum", size, group_name(axis)))
    return reduced.view(_local_shape(x, size, spot))


def _compressed_scatter(
    x: torch.Tensor, coordinate: torch.Tensor, axis: str, size: int, spot: Spot, how: Compression, state: str
) -> torch.Tensor:
    if not compressed.scatters(how):
        return _slice(compressed.all_reduce(x, size, group_name(axis), how, state), coordinate, size, spot)
    parts = _open(x, size, spot).movedim(spot.dim + 1, 0).reshape(size, -1)
    return compressed.reduce_scatter(parts, group_name(axis), how).view(_local_shape(x, size, spot))


def _slice(x: torch.Tensor, coordinate: torch.Tensor, size: int, spot: Spot) -> torch.Tensor:
    return _close(_open(x, size, spot).index_select(spot.dim + 1, coordinate), spot)


def _pad(x: torch.Tensor, coordinate: torch.Tensor, size: int, spot: Spot) -> torch.Tensor:
    part = _open(x, 1, spot)
    shape = list(part.shape)
    shape[spot.dim + 1] = size
    return _close(part.new_zeros(shape).index_copy(spot.dim + 1, coordinate, part), spot)


def _all_to_all(x: torch.Tensor, axis: str, size: int, gather: Spot, scatter: Spot) -> torch.Tensor:
    parts = _open(x, size, scatter).movedim(scatter.dim + 1, 0)
    splits = [parts.numel() // size] * size
    exchanged = _wait(_c10d.all_to_all_single(parts.reshape(-1).contiguous(), splits, splits, group_name(axis)))
    local = exchanged.view(size, *_local_shape(x, size, scatter))
    opened = [_open(part, 1, gather) for part in local.unbind(0)]
    return _close(torch.cat(opened, gather.dim + 1), gather)


def _local_shape(x: torch.Tensor, size: int, spot: Spot) -> tuple[int, ...]:
    return (*x.shape[: spot.dim], x.shape[spot.dim] // size, *x.shape[spot.dim + 1 :])
