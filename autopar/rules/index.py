"""Look-ups: the dim that is looked into is whole, the dims of the indices are free, and so are the dims that both share.

Only the embedding may be sharded on what it looks into, as it is told its range of rows.
"""

from __future__ import annotations

import torch

from autopar.rules.lines import dim_of, full, letters, line, stretched, whole
from autopar.rules.ranged import embedding_range
from autopar.rules.registry import Arguments, Call, Coordinate, Local, TensorSpec, register

aten = torch.ops.aten


def _embedding(call: Call) -> str:
    """``v@ d, b s -> b s d``."""
    mark = "!" if call.argument(3, "scale_grad_by_freq", False) else ""
    ids = letters(len(call.operands[1].shape), "b", mark)
    rows = "v!" if mark else "v@"
    return line([[rows, "d"], ids], [[*ids, "d"]], "0")


def _local_embedding(call: Call, local: Local) -> Arguments:
    axes = local.axes.get("v", ())
    if not axes:
        return call.target, call.args, call.kwargs
    sizes = [local.mesh_sizes[axis] for axis in axes]
    padding = call.argument(2, "padding_idx", -1)
    return embedding_range, (*call.args[:2], [Coordinate(axis) for axis in axes], sizes, padding), {}


def _index_select(call: Call) -> str:
    operand = full(call.operands[0].shape)
    if not operand:
        return whole(call)
    dim = dim_of(call, 1)
    ids = ["i"] if call.operands[1].shape else ["1"]
    index = ids if call.operands[1].shape else []
    return line(
        [[*operand[:dim], "v!", *operand[dim + 1 :]], index], [[*operand[:dim], *ids, *operand[dim + 1 :]]], "0"
    )


def _gather(call: Call) -> str:
    """Dims in which the index is shorter than the operand are read from the front, so they are whole."""
    source, index = call.operands[0].shape, call.operands[1].shape
    if len(source) != len(index):
        return whole(call)
    dim = dim_of(call, 1)
    operand, ids = full(source), full(index, "i")
    for i, (a, b) in enumerate(zip(source, index, strict=True)):
        if i == dim:
            operand[i] = "v!"
        elif a == b:
            ids[i] = operand[i]
        else:
            operand[i], ids[i] = f"a{i}!", f"i{i}!"
    return line([operand, ids], [ids], "0")


def _scatter(call: Call) -> str:
    """Writes along a dim, whole in all; the others are free where all sizes agree."""
    source, *others = (spec.shape for spec in call.operands)
    dim = dim_of(call, 1)
    free = [i for i, size in enumerate(source) if i != dim and all(len(o) > i and o[i] == size for o in others)]
    names = [
        [f"a{i}" if i in free else f"x{n}y{i}!" for i in range(len(shape))] for n, shape in enumerate((source, *others))
    ]
    if call.target is aten.scatter_reduce.two:
        linear = "0 2" if call.args[4] in ("sum", "mean") else ""
    else:
        linear = "0 2" if len(call.operands) == 3 else "0" if call.argument(3, "value") == 0 else ""
    return line(names, names[:1], linear)


def _take_along(call: Call) -> str:
    """As `_gather`, but all other dims stretch to each other; without a dim both are flat."""
    source, index = (spec.shape for spec in call.operands)
    if call.argument(2, "dim") is None and len(index) == 1:
        return line([letters(len(source), "v", "!"), full(index)], [full(index)], "0")
    if call.argument(2, "dim") is None or len(source) != len(index):
        return whole(call)
    dim = dim_of(call, 2)
    terms = [full(source), full(index), full(call.results[0].shape)]
    for term, mark in zip(terms, ("v!", "i", "i"), strict=True):
        term[dim] = mark if term[dim] != "1" or mark == "v!" else "1"
    return line(terms[:2], terms[2:], "0")


def _index_fill(call: Call) -> str:
    """Rows that the index names get a number."""
    operand = full(call.operands[0].shape)
    if not operand:
        return whole(call)
    operand[dim_of(call, 1)] = "v!"
    return line([operand, ["i!"] if call.operands[1].shape else []], [operand], "0" if call.args[3] == 0 else "")


