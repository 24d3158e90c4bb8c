"""Ops that draw random numbers -> ``dropout`` and ``rand_like``, whose numbers follow the layout (`autopar.ops.random`).

Every other op is said by these two, element by element: a mask compares numbers, a normal one is the inverse of the error function, an
exponential one a logarithm. Numbers are those of torch in distribution and not in value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.graph import is_getitem, value_of, value_spec
from autopar.passes.emitter import Emitter, argument
from autopar.rules.recurrent import LAYERS, has_dropout
from autopar.rules.registry import TensorSpec

aten = torch.ops.aten

DRAWN = frozenset({aten.dropout.default, aten.rand_like.default})
"""Ops of normal graphs that draw random numbers."""
SELU_ALPHA = 1.7580993408473766
"""What units of SELU tend to, but for the sign; `alpha_dropout` puts it where dropout puts zero (Klambauer et al. 2017)."""


def draws(node: fx.Node) -> bool:
    if node.target in LAYERS and not has_dropout(node.args):
        return False
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def expand_attention_dropout(module: fx.GraphModule) -> fx.GraphModule:
    """Attention with dropout becomes matmul, softmax, dropout, matmul: the fused kernels draw their masks by rank, not by element.

    Under a mask it is the softmax that gives zeros to a query that may look at no key, as in torch.
    """
    for node in list(module.graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        query, key, value = node.args[:3]
        mask, dropout = argument(node, 3, "attn_mask", None), argument(node, 4, "dropout_p", 0.0)
        is_causal = argument(node, 5, "is_causal", False)
        if dropout == 0.0:
            continue
        emitter = Emitter(module, node)
        query_spec, key_spec = value_spec(value_of(query)), value_spec(value_of(key))
        groups = query_spec.shape[-3] // key_spec.shape[-3] if node.kwargs.get("enable_gqa") else 1
        if groups > 1:
            heads = len(key_spec.shape) - 3
            key, value = (emitter(aten.repeat_interleave.self_int, x, groups, heads) for x in (key, value))
        scale = node.kwargs.get("scale") or query_spec.shape[-1] ** -0.5
        scores = emitter(aten.matmul.default, emitter(aten.mul.Tensor, query, scale), emitter(aten.transpose.int, key, -2, -1))
        softmax = aten.softmax.int if mask is None else aten._safe_softmax.default
        if is_causal:
            ones = emitter(aten.ones.default, [query_spec.shape[-2], key_spec.shape[-2]], dtype=torch.bool)
            mask = emitter(aten.tril.default, ones)
        if mask is not None and value_spec(value_of(mask)).dtype is torch.bool:
            scores = emitter(aten.masked_fill.Scalar, scores, emitter(aten.logical_not.default, mask), float("-inf"))
        elif mask is not None:
            scores = emitter(aten.add.Tensor, scores, mask)
        weights = emitter(aten.dropout.default, emitter(softmax, scores, -1), dropout, True)
        emitter.replace_by(emitter(aten.matmul.default, weights, value))
    return module


def unify_randomness(module: fx.GraphModule) -> fx.GraphModule:
    """What draws random numbers becomes `DRAWN`.

    Raises:
        CaptureError: an op that is not among those that can be said so, which would draw other numbers on every rank.
    """
    for node in list(module.graph.nodes):
        if not draws(node) or node.target in (aten.dropout.default, aten.scaled_dot_product_attention.default):
            continue
        form, users = _FORMS.get(node.target), list(node.users)
        is_one = not any(is_getitem(user) and user.args[1] != 0 for user in users)
        if form is None or not is_one:
            raise CaptureError(
                f"{node.target} draws random numbers ({node.meta.get('line', '')}), which would differ between ranks; supported are "
                "dropout of every kind, rand, randn, randint, bernoulli, uniform, normal and exponential numbers: say it with them, or "
                "draw the numbers outside of the model and pass them in"
            )
        emitter = Emitter(module, node)
        made = form(_Draw(emitter), _named(node))
        for user in users:
            if is_getitem(user):
                user.replace_all_uses_with(made)
                module.graph.erase_node(user)
        emitter.replace_by(made)
    return module


def _named(node: fx.Node) -> Mapping[str, Any]:
    """All arguments by the names of the op's schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return {entry.name: argument(node, i, entry.name, entry.default_value) for i, entry in enumerate(schema)}


