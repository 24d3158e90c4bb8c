"""Ops that only regroup or reorder factors: ``reshape`` and its kin, ``transpose``, ``permute``, ``expand``.

A reshape finds the factors that source and target have in common by walking both from the major end, taking the greatest common divisor of
what is left of two dims: (6, 4) -> (3, 8) is ``(a b) c -> a (b c)``. Where the two share no divisor (2, 3) -> (3, 2) the walk is
taken up from the minor end, and what neither reaches is whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from autopar.rules.lines import dims_of, full, integer, integers, line, stretched, whole
from autopar.rules.notation import Rule
from autopar.rules.registry import Arguments, Call, Local, register

aten = torch.ops.aten


def regroup(source: Sequence[int], target: Sequence[int]) -> Rule:
    """The rule of a reshape between two shapes of equal product."""
    assert math.prod(source) == math.prod(target), (source, target)
    majors: tuple[list[list[str]], list[list[str]]] = ([[] for _ in source], [[] for _ in target])
    minors: tuple[list[list[str]], list[list[str]]] = ([[] for _ in source], [[] for _ in target])
    rest = (list(source), list(target))
    sizes: dict[str, int] = {}
    for left, right in _groups(source, target):
        for i, j, size in _meet(rest, left, right):
            letter = f"f{len(sizes)}"
            sizes[letter] = size
            majors[0][i].append(letter)
            majors[1][j].append(letter)
        for i, j, size in _meet(rest, left[::-1], right[::-1]):
            letter = f"f{len(sizes)}"
            sizes[letter] = size
            minors[0][i].insert(0, letter)
            minors[1][j].insert(0, letter)
    whole = set()
    for side in (0, 1):
        for dim, size in enumerate(rest[side]):
            if size != 1:
                letter = f"w{len(sizes)}"
                sizes[letter] = size
                whole.add(letter)
                majors[side][dim].append(letter)
    terms = [
        tuple(tuple(major + minor) for major, minor in zip(majors[side], minors[side], strict=True)) for side in (0, 1)
    ]
    return Rule((terms[0],), (terms[1],), frozenset(whole), linear=(frozenset({0}),), sizes=sizes)


def _groups(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dims of either side with equal products, as short as can be; nothing for empty tensors."""
    if 0 in source:
        return
    left: list[int] = []
    right: list[int] = []
    product_left = product_right = 1
    i = j = 0
    while i < len(source) or j < len(target):
        if j == len(target) or (i < len(source) and product_left <= product_right):
            product_left *= source[i]
            left.append(i)
            i += 1
        else:
            product_right *= target[j]
            right.append(j)
            j += 1
        if product_left == product_right:
            yield left, right
            left, right = [], []
            product_left = product_right = 1


def _meet(rest: tuple[list[int], list[int]], left: list[int], right: list[int]) -> Iterator[tuple[int, int, int]]:
    """Walk two runs of dims in the given order and take common divisors out of ``rest``: (left dim, right dim, size)."""
    i = j = 0
    while True:
        while i < len(left) and rest[0][left[i]] == 1:
            i += 1
        while j < len(right) and rest[1][right[j]] == 1:
            j += 1
        if i == len(left) or j == len(right):
            return
        size = math.gcd(rest[0][left[i]], rest[1][right[j]])
        if size == 1:
            return
        rest[0][left[i]] //= size
        rest[1][right[j]] //= size
        yield left[i], right[j], size


def _reshape(call: Call) -> Rule:
    return regroup(call.operands[0].shape, call.results[0].shape)


def _local_reshape(call: Call, local: Local) -> Arguments:
    """Also for ``squeeze``, which on a shard would drop a dim whose part happens to be 1."""
    return aten.reshape.default, (call.args[0], list(local.result_shapes[0])), {}


def _complex(call: Call) -> str:
    """The last dim are the real and the imaginary part, or there is none, and the numbers are complex."""
    is_made = call.target is aten.view_as_complex.default
    numbers = full((call.results if is_made else call.operands)[0].shape)
    terms = [[*numbers, "z!"], numbers]
    given, made = terms if is_made else terms[::-1]
    return line([given], [made], "0")


def _diagonal(call: Call) -> str:
    """The diagonal of two dims comes last."""
    shape = full(call.operands[0].shape)
    dims = dims_of([call.argument(2, "dim1", 0), call.argument(3, "dim2", 1)], len(shape))
    operand = [f"n{i}!" if i in dims else name for i, name in enumerate(shape)]
    return line([operand], [[*(name for i, name in enumerate(shape) if i not in dims), "p!"]], "0")


