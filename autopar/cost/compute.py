"""Flops, bytes and what the backward needs of one op, as sympy expressions in the local sizes of its rule's factors.

Flops are those of contractions, counted as ``torch.utils.flop_counter`` does (a causal attention at half), bytes are what one kernel
must read and write: operands once, results once. What differs by op is in the table of `cost.families`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import sympy
from numpy.typing import ArrayLike
from sympy.printing.numpy import NumPyPrinter
from torch import fx

from autopar.cost.families import CASTS, MATMULS, STREAM_OF, TABLE, Family, Work, family_of, names_of
from autopar.graph import Value, call_of, is_call, is_getitem, operands_of, specs_of, value_spec
from autopar.rules.notation import Rule
from autopar.rules.registry import Call, TensorSpec

_CAUSAL_AT = {
    "scaled_dot_product_attention": 5,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
}
"""Position of ``is_causal``, by the ops' schemas."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one op costs one rank; expressions in the local sizes of the rule's factors, for `evaluate`.

    Args:
        flops: of contractions; 0 for other ops.
        num_bytes: read and written.
        backward_flops: for the gradients that the operands ask for.
        backward_num_bytes: likewise.
        saved: what is kept for the backward: operand i as i, result j as number of operands + j. The kept log-softmax of a
            cross-entropy is as large as operand 0 and stands as that.
        hidden_bytes: what is kept beside that (masks, statistics).
        is_matmul: whether the flops count.
        sides: m, n and k of a matmul; queries, keys and width of an attention; None where that is not known.
        stream: which of `STREAMS` an op without flops is like.
        taken: bytes of each operand.
        gradients: how many factors of a matmul want one, each made by a product of as many flops as the forward's.
    """

    flops: sympy.Expr
    num_bytes: sympy.Expr
    backward_flops: sympy.Expr
    backward_num_bytes: sympy.Expr
    saved: frozenset[int]
    hidden_bytes: sympy.Expr
    is_matmul: bool
    sides: tuple[sympy.Expr, ...] | None = None
    stream: str = ""
    taken: tuple[sympy.Expr, ...] = ()
    gradients: int = 0

    @property
    def is_attention(self) -> bool:
        return self.is_matmul and self.stream == "attention"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a call with its dims as expressions."""

    dims: tuple[sympy.Expr, ...]
    itemsize: int
    needs_grad: bool

    @property
    def numel(self) -> sympy.Expr:
        return sympy.Mul(*self.dims)

    @property
    def num_bytes(self) -> sympy.Expr:
        return self.itemsize * self.numel


@cache
def symbol(letter: str) -> sympy.Symbol:
    """The size of a factor or of a mesh axis."""
    return sympy.Symbol(letter, positive=True)


def _flag(call: Call) -> object:
    """The one argument beside tensors that prices depend on: is_causal, equation, transposed, whether dropout acts, which GELU, how many
    dims or groups a norm has, whether a pad is of what is inside."""
    name = names_of(call.target)[1]
    if name == "gelu":
        return call.kwargs.get("approximate", "none") == "tanh"
    if name in _CAUSAL_AT:
        return bool(call.argument(_CAUSAL_AT[name], "is_causal", False))
    if name == "einsum":
        return call.argument(0, "equation")
    if name == "layer_norm":
        shape = call.argument(1, "normalized_shape")
        assert isinstance(shape, Sequence)
        return len(shape)
    if name == "group_norm":
        return call.argument(1, "num_groups")
    if name in ("dropout", "dropout_", "feature_dropout"):
        return bool(call.argument(1, "p", 0.5) and call.argument(2, "train", True))
    if name.startswith("conv_transpose"):
        return True
    if name == "pad":
        return call.argument(2, "mode", "constant") in ("reflect", "replicate")
    if name in ("convolution", "_convolution"):
        return bool(call.argument(6, "transposed", False))
    return None


def _kept(text: str, operands: tuple[_Tensor, ...], results: tuple[_Tensor, ...]) -> Iterator[int]:
    """Indices that a row keeps, see `cost.families`."""
    count = len(operands)
    for token in text.split():
        if token.startswith("r"):
            if int(token[1:]) < len(results):
                yield count + int(token[1:])
        elif token.endswith("+"):
            yield from range(int(token[:-1]), count)
        else:
            index, _, other = token.partition("?")
            if int(index) < count and (not other or (int(other) < count and operands[int(other)].needs_grad)):
                yield int(index)