def _bucketize(call: Call) -> str:
    """The place of each number in a row that is in order."""
    numbers = full(call.operands[0].shape)
    return line([numbers, ["n!"]], [numbers])


def _searchsorted(call: Call) -> str:
    """The same, in one row or, but for the last dim, in one for each row of numbers."""
    rows, numbers = (spec.shape for spec in call.operands[:2])
    if len(call.operands) > 2:
        return whole(call)
    found = full(numbers)
    return line([["n!"] if len(rows) == 1 else [*found[:-1], "n!"], found], [found])


def _grid_sample(call: Call) -> str:
    """Points of a space, which is whole, at the places that a grid names."""
    channels = ["b", "c"]
    space, points = letters(len(call.operands[0].shape) - 2, "h", "!"), letters(len(call.operands[1].shape) - 2, "p")
    return line([[*channels, *space], ["b", *points, "z!"]], [[*channels, *points]], "0")


def _index_add(call: Call) -> str:
    """``index_add`` and ``index_copy``: rows of the source go to the rows of the operand that the index names."""
    operand = full(call.operands[0].shape)
    if not operand or not call.operands[1].shape:
        return whole(call)
    dim = dim_of(call, 1)
    target = [*operand[:dim], "v!", *operand[dim + 1 :]]
    return line([target, ["i!"], [*operand[:dim], "i!", *operand[dim + 1 :]]], [target], "0 2")


def _indexed(call: Call, mark: str) -> tuple[list[str], list[list[str]], list[str]] | None:
    """Dims of the operand, of each index and of the elements that they pick; None if there are masks."""
    given = call.args[1]
    assert isinstance(given, (list, tuple))
    indices = [spec for spec in given if isinstance(spec, TensorSpec)]
    if any(spec.dtype in (torch.bool, torch.uint8) for spec in indices):
        return None
    indexed = [i for i, spec in enumerate(given) if spec is not None]
    shape = torch.broadcast_shapes(*(spec.shape for spec in indices))
    operand = full(call.operands[0].shape)
    for dim in indexed:
        operand[dim] = f"v{dim}!"
    free = [dim for dim in range(len(operand)) if dim not in indexed]
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    before = [operand[dim] for dim in free if adjacent and dim < indexed[0]]
    after = [operand[dim] for dim in free if not adjacent or dim > indexed[0]]
    ids = [[x if x == "1" else x + mark for x in stretched(spec.shape, shape, "i")] for spec in indices]
    return operand, ids, [*before, *[x if x == "1" else x + mark for x in full(shape, "i")], *after]


def _index(call: Call) -> str:
    """Advanced indexing: dims without index are free, and so are the dims of the indices. Masks make everything whole."""
    terms = _indexed(call, "")
    if terms is None:
        return whole(call)
    operand, ids, picked = terms
    return line([operand, *ids], [picked], "0")


def _index_put(call: Call) -> str:
    """Every rank must write all rows, so the dims of the indices are whole."""
    terms = _indexed(call, "!")
    if terms is None:
        return whole(call)
    operand, ids, picked = terms
    values = call.operands[-1].shape
    stretch = ["1" if size == 1 else name for size, name in zip(values, picked[len(picked) - len(values) :], strict=True)]
    return line([operand, *ids, stretch], [operand], f"0 {len(ids) + 1}")


def _one_hot(call: Call) -> str:
    """A row of classes for every index."""
    ids = full(call.operands[0].shape)
    return line([ids], [[*ids, "c!"]])


register(aten.embedding.default, _embedding, local=_local_embedding)
register(aten.index_select.default, _index_select)
register(aten.gather.default, _gather)
register(aten.take_along_dim.default, _take_along)
register(
    [
        aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
    ],
    _scatter,
)  # fmt: skip
register(aten.index_fill.int_Scalar, _index_fill)
register(aten.bucketize.Tensor, _bucketize)
register(aten.searchsorted.Tensor, _searchsorted)
register([aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default], _grid_sample)
register([aten.index_add.default, aten.index_copy.default], _index_add)
register(aten.index.Tensor, _index)
register(aten.index_put.default, _index_put)
register(aten.one_hot.default, _one_hot)
register(aten.nonzero.default, whole)