class _Draw:
    """Emits random tensors."""

    def __init__(self, emitter: Emitter) -> None:
        self.emit = emitter

    def blank(self, size: list[int], dtype: torch.dtype) -> fx.Node:
        """Of which only shape and dtype are read; the ranks never make it."""
        return self.emit(aten.empty.memory_format, size, dtype=dtype)

    def uniform(self, like: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        """In (0, 1), by default in float32, or in float64 where ``like`` is so."""
        dtype = dtype or _wide(_spec(like).dtype)
        if dtype.is_complex:
            return self._in_parts(self.uniform, like, dtype)
        return self.emit(aten.rand_like.default, like, dtype=dtype)

    def normal(self, like: fx.Node, dtype: torch.dtype) -> fx.Node:
        if dtype.is_complex:
            return self.emit(aten.mul.Tensor, self._in_parts(self.normal, like, dtype), math.sqrt(0.5))
        number = self.uniform(like, _wide(dtype))
        centred = self.emit(aten.sub.Tensor, self.emit(aten.mul.Tensor, number, 2.0), 1.0)
        return self.cast(self.emit(aten.mul.Tensor, self.emit(aten.erfinv.default, centred), math.sqrt(2.0)), dtype)

    def _in_parts(self, draw: Callable[[fx.Node, torch.dtype], fx.Node], like: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Complex numbers of which both parts are drawn."""
        part = dtype.to_real()
        return self.emit(aten.complex.default, *(draw(self.blank(list(_spec(like).shape), part), part) for _ in range(2)))

    def integer(self, like: fx.Node, low: int, high: int, dtype: torch.dtype) -> fx.Node:
        number = self.emit(aten.mul.Tensor, self.uniform(like, torch.float64), float(high - low))
        return self.cast(self.emit(aten.add.Tensor, self.emit(aten.floor.default, number), float(low)), dtype)

    def mask(self, like: fx.Node, probability: object, dtype: torch.dtype) -> fx.Node:
        """One with the given probability, else zero."""
        compare = aten.lt.Tensor if isinstance(probability, fx.Node) else aten.lt.Scalar
        return self.cast(self.emit(compare, self.uniform(like), probability), dtype)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if _spec(x).dtype == dtype else self.emit(aten.to.dtype, x, dtype)

    def scaled(self, x: fx.Node, factor: object, addend: object) -> fx.Node:
        return self.emit(aten.add.Tensor, self.emit(aten.mul.Tensor, x, factor), addend)

    def channels(self, x: fx.Node) -> fx.Node:
        """Blank, of one element for each channel of each sample of ``x`` [samples, channels, ...]."""
        spec = _spec(x)
        return self.blank([*spec.shape[:2], *(1 for _ in spec.shape[2:])], spec.dtype)


def _spec(node: fx.Node) -> TensorSpec:
    return value_spec(value_of(node))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dtype(given: torch.dtype | None, like: fx.Node | None = None) -> torch.dtype:
    if given is not None:
        return given
    return torch.get_default_dtype() if like is None else _spec(like).dtype


def _native_dropout(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    x, p = given["input"], given["p"]
    return draw.emit(aten.dropout.default, x, p, True) if p > 0 and given["train"] is not False else x


def _feature_dropout(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    x, p = given["input"], given["p"]
    if not given["train"] or p == 0:
        return x  # type: ignore[no-any-return]
    kept = draw.mask(draw.channels(x), 1 - p, _spec(x).dtype)
    return draw.emit(aten.mul.Tensor, x, draw.emit(aten.div.Tensor, kept, 1 - p) if p < 1 else kept)


def _alpha_dropout(draw: _Draw, given: Mapping[str, Any], *, whole_channels: bool = False) -> fx.Node:
    """x where it is kept, -alpha elsewhere, scaled and moved so that mean and variance of units of SELU stay."""
    x, p = given["input"], given["p"]
    if not given["train"] or p == 0:
        return x  # type: ignore[no-any-return]
    if p == 1:
        return draw.emit(aten.mul.Tensor, x, 0.0)
    kept = draw.mask(draw.channels(x) if whole_channels else x, 1 - p, _spec(x).dtype)
    scale = ((SELU_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    moved = draw.scaled(kept, SELU_ALPHA * scale, SELU_ALPHA * scale * (p - 1))
    return draw.emit(aten.add.Tensor, draw.emit(aten.mul.Tensor, x, draw.emit(aten.mul.Tensor, kept, scale)), moved)


def _feature_alpha_dropout(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    return _alpha_dropout(draw, given, whole_channels=True)


def _rrelu(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    x, lower, upper = given["self"], given["lower"], given["upper"]
    if not given["training"]:
        return draw.emit(aten.leaky_relu.default, x, (lower + upper) / 2)
    slope = draw.scaled(draw.uniform(x, _spec(x).dtype), upper - lower, lower)
    return draw.emit(aten.where.self, draw.emit(aten.gt.Scalar, x, 0), x, draw.emit(aten.mul.Tensor, x, slope))


def _bernoulli(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    x = given["self"]
    return draw.mask(x, given.get("p", x), _spec(x).dtype)


def _rand(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    dtype = _dtype(given["dtype"])
    return draw.uniform(draw.blank(given["size"], dtype), dtype)


def _randn(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    dtype = _dtype(given["dtype"])
    return draw.normal(draw.blank(given["size"], dtype), dtype)


def _randint(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    dtype = given["dtype"] or torch.int64
    return draw.integer(draw.blank(given["size"], dtype), given.get("low", 0), given["high"], dtype)


def _rand_like(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    return draw.uniform(given["self"], _dtype(given["dtype"], given["self"]))


def _randn_like(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    return draw.normal(given["self"], _dtype(given["dtype"], given["self"]))


def _randint_like(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    x = given["self"]
    return draw.integer(x, given.get("low", 0), given["high"], _dtype(given["dtype"], x))


def _uniform(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    x, low, high = given["self"], given["from"], given["to"]
    return draw.scaled(draw.uniform(x, _spec(x).dtype), high - low, low)


def _normal(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    x = given["self"]
    return draw.scaled(draw.normal(x, _spec(x).dtype), given["std"], given["mean"])


def _normal_of(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    """No gradient goes to the mean and the deviation, as in torch."""
    mean, std = (draw.emit(aten.detach.default, x) if isinstance(x, fx.Node) else x for x in (given["mean"], given["std"]))
    tensors = [x for x in (mean, std) if isinstance(x, fx.Node)]
    shape = torch.broadcast_shapes(*(_spec(x).shape for x in tensors))
    like = next((x for x in tensors if _spec(x).shape == tuple(shape)), None)
    dtype = _spec(tensors[0]).dtype
    return draw.scaled(draw.normal(draw.blank(list(shape), dtype) if like is None else like, dtype), std, mean)


def _normal_anew(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    return draw.scaled(_randn(draw, given), given["std"], given["mean"])


def _exponential(draw: _Draw, given: Mapping[str, Any]) -> fx.Node:
    x = given["self"]
    number = draw.emit(aten.log.default, draw.uniform(x))
    return draw.cast(draw.emit(aten.mul.Tensor, number, -1.0 / given["lambd"]), _spec(x).dtype)


_FORMS: Mapping[object, Callable[[_Draw, Mapping[str, Any]], fx.Node]] = {
    aten.native_dropout.default: _native_dropout,
    aten.feature_dropout.default: _feature_dropout,
    aten.alpha_dropout.default: _alpha_dropout,
    aten.feature_alpha_dropout.default: _feature_alpha_dropout,
    aten.rrelu.default: _rrelu,
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.rand.default: _rand,
    aten.randn.default: _randn,
    aten.randint.default: _randint,
    aten.randint.low: _randint,
    aten.rand_like.default: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like,
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _normal,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.normal.float_float: _normal_anew,
    aten.exponential.default: _exponential,
}
