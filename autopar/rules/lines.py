"""Words for writing lines where the number of dims depends on the call.

Letters are numbered: ``letters(3)`` gives ``a0 a1 a2``. A dim of size 1 is written ``1``, so that it stretches to any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.rules.registry import Call, TensorSpec, has_gradients


def letters(num_dims: int, name: str = "a", mark: str = "") -> list[str]:
    """``num_dims`` different factors."""
    return [f"{name}{i}{mark}" for i in range(num_dims)]


def line(operands: Iterable[Sequence[str]], results: Iterable[Sequence[str]], linear: str = "") -> str:
    """One line from the dims of every operand and result; ``linear`` is what stands after the semicolon."""

    def show(terms: Iterable[Sequence[str]]) -> str:
        return ", ".join(" ".join(term) or "." for term in terms)

    return f"{show(operands)} -> {show(results)}" + (f" ; {linear}" if linear else "")


def full(shape: Sequence[int], name: str = "a") -> list[str]:
    """A factor for every dim that is longer than 1."""
    return ["1" if size == 1 else f"{name}{i}" for i, size in enumerate(shape)]


def stretched(shape: Sequence[int], result: Sequence[int], name: str = "a") -> list[str]:
    """Dims of an operand that is broadcast to ``result``, whose dims are ``full(result)``."""
    offset = len(result) - len(shape)
    return ["1" if size == 1 else f"{name}{offset + i}" for i, size in enumerate(shape)]


def whole(call: Call) -> str:
    """A line that shards nothing."""
    terms = [
        letters(len(spec.shape), f"{name}{i}x", "!")
        for name, specs in (("a", call.operands), ("r", call.results))
        for i, spec in enumerate(specs)
    ]
    return line(terms[: len(call.operands)], terms[len(call.operands) :])


def linear_unless_cut(call: Call, operand: int, linear: str) -> str:
    """``linear``, but for an operand whose numbers the result cuts to whole ones, or to whether they are zero: of a sum that is not that of
    the parts."""
    source, target = call.operands[operand].dtype, call.results[0].dtype
    is_cut = target is torch.bool or (has_gradients(source) and not has_gradients(target))
    return "" if source is torch.bool or is_cut else linear


def dims_of(given: object, num_dims: int) -> list[int]:
    """A ``dim`` argument (a number, several, or None for all) as numbers from 0."""
    if given is None or (isinstance(given, Sequence) and not given):
        return list(range(num_dims))
    return [dim % max(1, num_dims) for dim in integers(given)]


def dim_of(call: Call, position: int, default: int = 0) -> int:
    """The ``dim`` argument of a call as a number from 0."""
    (dim,) = dims_of(call.argument(position, "dim", default), len(call.operands[0].shape))
    return dim


def integer(given: object) -> int:
    """An argument that is a number."""
    (number,) = integers(given)
    return number


def integers(given: object) -> list[int]:
    """An argument that is a number or a list of numbers, as a list."""
    if isinstance(given, int):
        return [given]
    assert isinstance(given, Sequence)
    return [int(x) for x in given]


def is_tensor(argument: object) -> bool:
    return isinstance(argument, TensorSpec)
