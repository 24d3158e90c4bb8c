"""Products of matrices: the contracted factor is summed, batch dims broadcast."""

from __future__ import annotations

import torch

from autopar.rules.lines import full, letters, line, stretched, whole
from autopar.rules.registry import Call, register

aten = torch.ops.aten


def _linear(call: Call) -> str:
    batch = letters(len(call.operands[0].shape) - 1, "b")
    out = ["n"] if len(call.operands[1].shape) == 2 else []
    if len(call.operands) == 3:  # a bias is added on every rank, so k may not leave partial sums
        return line([[*batch, "k!"], [*out, "k!"], out], [[*batch, *out]], "0 2 | 1 2")
    return line([[*batch, "k"], [*out, "k"]], [[*batch, *out]], "0 | 1")


def _matmul(call: Call) -> str:
    left, right = (spec.shape for spec in call.operands)
    rows = ["m"] if len(left) > 1 else []
    columns = ["n"] if len(right) > 1 else []
    result = call.results[0].shape
    batch = result[: len(result) - len(rows) - len(columns)]
    return line(
        [[*stretched(left[:-2], batch), *rows, "k"], [*stretched(right[:-2], batch), "k", *columns]],
        [[*full(batch), *rows, *columns]],
        "0 | 1",
    )


def _with_addend(call: Call) -> str:
    """``addmm`` and ``baddbmm``: the addend is added on every rank, so the contracted factor is whole."""
    result = call.results[0].shape
    batch = full(result[:-2])
    product = full(result)
    rows, columns = product[-2:]
    return line(
        [stretched(call.operands[0].shape, result), [*batch, rows, "k!"], [*batch, "k!", columns]],
        [product],
        "0 1 | 0 2",
    )


def _einsum(call: Call) -> str:
    """The equation is the rule; with ``...``, repeated or implied letters nothing is sharded."""
    equation = str(call.args[0]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    names = {letter for letter in equation if letter.isalpha()}
    shapes = [spec.shape for spec in call.operands]
    known: dict[str, int] = {}
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in (*terms, right)):
        return whole(call)
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape, strict=True):
            if known.setdefault(letter, size) != size:
                return whole(call)
    code = {letter: f"e{i}" for i, letter in enumerate(sorted(names))}
    linear = " | ".join(map(str, range(len(terms))))
    return line([[code[x] for x in term] for term in terms], [[code[x] for x in right]], linear)


register(aten.linear.default, _linear)
register(aten.matmul.default, _matmul)
register(aten.mm.default, "m k, k n -> m n ; 0 | 1")
register(aten.bmm.default, "b m k, b k n -> b m n ; 0 | 1")
register(aten.mv.default, "m k, k -> m ; 0 | 1")
register([aten.dot.default, aten.vdot.default], "k, k -> . ; 0 | 1")
register(aten.outer.default, "m, n -> m n ; 0 | 1")
register([aten.addmm.default, aten.baddbmm.default], _with_addend)
register(aten.einsum.default, _einsum)
