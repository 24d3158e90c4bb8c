"""Ops that cut a dim into blocks or join blocks to a dim: ``slice``, ``split``, ``cat``, ``pad``, ``repeat``.

The blocks' greatest common unit ``u`` is a factor of its own: a dim of 2048 + 512 + 512 that is split in these three is ``(n! u)`` with
n=6 and u=512, and the parts are ``(p0! u), u, u``. A shard of ``u`` cuts the same share out of every block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from autopar.rules.lines import dim_of, full, integers, letters, line, linear_unless_cut, whole
from autopar.rules.notation import Rule
from autopar.rules.registry import Arguments, Call, Local, Op, register

aten = torch.ops.aten


def _units(count: int, name: str, unit: int) -> str:
    """A dim of ``count`` units; a unit of 1 cannot be sharded."""
    if unit == 1:
        return f"{name}!"
    return "u" if count == 1 else f"({name}! u)"


def _blocks(
    whole: Sequence[int],
    dim: int,
    blocks: Sequence[int],
    *,
    joined: bool,
    linear: str,
    also: Sequence[int] = (),
    empty: Mapping[int, list[str]] | None = None,
) -> Rule:
    """A tensor of shape ``whole`` and its blocks along ``dim``.

    Args:
        joined: the blocks are the operands and the tensor is the result.
        linear: what stands after the semicolon.
        also: further offsets which the unit must divide.
        empty: operands without elements by position; they are not blocks, and may have any shape.
    """
    unit = math.gcd(whole[dim], *blocks, *also) or 1
    size = whole[dim] // unit
    others = full(whole)
    sizes = {"n": size, "u": unit} | {f"p{i}": block // unit for i, block in enumerate(blocks)}

    def term(name: str, count: int) -> list[str]:
        return [*others[:dim], _units(count, name, unit), *others[dim + 1 :]]

    one = [term("n", size)]
    many = [term(f"p{i}", block // unit) for i, block in enumerate(blocks)]
    for i, dims in (empty or {}).items():
        many.insert(i, dims)
    text = line(many, one, linear) if joined else line(one, many, linear)
    rule = Rule.parse(text)
    return replace(rule, sizes={letter: sizes[letter] for letter in rule.letters if letter in sizes})


def _scaled(size: int, call: Call, local: Local) -> int:
    """A length along the cut dim as it is on the shard."""
    if "u" not in local.sizes:
        return size
    unit = _unit(call)
    return size // unit * local.sizes["u"]


def _unit(call: Call) -> int:
    return _RULES[call.target](call).sizes["u"]


def _slice_bounds(call: Call) -> tuple[int, int, int, int]:
    """Dim, start, stop and step of a slice, as Python's ``slice.indices``."""
    dim = dim_of(call, 1)
    given = slice(*(call.argument(i, name) for i, name in ((2, "start"), (3, "end"), (4, "step"))))
    return dim, *given.indices(call.operands[0].shape[dim])


def _slice(call: Call) -> Rule:
    dim, start, _, step = _slice_bounds(call)
    shape, length = call.operands[0].shape, call.results[0].shape[dim]
    if length and (step == 1 or length == 1):
        return _blocks(shape, dim, [length], joined=False, linear="0", also=[start])
    source, target = full(shape), full(call.results[0].shape)
    if length and shape[dim] == step * length and start < step:  # every step-th: the minor factor is picked
        source[dim], target[dim] = "(u n!)", "u"
        return Rule.parse(line([source], [target], "0"), u=length, n=step)
    source[dim], target[dim] = "n!", "p!"
    return Rule.parse(line([source], [target], "0"))


def _local_slice(call: Call, local: Local) -> Arguments:
    dim, start, stop, step = _slice_bounds(call)
    if "u" in local.sizes and step == 1:
        start, stop = _scaled(start, call, local), _scaled(stop, call, local)
    elif "u" in local.sizes:
        stop = step * local.sizes["u"]
    return call.target, (call.args[0], dim, start, stop, step), {}


def _narrow(call: Call) -> Rule:
    dim = dim_of(call, 1)
    shape = call.operands[0].shape
    start, length = integers(call.args[2:4])
    return _blocks(shape, dim, [length], joined=False, linear="0", also=[start % max(1, shape[dim])])


def _local_narrow(call: Call, local: Local) -> Arguments:
    start, length = integers(call.args[2:4])
    start %= max(1, call.operands[0].shape[dim_of(call, 1)])
    return call.target, (*call.args[:2], _scaled(start, call, local), _scaled(length, call, local)), {}


def _split(call: Call) -> Rule:
    dim = dim_of(call, 2)
    blocks = [spec.shape[dim] for spec in call.results]
    return _blocks(call.operands[0].shape, dim, blocks, joined=False, linear="0")


def _local_split(call: Call, local: Local) -> Arguments:
    given = call.args[1]
    if isinstance(given, int):
        size = min(given, call.operands[0].shape[dim_of(call, 2)])
        return call.target, (call.args[0], _scaled(size, call, local), *call.args[2:]), call.kwargs
    return call.target, (call.args[0], [_scaled(size, call, local) for size in integers(given)], *call.args[2:]), call.kwargs