def _contraction_flops(
    family: Family, flag: object, operands: tuple[_Tensor, ...], results: tuple[_Tensor, ...], letters: sympy.Expr
) -> sympy.Expr:
    if isinstance(flag, str):  # einsum, of which one operand is summed up
        return 2 * letters if len(operands) > 1 else letters
    first, second = (operands[i] for i in family.product)
    if family.work is Work.ATTENTION:  # scores and their product with the values; Dao et al. 2022
        keys, value_width = second.dims[-2], operands[2].dims[-1]
        flops = 2 * sympy.Mul(*first.dims[:-1]) * keys * (first.dims[-1] + value_width)
        return sympy.Piecewise((flops, first.dims[-2] < keys), (flops / 2, True)) if flag else flops  # a part of the queries has a mask
    if family.work is Work.CONVOLUTION:
        return 2 * (first if flag else results[0]).numel * sympy.Mul(*second.dims[1:])
    if family.work is Work.RECURRENT:
        return 2 * _steps(results) * sympy.Add(*(weight.numel for weight in _matrices(operands)))
    return 2 * results[0].numel * first.dims[-1]


def _steps(results: tuple[_Tensor, ...]) -> sympy.Expr:
    """Of a recurrent layer, over all sequences."""
    return results[0].numel / results[0].dims[-1]


def _matrices(operands: tuple[_Tensor, ...]) -> list[_Tensor]:
    """Weights of a recurrent layer, two for each layer and direction: for what comes in, and for the state."""
    return [operand for operand in operands[1:] if len(operand.dims) == 2]


def _sides(family: Family, flag: object, operands: tuple[_Tensor, ...], results: tuple[_Tensor, ...]) -> tuple[sympy.Expr, ...] | None:
    """m, n and k of what a contraction multiplies (a convolution as the matmul of its patches); of an attention queries, keys and width."""
    if isinstance(flag, str):
        return None
    first, second = (operands[i] for i in family.product)
    if family.work is Work.ATTENTION:
        return first.dims[-2], second.dims[-2], first.dims[-1]
    if family.work is Work.RECURRENT or not results[0].dims:
        return None
    if family.work is Work.CONVOLUTION:
        channels, patch = second.dims[0], sympy.Mul(*second.dims[1:])
        return (first if flag else results[0]).numel / channels, channels, patch
    if len(second.dims) == 2 and len(first.dims) != 2:  # all rows are multiplied at once
        return first.numel / first.dims[-1], results[0].dims[-1], first.dims[-1]
    return (results[0].dims[-2] if len(results[0].dims) > 1 else sympy.Integer(1)), results[0].dims[-1], first.dims[-1]


def _is_contraction(equation: str) -> bool:
    """Whether an einsum sums over anything; else it multiplies element by element."""
    left, arrow, right = equation.partition("->")
    return not arrow or "." in left or not {letter for letter in left if letter.isalpha()} <= set(right)


def _total(tensors: tuple[_Tensor, ...]) -> sympy.Expr:
    return sympy.Add(*(tensor.num_bytes for tensor in tensors))


def _indices_bytes(results: tuple[_Tensor, ...]) -> sympy.Expr:
    """Of a pool that takes the largest of each window."""
    return 8 * results[0].numel


def _forward_bytes(work: Work, operands: tuple[_Tensor, ...], results: tuple[_Tensor, ...]) -> sympy.Expr:
    match work:
        case Work.VIEW | Work.WINDOW:
            return sympy.Integer(0)
        case Work.ROWS:
            return 2 * _total(results) + _total(operands[1:])
        case Work.POOL:
            return _total(operands) + _total(results) + _indices_bytes(results)
        case Work.LOSS:  # log-softmax reads and writes
            return 2 * operands[0].num_bytes + _total(operands[1:]) + _total(results)
        case _:
            return _total(operands) + _total(results)


def _backward_bytes(
    family: Family, saved: frozenset[int], operands: tuple[_Tensor, ...], results: tuple[_Tensor, ...]
) -> sympy.Expr:
    wanted = tuple(tensor for tensor in operands if tensor.needs_grad)
    incoming = _total(tuple(result for result in results if result.needs_grad))
    match family.work:
        case Work.VIEW:
            return sympy.Integer(0)
        case Work.ADD:
            return sympy.Add(*(incoming + t.num_bytes for t in wanted if t.numel != results[0].numel))
        case Work.ROWS:
            return _total(wanted) + 2 * incoming + _total(operands[1:])
        case Work.LOSS:  # the picked gradient is written, then read with the log-softmax, then the gradient is written
            return 4 * operands[0].num_bytes + _total(operands[1:])
        case Work.POWER:  # torch's pow_backward
            return 6 * operands[0].num_bytes + incoming if wanted else sympy.Integer(0)
        case Work.MATMUL | Work.CONVOLUTION | Work.PRODUCT:
            total = sympy.Integer(0)
            for i, operand in enumerate(operands):
                if operand.needs_grad:
                    others = tuple(operands[j] for j in family.product if i in family.product and j != i and j < len(operands))
                    total += incoming + _total(others) + operand.num_bytes
                    if family.work is Work.PRODUCT and _is_broadcast(operand, results[0]):  # a product of the whole, which is summed
                        total += 2 * incoming
            return total
        case _:
            tensors = (*operands, *results)
            read = _indices_bytes(results) if family.work is Work.POOL else sympy.Integer(0)
            return incoming + sympy.Add(read, *(tensors[i].num_bytes for i in saved)) + _total(wanted)


