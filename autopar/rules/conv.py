"""Convolutions, pools and interpolation: batch and channels are free; space is too where windows neither overlap nor leave gaps.

ViT's patches are such windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.rules.lines import full, integer, integers, line, whole
from autopar.rules.notation import Rule
from autopar.rules.registry import Arguments, Call, Local, register

aten = torch.ops.aten


def _windows(
    space: Sequence[int], kernel: Sequence[int], given: Sequence[object], *, names: str
) -> tuple[list[str], list[str], dict[str, int]]:
    """Dims of the space before and after, and sizes; ``given`` are stride, padding, dilation, each a number or one per dim."""

    def each(value: object) -> list[int]:
        listed = integers(value)
        return listed * len(space) if len(listed) == 1 else listed

    before: list[str] = []
    after: list[str] = []
    sizes: dict[str, int] = {}
    for i, (size, window, stride, padding, dilation) in enumerate(
        zip(space, kernel, *(each(value) for value in given), strict=True)
    ):
        if window == stride and padding == 0 and dilation == 1 and size % window == 0:
            before.append(f"({names}{i} k{i}!)" if window > 1 else f"{names}{i}")
            after.append(f"{names}{i}")
            sizes |= {f"k{i}": window} if window > 1 else {}
        else:
            before.append(f"{names}{i}!")
            after.append(f"o{names}{i}!")
    return before, after, sizes


def _convolution(call: Call) -> Rule | str:
    image, weight = call.operands[0].shape, call.operands[1].shape
    bias = len(call.operands) == 3
    stride, padding, dilation = (
        call.argument(i, name, default) for i, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    is_general = call.target is aten.convolution.default
    groups = call.argument(8 if is_general else 6, "groups", 1)
    assert isinstance(groups, int)
    if (is_general and call.args[6]) or len(image) != len(weight):  # transposed, or without a batch
        return whole(call)
    padding = {"valid": 0, "same": -1}.get(padding, -1) if isinstance(padding, str) else padding
    before, after, sizes = _windows(image[2:], weight[2:], (stride, padding, dilation), names="h")
    kernel = [f"k{i}" + "!" for i in range(len(before))]
    inner = "c!" if bias or groups > 1 else "c"
    channels, out = inner, "o"
    if groups > 1:
        sizes |= {"g": groups, "o": weight[0] // groups}
        out = "(g o)" if sizes["o"] > 1 else "g"
        channels = f"(g {inner})" if weight[1] > 1 else "g"
        inner = inner if weight[1] > 1 else "1"
        sizes = {k: v for k, v in sizes.items() if k != "o" or v > 1}
    operands = [["b", channels, *before], [out, inner, *kernel], *([[out]] if bias else [])]
    linear = "0 2 | 1 2" if bias else "0 | 1"
    return Rule.parse(line(operands, [["b", out, *after]], linear), **sizes)


def _transposed(call: Call) -> Rule | str:
    """A convolution that spreads what it is given: space is free where every point becomes a block of its own."""
    image, weight = call.operands[0].shape, call.operands[1].shape
    bias, rank = len(call.operands) == 3, len(weight) - 2
    if len(image) != len(weight):
        return whole(call)
    groups = integer(call.argument(6, "groups", 1))
    stride, padding, extra, dilation = (
        (listed * rank if len(listed) == 1 else listed)
        for listed in (
            integers(call.argument(i, name, default))
            for i, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1))
        )
    )
    sizes, before, after = dict[str, int](), list[str](), list[str]()
    for i, kernel in enumerate(weight[2:]):
        if kernel == stride[i] and (padding[i], extra[i], dilation[i]) == (0, 0, 1):
            before.append(f"h{i}")
            after.append(f"(h{i} k{i}!)")
            sizes |= {f"h{i}": image[2 + i], f"k{i}": kernel}
        else:
            before.append(f"h{i}!")
            after.append(f"o{i}!")
    taken, given, result = ("c!" if bias else "c"), "o", "o"
    if groups > 1:
        sizes |= {"g": groups, "c": image[1] // groups, "o": weight[1]}
        taken, result = f"(g {taken})", "(g o)"
    operands = [["b", taken, *before], [taken, given, *(f"k{i}!" for i in range(rank))], *([[result]] if bias else [])]
    return Rule.parse(line(operands, [["b", result, *after]], "0 2 | 1 2" if bias else "0 | 1"), **sizes)


def _local_convolution(call: Call, local: Local) -> Arguments:
    """Groups as many as the shard has."""
    position = 8 if call.target is aten.convolution.default else 6
    if "g" not in local.sizes:
        return call.target, call.args, call.kwargs
    if len(call.args) > position:
        return call.target, (*call.args[:position], local.sizes["g"], *call.args[position + 1 :]), call.kwargs
    return call.target, call.args, call.kwargs | {"groups": local.sizes["g"]}


def _pool(call: Call) -> Rule:
    """``max_pool`` and ``avg_pool``: arguments kernel, stride, padding, then dilation for a maximum."""
    image, result = call.operands[0].shape, call.results[0].shape
    rank = _rank(call)
    kernel = integers(call.args[1])
    kernel = kernel * rank if len(kernel) == 1 else kernel
    is_max = "max_pool" in str(call.target)
    dilation = call.argument(4, "dilation", 1) if is_max else 1
    stride = call.argument(2, "stride") or kernel
    space = image[len(image) - rank :]
    before, after, sizes = _windows(space, kernel, (stride, call.argument(3, "padding", 0), dilation), names="h")
    channels = [f"a{i}" for i in range(len(result) - rank)]
    return Rule.parse(line([[*channels, *before]], [[*channels, *after]], "" if is_max else "0"), **sizes)


def _rank(call: Call) -> int:
    """Dims of the space, from the name of the op."""
    return next(rank for rank in (1, 2, 3) if f"{rank}d" in str(call.target))


def _nearest(call: Call) -> str | Rule:
    """Every point becomes a block where the factors are whole numbers; else space is whole."""
    factors, rank = call.argument(2, "scale_factors"), _rank(call)
    if not isinstance(factors, Sequence) or not all(float(factor).is_integer() for factor in factors):
        return _adaptive(call)
    channels = [f"a{i}" for i in range(len(call.results[0].shape) - rank)]
    sizes = {f"k{i}": int(factor) for i, factor in enumerate(factors)}
    before = [f"h{i}" for i in range(rank)]
    after = [f"(h{i} k{i}!)" if sizes[f"k{i}"] > 1 else f"h{i}" for i in range(rank)]
    return Rule.parse(line([[*channels, *before]], [[*channels, *after]], "0"), **{k: v for k, v in sizes.items() if v > 1})


def _adaptive(call: Call) -> str:
    """Windows follow from the sizes, so space is whole."""
    rank = _rank(call)
    channels = [f"a{i}" for i in range(len(call.results[0].shape) - rank)]
    before, after = ([f"{name}{i}!" for i in range(rank)] for name in ("h", "o"))
    return line([[*channels, *before]], [[*channels, *after]], "0")


def _placed(call: Call) -> str:
    """Maxima with their places in the space, which is whole."""
    rank = _rank(call)
    channels = full(call.results[0].shape[:-rank])
    before, after = ([f"{name}{i}!" for i in range(rank)] for name in ("h", "o"))
    return line([[*channels, *before]], [[*channels, *after]] * 2)


def _columns(call: Call) -> Rule | str:
    """Windows of an image as columns, or columns as an image."""
    is_made = call.target is aten.im2col.default
    image, columns = (call.operands, call.results) if is_made else (call.results, call.operands)
    if len(image[0].shape) != 4:
        return whole(call)
    channels, terms = image[0].shape[1], (["b", "c", "h!", "w!"], ["b", "(c k!)", "n!"])
    given, made = terms if is_made else terms[::-1]
    return Rule.parse(line([given], [made], "0"), c=channels, k=columns[0].shape[1] // channels)


register(
    [
        aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding,
        aten.convolution.default,
    ],
    _convolution,
    local=_local_convolution,
)  # fmt: skip
register(
    [aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input], _transposed, local=_local_convolution
)
register(
    [
        aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, aten.avg_pool1d.default, aten.avg_pool2d.default,
        aten.avg_pool3d.default,
    ],
    _pool,
)  # fmt: skip
register(
    [
        aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
        aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec, aten.upsample_trilinear3d.vec,
        aten._upsample_bilinear2d_aa.vec,
    ],
    _adaptive,
)  # fmt: skip
register(
    [
        aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default,
        aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default,
    ],
    _placed,
)  # fmt: skip
register([aten.im2col.default, aten.col2im.default], _columns)
register(
    [
        aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec, aten._upsample_nearest_exact1d.vec,
        aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact3d.vec,
    ],
    _nearest,
)  # fmt: skip