def _cat(call: Call) -> Rule:
    result = call.results[0].shape
    dim = int(call.argument(1, "dim", 0)) % len(result)  # type: ignore[call-overload]
    empty = {i: letters(len(spec.shape), f"o{i}x", "!") for i, spec in enumerate(call.operands) if spec.numel == 0}
    blocks = [spec.shape[dim] for i, spec in enumerate(call.operands) if i not in empty]
    linear = " ".join(str(i) for i in range(len(call.operands)) if i not in empty)
    return _blocks(result, dim, blocks, joined=True, linear=linear, empty=empty)


def _stack(call: Call) -> str:
    result = full(call.results[0].shape)
    dim = int(call.argument(1, "dim", 0)) % len(result)  # type: ignore[call-overload]
    term = result[:dim] + result[dim + 1 :]
    return line([term] * len(call.operands), [[*result[:dim], "n!", *result[dim + 1 :]]], _all(call))


def _all(call: Call) -> str:
    return " ".join(map(str, range(len(call.operands))))


def _unbind(call: Call) -> str:
    operand = full(call.operands[0].shape)
    dim = dim_of(call, 1)
    operand[dim] = "n!"
    return line([operand], [operand[:dim] + operand[dim + 1 :]] * len(call.results), "0")


def _pad(call: Call) -> str:
    if call.target is aten.pad.default:
        is_constant = call.argument(2, "mode", "constant") == "constant"
        is_linear = not is_constant or (call.argument(3, "value") or 0) == 0
    else:
        is_linear = call.argument(2, "value", 0) == 0
    amounts = integers(call.args[1])
    operand, result = full(call.operands[0].shape), full(call.results[0].shape)
    for i in range(0, len(amounts), 2):
        if amounts[i] or amounts[i + 1]:
            dim = len(operand) - 1 - i // 2
            operand[dim], result[dim] = f"n{dim}!", f"p{dim}!"
    return line([operand], [result], "0" if is_linear else "")


def _repeat(call: Call) -> Rule:
    """``(r d)`` for every repeated dim: the copies are a factor that the operand has not."""
    source, target = call.operands[0].shape, call.results[0].shape
    if 0 in target:
        return Rule.parse(whole(call))
    offset = len(target) - len(source)
    operand, result, sizes = full(source), [], {}
    for i, size in enumerate(target):
        old = source[i - offset] if i >= offset else 1
        count = size // old
        letter = operand[i - offset] if old > 1 else "1"
        if count == 1:
            result.append(letter)
        else:
            result.append(f"r{i}" if old == 1 else f"(r{i} {letter})")
            sizes[f"r{i}"] = count
    return Rule.parse(line([operand], [result], "0"), **sizes)


def _local_repeat(call: Call, local: Local) -> Arguments:
    """``tile`` may have counts for the last dims alone."""
    counts = integers(call.args[1])
    first = len(call.results[0].shape) - len(counts)
    return call.target, (call.args[0], [local.sizes.get(f"r{i}", count) for i, count in enumerate(counts, first)]), {}


def _repeat_interleave(call: Call) -> Rule:
    """``(d r)``, the copies next to each other; without a dim the operand is flattened before."""
    if 0 in call.results[0].shape:
        return Rule.parse(whole(call))
    given = call.argument(2, "dim")
    operand = full(call.operands[0].shape)
    count = call.args[1]
    assert isinstance(count, int)
    first, last = (0, len(operand)) if given is None else (dim_of(call, 2), dim_of(call, 2) + 1)
    names = [*(letter for letter in operand[first:last] if letter != "1"), *(["r"] if count > 1 else [])]
    group = f"({' '.join(names)})" if names else "1"
    sizes = {"r": count} if count > 1 else {}
    return Rule.parse(line([operand], [[*operand[:first], group, *operand[last:]]], "0"), **sizes)


def _local_repeat_interleave(call: Call, local: Local) -> Arguments:
    return call.target, (call.args[0], local.sizes.get("r", call.args[1]), *call.args[2:]), {
        key: value for key, value in call.kwargs.items() if key != "output_size"
    }


def _overwrite(call: Call) -> str:
    """``slice_scatter`` and ``select_scatter``: part of a dim, which is whole, is replaced."""
    result = full(call.results[0].shape)
    dim = dim_of(call, 2)
    source = [*result[:dim], *(["p!"] if call.target is aten.slice_scatter.default else []), *result[dim + 1 :]]
    result[dim] = "n!"
    return line([result, source], [result], linear_unless_cut(call, 1, "0 1"))


def _glu(call: Call) -> Rule:
    """The two halves of a dim: ``(n! u) -> u``, n=2."""
    dim = dim_of(call, 1, -1)
    return _blocks(call.operands[0].shape, dim, [call.results[0].shape[dim]], joined=False, linear="")


_RULES: dict[Op, Callable[[Call], Rule]] = {
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.split.Tensor: _split,
    aten.split.sizes: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
}

register(aten.slice.Tensor, _slice, local=_local_slice)
register(aten.narrow.default, _narrow, local=_local_narrow)
register([aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default], _split, local=_local_split)
register(aten.chunk.default, _split)
register([aten.cat.default, aten.concat.default], _cat)
register(aten.stack.default, _stack)
register([aten.unbind.int, aten.select.int], _unbind)
register([aten.pad.default, aten.constant_pad_nd.default], _pad)
register([aten.repeat.default, aten.tile.default], _repeat, local=_local_repeat)
register(aten.repeat_interleave.self_int, _repeat_interleave, local=_local_repeat_interleave)
register([aten.slice_scatter.default, aten.select_scatter.default], _overwrite)
register(aten.glu.default, _glu)
