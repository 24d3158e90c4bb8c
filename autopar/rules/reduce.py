"""Ops over whole dims: sums leave partial sums, all other reductions and scans want their dims whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.rules.lines import dim_of, dims_of, full, integer, letters, line, linear_unless_cut, stretched, whole
from autopar.rules.registry import Call, register

aten = torch.ops.aten


def _reduced(call: Call, dims: list[int], mark: str, linear: str) -> str:
    """Every result lacks ``dims``, or has them with size 1."""
    shape = call.operands[0].shape
    operand = ["1" if size == 1 else f"a{i}{mark if i in dims else ''}" for i, size in enumerate(shape)]
    kept = len(call.results[0].shape) == len(shape)
    result = ["1" if i in dims else name for i, name in enumerate(operand) if kept or i not in dims]
    return line([operand], [result] * len(call.results), linear)


def _sum(call: Call) -> str:
    """Sharding a summed dim leaves a partial sum. A sum of bools counts, but bools are never partial themselves."""
    dims = dims_of(call.argument(1, "dim"), len(call.operands[0].shape))
    return _reduced(call, dims, "", linear_unless_cut(call, 0, "0"))


def over_dims(linear: str = "", position: int = 1, default: int | None = None) -> Callable[[Call], str]:
    """Reduces the dims named by the argument at ``position``, by default all, which are whole."""

    def rule(call: Call) -> str:
        given, shape = call.argument(position, "dim", default), call.operands[0].shape
        if isinstance(given, Sequence) and not given and shape and call.results[0].shape == shape:
            return whole(call)  # of ``any`` and ``all``, whose empty lists reduce nothing
        return _reduced(call, dims_of(given, len(shape)), "!", linear)

    return rule


def _everything(linear: str = "") -> Callable[[Call], str]:
    """Reduces all dims."""
    return lambda call: _reduced(call, dims_of(None, len(call.operands[0].shape)), "!", linear)


def along_dim(linear: str = "", position: int = 1, default: int = -1) -> Callable[[Call], str]:
    """Works along one dim, which is whole; the others are free. Its length may change (``topk``)."""

    def rule(call: Call) -> str:
        shape = call.operands[0].shape
        if not shape:
            return line([[]], [[]] * len(call.results), linear)
        dim = dim_of(call, position, default)
        same = all(result.shape == shape for result in call.results)
        operand = full(shape)
        operand[dim] = "n!"
        result = [*operand[:dim], "n!" if same else "p!", *operand[dim + 1 :]]
        return line([operand], [result] * len(call.results), linear)

    return rule


def along_dims(linear: str = "", position: int = 1) -> Callable[[Call], str]:
    """Works along several dims, which are whole."""

    def rule(call: Call) -> str:
        shape = call.operands[0].shape
        dims = dims_of(call.argument(position, "dims"), len(shape))
        operand = [f"n{i}!" if i in dims else name for i, name in enumerate(full(shape))]
        return line([operand], [operand], linear)

    return rule


def _along(dims: list[int]) -> Callable[[Call], str]:
    """Works along dims, which are whole."""

    def rule(call: Call) -> str:
        operand = [f"n{i}!" if i in dims else name for i, name in enumerate(full(call.operands[0].shape))]
        return line([operand], [operand], "0")

    return rule


def _turned(call: Call) -> str:
    """Turns two dims by right angles: one is the other in reverse, or both are themselves in reverse; what is reversed is whole."""
    shape, (i, j) = full(call.operands[0].shape), dims_of(call.argument(2, "dims", [0, 1]), len(call.operands[0].shape))
    turns = integer(call.argument(1, "k", 1)) % 4
    for dim in ((), (j,), (i, j), (i,))[turns]:
        shape[dim] = f"n{dim}!"
    result = list(shape)
    if turns % 2:
        result[i], result[j] = result[j], result[i]
    return line([shape], [result], "0")


def _transform(default: object) -> Callable[[Call], str]:
    """A Fourier transform along dims, by default those that are given, which may get another length."""

    def rule(call: Call) -> str:
        shape = call.operands[0].shape
        dims = dims_of(call.argument(2, "dim", default), len(shape))
        terms = [[f"{name}{i}!" if i in dims else free for i, free in enumerate(full(shape))] for name in ("n", "p")]
        return line(terms[:1], terms[1:], "0")

    return rule


def _of_pairs(call: Call) -> str:
    """A number for each pair of vectors, which lie along a dim of what the two stretch to."""
    shape = torch.broadcast_shapes(*(spec.shape for spec in call.operands))
    is_similarity = call.target is aten.cosine_similarity.default
    dim = integer(call.argument(2, "dim", 1)) % len(shape) if is_similarity else len(shape) - 1
    operands = [stretched(spec.shape, shape) for spec in call.operands]
    for operand in operands:
        place = dim - len(shape) + len(operand)
        if place >= 0 and operand[place] != "1":
            operand[place] += "!"
    result = full(shape)
    kept = ["1"] if len(call.results[0].shape) == len(shape) else []
    return line(operands, [[*result[:dim], *kept, *result[dim + 1 :]]])


def _distances(call: Call) -> str:
    """Of every row of the one to every row of the other, in each of a batch."""
    left, right = (spec.shape for spec in call.operands)
    batch = torch.broadcast_shapes(left[:-2], right[:-2])
    return line(
        [[*stretched(left[:-2], batch), "p", "m!"], [*stretched(right[:-2], batch), "q", "m!"]], [[*full(batch), "p", "q"]]
    )


def _cross(call: Call) -> str:
    """Products of vectors of three along a dim."""
    shape = call.results[0].shape
    dim = integer(call.argument(2, "dim", -1)) % len(shape)
    operands = [stretched(spec.shape, shape) for spec in call.operands]
    result = full(shape)
    for term in (*operands, result):
        term[dim - len(shape) + len(term)] = "n!"
    return line(operands, [result], "0 | 1")


def _triangle(call: Call) -> str:
    """Keeps a triangle of the last two dims."""
    shape = full(call.operands[0].shape)
    term = [*shape[:-2], "n!", "p!"]
    return line([term], [term], "0")


def _diff(call: Call) -> str:
    """Differences along a dim, with parts put before and after it."""
    shape = call.results[0].shape
    dim = dim_of(call, 2, -1)
    free = full(shape)
    terms = [[*free[:dim], f"{name}!", *free[dim + 1 :]] for name in letters(len(call.operands) + 1, "n")]
    return line(terms[1:], terms[:1], " ".join(str(i) for i in range(len(call.operands))))


register([aten.sum.default, aten.sum.dim_IntList], _sum)
register([aten.mean.default, aten.mean.dim], over_dims("0"))
register(
    [
        aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
        aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims, aten.prod.dim_int, aten.logsumexp.default,
        aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, aten.var.dim, aten.std.dim,
        aten.var_mean.dim, aten.std_mean.dim, aten.median.dim, aten.nanmedian.dim, aten.count_nonzero.dim_IntList,
    ],
    over_dims(),
)  # fmt: skip
register([aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim], over_dims(position=2))
register(aten.kthvalue.default, over_dims(position=2, default=-1))
register(
    [
        aten.any.default, aten.all.default, aten.max.default, aten.min.default, aten.prod.default, aten.norm.Scalar, aten.var.default,
        aten.std.default, aten.var_mean.default, aten.std_mean.default, aten.median.default, aten.nanmedian.default,
    ],
    _everything(),
)  # fmt: skip
register(
    [
        aten.softmax.int, aten._softmax.default, aten._safe_softmax.default, aten.log_softmax.int, aten._log_softmax.default,
        aten.argsort.default,
        aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default, aten.argsort.stable,
    ],
    along_dim(),
)  # fmt: skip
register([aten.sort.default, aten.sort.stable], along_dim())
register(aten.msort.default, along_dim(default=0))
register(aten.topk.default, along_dim(position=2))
register(aten.cumsum.default, lambda call: along_dim(linear_unless_cut(call, 0, "0"))(call))
register(aten.flip.default, along_dims("0"))
register(aten.rot90.default, _turned)
register(aten.fliplr.default, _along([1]))
register(aten.flipud.default, _along([0]))
register(
    [
        aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default, aten.fft_irfft.default, aten.fft_hfft.default,
        aten.fft_ihfft.default,
    ],
    _transform(-1),
)  # fmt: skip
register(
    [aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_rfft2.default, aten.fft_irfft2.default], _transform([-2, -1])
)
register([aten.fft_fftn.default, aten.fft_ifftn.default, aten.fft_rfftn.default, aten.fft_irfftn.default], _transform(None))
register([aten.cosine_similarity.default, aten.pairwise_distance.default], _of_pairs)
register(aten.cdist.default, _distances)
register(aten.linalg_cross.default, _cross)
register(aten.roll.default, along_dims("0", position=2))
register([aten.triu.default, aten.tril.default], _triangle)
register(aten.diff.default, _diff)