def _stream(name: str, flag: object, work: Work, operands: tuple[_Tensor, ...], results: tuple[_Tensor, ...]) -> str:
    """Which of `STREAMS` an op is like; attention has samples of its own, and what is like none has no name."""
    if work is Work.ATTENTION:
        return "attention"
    if name == "gelu" and flag:
        return "gelu_tanh"
    if name in CASTS and operands[0].itemsize != results[0].itemsize:
        return "cast"
    if work in (Work.ADD, Work.PRODUCT) and any(_is_broadcast(operand, results[0]) for operand in operands):
        return "broadcast"
    return STREAM_OF.get(name, "")


def _is_broadcast(operand: _Tensor, result: _Tensor) -> bool:
    """Whether it is read several times; a number is not."""
    return bool(operand.numel not in (1, result.numel))


def _groups(name: str, flag: object, operand: _Tensor) -> sympy.Expr:
    """Of how many groups of its operand's elements a norm has statistics."""
    if name == "layer_norm" and isinstance(flag, int):
        return sympy.Mul(*operand.dims[:-flag])
    if name == "group_norm":
        return operand.dims[0] * sympy.sympify(flag)
    if name == "instance_norm":
        return sympy.Mul(*operand.dims[:2])
    return operand.dims[1] if name.endswith(("batch_norm", "batch_norm_legit_functional")) else sympy.Mul(*operand.dims[:-1])


def _hidden_bytes(
    name: str, work: Work, flag: object, operands: tuple[_Tensor, ...], results: tuple[_Tensor, ...]
) -> sympy.Expr:
    """Kept for the backward, but neither operand nor result."""
    match work:
        case Work.DROPOUT:  # one bool per element
            return results[0].numel
        case Work.POOL:
            return _indices_bytes(results)
        case Work.COSINE:
            others = (other for operand, other in zip(operands, reversed(operands), strict=True) if operand.needs_grad)
            return sympy.Add(*(other.num_bytes + 2 * results[0].num_bytes for other in others))
        case Work.NORM:  # mean and reciprocal deviation
            return 8 * _groups(name, flag, operands[0])
        case Work.ATTENTION:  # log-sum-exp per query, and the mask of a part of the queries
            queries, keys = operands[0].dims[-2], operands[1].dims[-2]
            mask = sympy.Piecewise((operands[0].itemsize * queries * keys, queries < keys), (0, True)) if flag else 0
            return 4 * sympy.Mul(*operands[0].dims[:-1]) + mask
        case Work.RECURRENT:  # the gates of every step
            return results[0].itemsize * _steps(results) * sympy.Add(*(weight.dims[0] for weight in _matrices(operands))) / 2
        case _:
            return sympy.Integer(0)


@cache
def _build(
    names: tuple[str, str], flag: object, operands: tuple[_Tensor, ...], results: tuple[_Tensor, ...], letters: sympy.Expr
) -> OpCost:
    family, name = family_of(names), names[1]
    stream = _stream(name, flag, family.work, operands, results)
    zero, work = sympy.Integer(0), family.work
    if work is Work.DROPOUT and not flag:
        work, family = Work.VIEW, Family(Work.VIEW, "", "")
    if name == "pad" and flag:
        family = Family(work, "0", "")
    if isinstance(flag, str) and not _is_contraction(flag):
        work, family = Work.PRODUCT, TABLE["mul"]
    flops = _contraction_flops(family, flag, operands, results, letters) if work in MATMULS else zero
    num_bytes, is_matmul = _forward_bytes(work, operands, results), work in MATMULS
    sides = _sides(family, flag, operands, results) if is_matmul else None
    taken = tuple(operand.num_bytes for operand in operands)
    if not any(result.needs_grad for result in results):
        return OpCost(flops, num_bytes, zero, zero, frozenset(), zero, is_matmul, sides, stream, taken)
    saved = frozenset(_kept(family.kept, operands, results))
    gradients = sum(operands[i].needs_grad for i in family.product if i < len(operands)) if is_matmul else 0
    # five matmuls of an attention for two, since scores are computed again; Dao et al. 2022
    backward_flops = flops * 5 / 2 if work is Work.ATTENTION else flops * gradients
    backward_num_bytes = _backward_bytes(family, saved, operands, results)
    hidden = _hidden_bytes(name, work, flag, operands, results)
    return OpCost(flops, num_bytes, backward_flops, backward_num_bytes, saved, hidden, is_matmul, sides, stream, taken, gradients)