def _diagonal_matrix(call: Call) -> str:
    """The last dim becomes the diagonal of two dims of the result."""
    shape, result = full(call.operands[0].shape), call.results[0].shape
    dims = dims_of([call.argument(2, "dim1", -2), call.argument(3, "dim2", -1)], len(result))
    others = iter(shape[:-1])
    return line([[*shape[:-1], "p!"]], [[f"n{i}!" if i in dims else next(others) for i in range(len(result))]], "0")


def _pixel_shuffle(call: Call) -> Rule:
    """Channels become blocks of pixels, of a given side, or blocks become channels."""
    side, shape = integer(call.args[1]), call.operands[0].shape
    batch = full(shape[:-3])
    deep, wide = [*batch, "(c x! y!)", "h", "w"], [*batch, "c", "(h x!)", "(w y!)"]
    terms = (deep, wide) if call.target is aten.pixel_shuffle.default else (wide, deep)
    channels, height, width = (call.results if call.target is aten.pixel_shuffle.default else call.operands)[0].shape[-3:]
    return Rule.parse(line(terms[:1], terms[1:], "0"), x=side, y=side, c=channels, h=height // side, w=width // side)


def _channel_shuffle(call: Call) -> Rule:
    """Channels of each of several groups in turn."""
    groups, shape = integer(call.args[1]), call.operands[0].shape
    space = full(shape[2:], "h")
    return Rule.parse(line([["b", "(g! c)", *space]], [["b", "(c g!)", *space]], "0"), g=groups, c=shape[1] // groups)


def _unfold(call: Call) -> str:
    """Windows along a dim, which are a dim more."""
    shape = full(call.operands[0].shape)
    if not shape:
        return whole(call)
    (dim,) = dims_of(call.args[1], len(shape))
    return line([[*shape[:dim], "n!", *shape[dim + 1 :]]], [[*shape[:dim], "p!", *shape[dim + 1 :], "w!"]], "0")


def _order(call: Call) -> list[int]:
    """For every dim of the result the dim of the operand that it is."""
    num_dims = len(call.operands[0].shape)
    order = list(range(num_dims))
    if call.target is aten.permute.default:
        return dims_of(integers(call.argument(1, "dims")), num_dims)
    if call.target in (aten.movedim.int, aten.movedim.intlist):
        source, target = (dims_of(integers(given), num_dims) for given in call.args[1:3])
        placed = dict(zip(target, source, strict=True))
        others = iter([dim for dim in order if dim not in source])
        return [placed[dim] if dim in placed else next(others) for dim in order]
    if call.target in (aten.numpy_T.default, aten.t.default):
        return order[::-1]
    if call.target is aten.mT.default:
        return [*order[:-2], order[-1], order[-2]]
    i, j = (dims_of(call.args[position], num_dims)[0] for position in (1, 2))
    if order:
        order[i], order[j] = j, i
    return order


def _reorder(call: Call) -> str:
    operand = full(call.operands[0].shape)
    return line([operand], [[operand[dim] for dim in _order(call)]], "0")


def _expand(call: Call) -> str:
    result = call.results[0].shape
    return line([stretched(spec.shape, result) for spec in call.operands], [full(result)], "0")


def _local_expand(call: Call, local: Local) -> Arguments:
    return call.target, (call.args[0], list(local.result_shapes[0])), call.kwargs if len(call.args) > 1 else {}


register(
    [
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    ],
    _reshape,
    local=_local_reshape,
)  # fmt: skip
register([aten.view_as_complex.default, aten.view_as_real.default], _complex)
register(aten.diagonal.default, _diagonal)
register(aten.diag_embed.default, _diagonal_matrix)
register([aten.pixel_shuffle.default, aten.pixel_unshuffle.default], _pixel_shuffle)
register(aten.channel_shuffle.default, _channel_shuffle)
register(aten.unfold.default, _unfold)
register(
    [
        aten.transpose.int, aten.swapaxes.default, aten.t.default, aten.permute.default, aten.movedim.int,
        aten.movedim.intlist, aten.numpy_T.default, aten.mT.default,
    ],
    _reorder,
)  # fmt: skip
register([aten.expand.default, aten.broadcast_to.default], _expand, local=_local_expand)
register(aten.expand_as.default, _expand)