@cache
def _symbolic(
    names: tuple[str, str], flag: object, terms: tuple[object, ...], count: int, traits: tuple[tuple[int, bool], ...]
) -> OpCost:
    """The cost of all calls of ops with these names whose rules have these terms, the first ``count`` of them operands, and whose tensors
    these traits."""
    tensors = tuple(
        _Tensor(tuple(sympy.Mul(*map(symbol, dim)) for dim in term), *trait)  # type: ignore[attr-defined]
        for term, trait in zip(terms, traits, strict=True)
    )
    letters = sympy.Mul(*{symbol for tensor in tensors for dim in tensor.dims for symbol in dim.free_symbols})
    return _build(names, flag, tensors[:count], tensors[count:], letters)


def _einsum_numel(equation: str, operands: tuple[TensorSpec, ...]) -> int:
    """Product of all letters of an einsum without ellipsis."""
    inputs = equation.replace(" ", "").partition("->")[0].split(",")
    sizes = {
        letter: size
        for term, spec in zip(inputs, operands, strict=True)
        for letter, size in zip(term, spec.shape, strict=False)
    }
    numel = 1
    for size in sizes.values():
        numel *= size
    return numel


def op_cost(call: Call, rule: Rule | None) -> OpCost:
    """Cost of a call under its rule, in the local sizes of the rule's factors; without a rule in numbers, from the call's shapes."""
    names, operands, flag = names_of(call.target), call.operands, _flag(call)
    traits = tuple((spec.dtype.itemsize, spec.requires_grad) for spec in (*operands, *call.results))
    if rule is not None:
        return _symbolic(names, flag, (*rule.operands, *rule.results), len(rule.operands), traits)
    tensors = tuple(
        _Tensor(tuple(map(sympy.Integer, spec.shape)), *trait)
        for spec, trait in zip((*operands, *call.results), traits, strict=True)
    )
    letters = sympy.Integer(_einsum_numel(flag, operands) if isinstance(flag, str) else 0)
    return _build(names, flag, tensors[: len(operands)], tensors[len(operands) :], letters)


def node_cost(node: fx.Node, rule: Rule | None) -> OpCost:
    """`op_cost` of a node of a normal graph, kept with it as long as it is what it was."""
    known = node.meta.get("cost")
    of = node.target, node.args, node.kwargs, rule, specs_of(node), tuple(map(value_spec, operands_of(node)))
    if known is None or known[0] != of:
        known = node.meta["cost"] = of, op_cost(call_of(node), rule)
    cost: OpCost = known[1]
    return cost


def summed_bytes(node: fx.Node, cost: OpCost) -> sympy.Expr:
    """Bytes through which the backward adds up gradients of operands that are read several times, with two reads and a write each time. All
    readers have an equal share in them, so that equal blocks cost the same, whoever reads what they give."""
    if not any(spec.requires_grad for spec in specs_of(node)):
        return sympy.Integer(0)
    counts = [_gradients(value) for value in operands_of(node)]
    return sympy.Add(*(sympy.Rational(3 * (n - 1), n) * num_bytes for n, num_bytes in zip(counts, cost.taken, strict=True) if n > 1))


def _gradients(value: Value) -> int:
    """How many gradients a value gets: one of each time that an op with a gradient reads it."""
    if not value_spec(value).requires_grad:
        return 0
    users = [reader for user in value.node.users for reader in (user.users if is_getitem(user) else [user]) if is_call(reader)]
    readers = [reader for reader in dict.fromkeys(users) if any(spec.requires_grad for spec in specs_of(reader))]
    return sum(operands_of(reader).count(value) for reader in readers)


@cache
def _compiled(expr: sympy.Expr) -> tuple[tuple[str, ...], object]:
    symbols = sorted(expr.free_symbols, key=lambda symbol: str(symbol.name))
    function = sympy.lambdify(symbols, expr, [{"numpy": np}], NumPyPrinter(), docstring_limit=0)  # "numpy" would import all of it
    return tuple(symbol.name for symbol in symbols), function


def evaluate(expr: sympy.Expr, sizes: Mapping[str, ArrayLike]) -> np.ndarray:
    """The value of an expression of `OpCost` for sizes of factors; arrays give arrays."""
    if not getattr(expr, "free_symbols", ()):
        return np.asarray(float(expr))
    names, function = _compiled(expr)
    missing = [name for name in names if name not in sizes]
    assert not missing, f"{expr} needs sizes of {missing}, got {sorted(sizes)}"
    return np.asarray(function(*(np.asarray(sizes[name], dtype=float) for name in names)))  # type: ignore[operator]
