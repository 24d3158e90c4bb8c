"""Small calls of every op in the table, for the checker: each row is ops, then arguments with tensors to be drawn.

Sizes are even, so that every dim can be halved; some are multiples of 4, which the checker splits in two factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.rules.registry import Call, Op, TensorSpec

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Draw:
    """A tensor to be drawn at random.

    ``kind`` is ``real`` (float64 around 0), ``complex``, ``positive``, ``above`` (1), ``unit`` (between 0 and 1), ``buffer`` (positive,
    without gradient), ``special`` (with infinities), ``index`` (integers below ``high``), ``distinct`` (different such), ``sorted``
    (such in order), ``ends`` (and then ``high``), ``definite`` (such matrices), ``bool``, ``first`` (only the first is true) or ``rest``
    (all but the first).
    """

    shape: tuple[int, ...]
    kind: str = "real"
    high: int = 0

    def __str__(self) -> str:
        return f"{self.kind if not self.high else f'below{self.high}'}{list(self.shape)}"

    def draw(self, random: torch.Generator) -> torch.Tensor:
        """The tensor; it requires a gradient if it is of floats and not a buffer."""
        tensor = self._values(random)
        return tensor.requires_grad_((tensor.is_floating_point() or tensor.is_complex()) and self.kind != "buffer")

    def _values(self, random: torch.Generator) -> torch.Tensor:
        if self.kind == "bool":
            return torch.rand(self.shape, generator=random) < 0.5
        if self.kind == "distinct":
            return torch.randperm(self.high, generator=random)[: math.prod(self.shape)].view(self.shape)
        if self.kind == "index":
            return torch.randint(self.high, self.shape, generator=random)
        if self.kind == "sorted":
            return torch.randint(self.high, self.shape, generator=random).sort().values
        if self.kind == "ends":
            starts = torch.randint(self.high + 1, self.shape, generator=random).sort().values
            return torch.cat([starts[1:], torch.tensor([self.high])])
        if self.kind == "special":  # half are infinite and a quarter are not numbers
            return torch.tensor([1.0, torch.inf, -torch.inf, torch.nan]).double()[torch.randint(4, self.shape, generator=random)]
        if self.kind in ("first", "rest"):  # only the first is true, or all the rest
            is_first = (torch.arange(math.prod(self.shape)) == 0).view(self.shape)
            return is_first if self.kind == "first" else ~is_first
        if self.kind == "definite":
            x = torch.randn(self.shape, generator=random, dtype=torch.float64)
            return x @ x.mT + torch.eye(self.shape[-1])
        if self.kind == "complex":
            return torch.randn(self.shape, generator=random, dtype=torch.complex128)
        x = torch.rand(self.shape, generator=random, dtype=torch.float64)
        if self.kind in ("positive", "buffer"):
            return x + 0.5
        if self.kind == "above":
            return x + 1.5
        if self.kind == "unit":
            return x * 0.8 + 0.1
        return x * 4 - 2


def real(*shape: int) -> Draw:
    return Draw(shape)


def imaginary(*shape: int) -> Draw:
    return Draw(shape, "complex")


def positive(*shape: int) -> Draw:
    return Draw(shape, "positive")


def unit(*shape: int) -> Draw:
    return Draw(shape, "unit")


def below(high: int, *shape: int) -> Draw:
    return Draw(shape, "index", high)


def boolean(*shape: int) -> Draw:
    return Draw(shape, "bool")


Rows = Sequence[tuple[Any, ...]]
"""Names of ops, then for each call its arguments; a dict at the end holds the named ones."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One call with tensors to be drawn."""

    op: Op
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = [*map(_show, self.args), *(f"{name}={_show(value)}" for name, value in self.kwargs.items())]
        return ", ".join(shown)

    def draw(self, seed: int = 0) -> tuple[tuple[object, ...], dict[str, object]]:
        """Arguments with tensors."""
        random = torch.Generator().manual_seed(seed)
        args, kwargs = pytree.tree_map_only(Draw, lambda drawn: drawn.draw(random), (self.args, self.kwargs))
        return args, kwargs

    @property
    def call(self) -> Call:
        """The call on specs, results found by running it."""
        args, kwargs = self.draw()
        results = self.op(*args, **kwargs)
        specs = tuple(map(_spec, results if isinstance(results, (tuple, list)) else (results,)))
        args, kwargs = pytree.tree_map_only(torch.Tensor, _spec, (args, kwargs))
        return Call(self.op, args, kwargs, specs)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _show(value: object) -> str:
    return "[" + ", ".join(map(_show, value)) + "]" if isinstance(value, (list, tuple)) else str(value)


def samples() -> Iterator[Sample]:
    """All sample calls."""
    for ops, *calls in (*_POINTWISE, *_PRODUCTS, *_VIEWS, *_BLOCKS, *_REDUCTIONS, *_LAYERS, *_LOOKUPS, *_LOSSES, *_CREATED):
        for op in ops.split():
            name, _, overload = op.partition(".")
            for args in calls:
                kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
                positional = args[: len(args) - bool(kwargs)]
                yield Sample(getattr(getattr(aten, name), overload or "default"), positional, kwargs)


_BROADCAST = ((real(4, 6), real(4, 6)), (real(4, 6), real(6)), (real(4, 1), real(2, 1, 6)))
_INTEGERS = ((below(8, 4, 6), below(8, 6)),)
_DOUBLE = torch.float64

_POINTWISE: Rows = (
    ("""gelu relu relu6 silu tanh sigmoid log_sigmoid leaky_relu elu selu celu hardtanh hardswish hardsigmoid softplus mish
        softshrink exp exp2 expm1 square abs sin cos tan atan erf sign floor ceil round trunc neg clone contiguous
        detach alias lift_fresh_copy positive zeros_like ones_like""", (real(4, 6),)),
    ("gelu", (real(2, 4, 6), {"approximate": "tanh"})),
    ("isnan isinf isfinite nan_to_num", (Draw((4, 6), "special"),)),
    ("log log2 log1p sqrt rsqrt reciprocal", (positive(4, 6),)),
    ("logit erfinv asin acos atanh", (unit(4, 6),)),
    ("hardshrink sinh cosh asinh erfc sinc sgn frac signbit angle deg2rad rad2deg real conj conj_physical resolve_conj", (real(4, 6),)),
    ("log10 lgamma digamma", (positive(4, 6),)),
    ("acosh", (Draw((4, 6), "above"),)),
    ("isposinf isneginf", (Draw((4, 6), "special"),)),
    ("round.decimals", (real(4, 6), {"decimals": 1})),
    ("real imag conj _conj conj_physical resolve_conj abs angle sgn neg exp", (imaginary(4, 6),)),
    ("complex", (real(4, 6), real(4, 6)), (real(4, 6), real(6))),
    ("polar", (positive(4, 6), real(6))),
    ("mul.Tensor add.Tensor sub.Tensor", (imaginary(4, 6), imaginary(6)), (real(4, 6), imaginary(6))),
    ("div.Tensor", (imaginary(4, 6), positive(6))),
    ("prelu", (real(4, 6, 2), positive(6)), (real(4, 6), real(1)), (real(6), real(1))),
    ("threshold", (real(4, 6), 0.5, 0.0)),
    ("pow.Tensor_Scalar", (real(4, 6), 3)),
    ("pow.Scalar", (2.0, real(4, 6))),
    ("clamp", (real(4, 6), -1.0, 1.0)),
    ("clamp_min clamp_max", (real(4, 6), 0.5)),
    ("add.Scalar sub.Scalar rsub.Scalar mul.Scalar div.Scalar remainder.Scalar fmod.Scalar", (real(4, 6), 0.7)),
    ("div.Scalar_mode", (real(4, 6), 3, {"rounding_mode": "floor"})),
    ("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", (below(4, 4, 6), 2)),
    ("lt.Scalar le.Scalar gt.Scalar ge.Scalar", (real(4, 6), 0.5)),
    ("logical_not bitwise_not", (boolean(4, 6),)),
    ("bitwise_and.Scalar bitwise_or.Scalar", (below(8, 4, 6), 3)),
    ("eq.Tensor ne.Tensor", *_INTEGERS, (below(2, 4, 1), below(2, 2, 1, 6))),
    ("lt.Tensor le.Tensor gt.Tensor ge.Tensor maximum minimum", *_BROADCAST, *_INTEGERS),
    ("fmax fmin clamp_min.Tensor clamp_max.Tensor hypot logaddexp logaddexp2 copysign.Tensor", *_BROADCAST[:2]),
    ("isclose", (below(2, 4, 1), below(2, 2, 1, 6))),
    ("float_power.Tensor_Tensor true_divide.Tensor xlogy.Tensor", (positive(4, 6), positive(6))),
    ("ldexp.Tensor", (real(4, 6), below(3, 6))),
    ("logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor "
     "__xor__.Tensor", (boolean(4, 6), boolean(6)), (boolean(4, 1), boolean(2, 1, 6))),
    ("clamp.Tensor", (real(4, 6), real(6), real(4, 6))),
    ("pow.Tensor_Tensor atan2 remainder.Tensor", (positive(4, 6), positive(6))),
    ("fmod.Tensor", (real(4, 6), positive(6))),
    ("floor_divide", (below(8, 4, 6), 3)),
    ("div.Tensor_mode", (real(4, 6), positive(6), {"rounding_mode": "trunc"})),
    ("max.other min.other", *_BROADCAST[:2]),
    ("native_dropout", (real(4, 6), 0.0, True)),
    ("copy", (Draw((4, 6), "buffer"), Draw((6,), "buffer"))),
    ("fill.Tensor", (real(4, 6), real())),
    ("dropout", (real(4, 6), 0.0, True), (real(4, 6), 0.5, False)),
    ("full_like", (real(4, 6), 2.0)),
    ("empty_like", (below(1, 4, 0),)),
    ("rand_like", (real(4, 0),)),
    ("fill.Scalar", (real(4, 6), 2.0)),
    ("add.Tensor sub.Tensor rsub.Tensor mul.Tensor", *_BROADCAST, *_INTEGERS),
    ("mul.Tensor", (boolean(4, 6), real(4, 6)), (real(4, 6), 3.0), (real(), real(4, 6))),
    ("add.Tensor sub.Tensor", (real(4, 6), real(6), {"alpha": 3}), (real(4, 6), 2)),
    ("add.Tensor", (boolean(4, 6), real(4, 6))),
    ("lerp.Scalar", (real(4, 6), real(6), 0.3)),
    ("lerp.Tensor", (real(4, 6), real(6), unit(4, 6)), (real(4, 6), real(4, 6), unit(6))),
    ("addcdiv", (real(4, 6), real(6), positive(4, 1))),
    ("div.Tensor", (real(4, 6), positive(6)), (real(4, 6), 4), (real(), positive())),
    ("where.self", (boolean(4, 6), real(4, 6), real(6)), (boolean(4, 1), real(6), real()), (boolean(6), real(4, 6), real(4, 6))),
    ("where.ScalarOther", (boolean(4, 6), real(4, 6), 0.0), (boolean(4, 6), real(6), 1.0)),
    ("where.ScalarSelf", (boolean(4, 6), 0.0, real(6)), (boolean(4, 6), 1.0, real(4, 6))),
    ("where.Scalar", (boolean(4, 6), 1.0, 0.0)),
    ("masked_fill.Scalar", (real(4, 6), boolean(6), 0.0), (real(4, 6), boolean(4, 6), 2.0)),
    ("masked_fill.Tensor", (real(4, 6), boolean(4, 6), real())),
    ("broadcast_tensors", ([real(4, 6), real(6)],), ([real(4, 6), real(4, 6)],)),
    ("addcmul", (real(4, 6), real(6), real(4, 1)),),
    ("to.dtype", (real(4, 6), _DOUBLE), (real(4, 6), torch.int64), (boolean(4, 6), _DOUBLE)),
    ("to.dtype_layout _to_copy", (real(4, 6), {"dtype": _DOUBLE})),
    ("to.device", (real(4, 6), "cpu", _DOUBLE)),
    ("to.other type_as", (real(4, 6), real(2)),),
)  # fmt: skip

_PRODUCTS: Rows = (
    ("linear", (real(4, 6, 2), real(8, 2)), (real(6, 4), real(8, 4), real(8)), (real(6), real(4, 6))),
    ("mm", (real(4, 6), real(6, 8))),
    ("bmm", (real(2, 4, 6), real(2, 6, 8))),
    ("mv", (real(4, 6), real(6))),
    ("dot vdot", (real(8), real(8))),
    ("outer", (real(4), real(6))),
    ("matmul", (real(4, 6), real(6, 8)), (real(2, 4, 6), real(6, 8)), (real(2, 6, 2, 4), real(2, 6, 4, 2)),
     (real(2, 6, 2, 4), real(6, 4, 2)), (real(2, 1, 2, 4), real(6, 4, 2)), (real(6), real(2, 6, 4)), (real(2, 4, 6), real(6)),
     (real(6), real(6))),
    ("addmm", (real(8), real(4, 6), real(6, 8)), (real(4, 8), real(4, 6), real(6, 8))),
    ("baddbmm", (real(2, 4, 8), real(2, 4, 6), real(2, 6, 8)), (real(4, 1), real(2, 4, 6), real(2, 6, 8))),
    ("einsum", ("bij,bjk->bik", [real(2, 4, 6), real(2, 6, 8)]), ("i,j->ij", [real(4), real(6)]),
     ("ii->i", [real(4, 4)]), ("bhd->bd", [real(2, 4, 6)]), ("...i->...", [real(4, 6)])),
    ("scaled_dot_product_attention", (real(2, 6, 4, 2), real(2, 6, 6, 2), real(2, 6, 6, 4)),
     (real(2, 4, 2), real(2, 4, 2), real(2, 4, 2), None, 0.0, True),
     (real(2, 6, 2, 2), real(2, 6, 6, 2), real(2, 6, 6, 2), boolean(2, 1, 2, 6)),
     (real(2, 6, 2, 2), real(2, 6, 2, 2), real(2, 6, 2, 2), real(2, 2), {"scale": 0.3}),
     (real(2, 2, 2, 2), real(2, 2, 2, 2), real(2, 2, 2, 2), real(2, 1, 1, 2)),
     (real(2, 4, 2, 2), real(2, 2, 2, 2), real(2, 2, 2, 2), {"enable_gqa": True, "is_causal": True}),
     (real(2, 4, 2, 2), real(2, 2, 2, 2), real(2, 2, 2, 2), real(2, 4, 2, 2), {"enable_gqa": True}),
     (real(2, 4, 2, 2), real(2, 1, 2, 2), real(2, 1, 2, 2), {"enable_gqa": True})),
)  # fmt: skip

_VIEWS: Rows = (
    ("view reshape _unsafe_view", (real(4, 6), [24]), (real(24), [4, 6]), (real(2, 4, 6), [8, 6]), (real(4, 6, 2), [4, 12]),
     (real(6, 4), [3, 8]), (real(6, 4), [4, 6]), (real(4, 6), [2, 2, 6, 1]), (real(2, 3, 4), [4, 6]), (real(), [1, 1])),
    ("flatten.using_ints", (real(2, 4, 6), 1), (real(2, 4, 6), 0, 1)),
    ("unflatten.int", (real(2, 12), -1, [6, 2]), (real(12, 2), 0, [2, -1])),
    ("squeeze", (real(2, 1, 6),)),
    ("squeeze.dim", (real(2, 1, 6), 1), (real(2, 6), 0)),
    ("squeeze.dims", (real(2, 1, 6), [0, 1])),
    ("unsqueeze", (real(2, 6), 1), (real(2, 6), -1)),
    ("transpose.int swapaxes", (real(2, 4, 6), 1, -1)),
    ("t numpy_T", (real(4, 6),)),
    ("t", (real(4),)),
    ("mT", (real(2, 4, 6),)),
    ("permute", (real(2, 4, 6), [2, 0, -2])),
    ("movedim.int", (real(2, 4, 6), 0, -1)),
    ("movedim.intlist", (real(2, 4, 6), [0, 1], [2, 0])),
    ("expand broadcast_to", (real(4, 1, 6), [2, 4, 8, 6]), (real(4, 1), [-1, 2]), (real(4, 6), [4, 6])),
    ("expand_as", (real(4, 1), real(2, 4, 6))),
    ("view_as_complex", (real(4, 6, 2),)),
    ("view_as_real", (imaginary(4, 6),)),
    ("diagonal", (real(4, 4, 6),), (real(4, 2, 6), 1, 0, -1)),
    ("diag_embed", (real(4, 6),), (real(2, 4), 1, 0, 2)),
    ("pixel_shuffle", (real(2, 16, 4, 6), 2), (real(8, 2, 2), 2)),
    ("pixel_unshuffle", (real(2, 4, 4, 8), 2)),
    ("channel_shuffle", (real(2, 8, 4), 2), (real(2, 12, 2, 2), 3)),
    ("unfold", (real(4, 6, 2), 1, 2, 2), (real(4, 6), -1, 3, 1)),
)  # fmt: skip

_BLOCKS: Rows = (
    ("slice.Tensor", (real(4, 12), 1, 4, 8), (real(4, 12), 1, 0, 4), (real(4, 12), 0, 0, 4), (real(4, 12), -1, 8, 10**18),
     (real(4, 6), 1, 1, 6), (real(4, 12), 1, 0, 8), (real(4, 12), 1, -4, None), (real(4, 12), 1, 0, 12, 2),
     (real(4, 12), 1, 1, 12, 3), (real(4, 12), 1, 1, 8, 2)),
    ("narrow", (real(4, 12), 1, 4, 4), (real(4, 12), 1, -8, 4), (real(6, 4), 0, 1, 2)),
    ("split.Tensor", (real(4, 12), 4, 1), (real(4, 12), 6, -1), (real(10, 2), 4)),
    ("split.sizes split_with_sizes", (real(4, 12), [4, 4, 4], 1), (real(2, 16), [8, 4, 4], 1), (real(6, 2), [1, 3, 2])),
    ("chunk", (real(4, 12), 3, 1), (real(10, 2), 4), (real(4, 12), 2, -1)),
    ("cat concat", ([real(4, 6), real(4, 6)], 1), ([real(8, 6), real(4, 6), real(4, 6)],), ([real(4, 6), real(4, 1)], -1)),
    ("cat", ([Draw((0,)), real(4, 6)], 1),),
    ("stack", ([real(4, 6), real(4, 6)],), ([real(4, 6), real(4, 6)], -1)),
    ("unbind.int", (real(4, 6),), (real(4, 2), 1)),
    ("select.int", (real(4, 6), 0, 1), (real(4, 6), 1, -1)),
    ("pad", (real(4, 6), [1, 1]), (real(4, 6), [0, 2], "constant", 3.0), (real(2, 4, 6), [1, 1], "reflect"), (real(4, 6), [0, 0, 2, 0])),
    ("constant_pad_nd", (real(4, 6), [1, 1, 0, 0]), (real(4, 6), [1, 0], 2.0)),
    ("repeat tile", (real(4, 6), [2, 2]), (real(4, 6), [2, 1, 4]), (real(4, 1), [1, 6])),
    ("tile", (real(2, 4, 6), [2, 4]), (real(4, 6), [4])),
    ("repeat_interleave.self_int", (real(2, 4, 6), 2, 1), (real(4, 6), 4, 0, {"output_size": 16}), (real(4, 6), 2), (real(), 4)),
    ("slice_scatter", (real(4, 6), real(4, 2), 1, 2, 4), (real(4, 6), real(2, 6), 0, 1, 3)),
    ("select_scatter", (real(4, 6), real(4), 1, 2), (real(4, 6), real(6), 0, 1)),
    ("glu", (real(4, 8),), (real(8, 6), 0)),
)  # fmt: skip

_REDUCTIONS: Rows = (
    ("sum", (real(4, 6),), (boolean(4, 6),), (below(8, 4, 6),), (real(4, 6), {"dtype": _DOUBLE})),
    ("sum.dim_IntList", (real(2, 4, 6), [1]), (real(2, 4, 6), [0, -1], True), (real(4, 6), None), (real(4, 6), [])),
    ("mean", (real(4, 6),)),
    ("mean.dim", (real(2, 4, 6), [-1], True), (real(2, 4, 6), [0, 1])),
    ("var.dim std.dim var_mean.dim std_mean.dim", (real(2, 4, 6), [1]), (real(2, 4, 6), [0, -1], True, True)),
    ("var std var_mean std_mean median nanmedian", (real(4, 6),)),
    ("median.dim nanmedian.dim", (real(4, 6), 1), (real(4, 6), 0, True)),
    ("kthvalue", (real(4, 6), 2), (real(4, 6), 2, 0, True)),
    ("count_nonzero.dim_IntList", (below(2, 4, 6), [1])),
    ("cosine_similarity", (real(4, 6), real(4, 6)), (real(2, 4, 6), real(4, 6), -1), (real(2, 1, 6), real(2, 4, 6), 2)),
    ("pairwise_distance", (real(4, 6), real(4, 6)), (real(2, 4, 6), real(4, 6), 2.0, 1e-6, True)),
    ("cdist", (real(2, 4, 6), real(2, 8, 6)), (real(4, 6), real(8, 6))),
    ("linalg_cross", (real(4, 3), real(4, 3)), (real(2, 3, 4), real(1, 3, 4), {"dim": 1})),
    ("amax amin", (real(2, 4, 6), [1]), (real(2, 4, 6), [0, -1], True), (real(4, 6),)),
    ("max.dim min.dim", (real(4, 6), 1), (real(4, 6), 0, True)),
    ("argmax argmin", (real(4, 6), -1), (real(6, 8),), (real(4, 6), 0, True)),
    ("any.dim", (Draw((6, 4), "first"), 1, True), (Draw((4, 6), "first"), 0)),
    ("all.dim", (Draw((6, 4), "rest"), 1, True), (Draw((4, 6), "rest"), 0)),
    ("any.dims", (Draw((6, 2, 6), "first"), [1, 2])),
    ("all.dims", (Draw((6, 2, 6), "rest"), [1, 2])),
    ("any", (Draw((4, 6), "first"),)),
    ("all", (Draw((4, 6), "rest"),)),
    ("max min prod", (real(4, 6),)),
    ("prod.dim_int", (real(4, 6), 1)),
    ("logsumexp", (real(4, 6), [-1]), (real(4, 6), [0], True)),
    ("var.correction std.correction var_mean.correction std_mean.correction", (real(4, 6), [1], {"correction": 0, "keepdim": True})),
    ("linalg_vector_norm", (real(4, 6), 2, [-1], True), (real(4, 6),)),
    ("norm.ScalarOpt_dim", (real(4, 6), 2, [-1], True), (real(4, 6), 2, [0])),
    ("norm.Scalar", (real(4, 6),)),
    ("_linalg_det _linalg_slogdet linalg_matrix_exp", (real(4, 3, 3),)),
    ("_linalg_solve_ex", (Draw((4, 3, 3), "definite"), real(4, 3, 2))),
    ("linalg_inv_ex linalg_cholesky_ex _linalg_eigh", (Draw((4, 3, 3), "definite"),)),
    ("softmax.int log_softmax.int", (real(2, 4, 6), -1), (real(2, 4, 6), 1)),
    ("_softmax _log_softmax", (real(2, 4, 6), -1, False)),
    ("_safe_softmax", (real(2, 4, 6), -1)),
    ("argsort", (real(4, 6),), (real(4, 6), 0)),
    ("cumprod cumsum", (real(4, 6), 1), (real(4, 6), 0)),
    ("cummax cummin logcumsumexp", (real(4, 6), 1)),
    ("sort", (real(4, 6),), (real(4, 6), 0, True)),
    ("sort.stable argsort.stable", (real(4, 6), {"stable": True}), (real(4, 6), {"stable": True, "dim": 0})),
    ("msort", (real(4, 6),)),
    ("fliplr flipud", (real(4, 6, 2),)),
    ("rot90", (real(4, 6, 2),), (real(2, 4, 6), 2, [1, 2]), (real(2, 4, 6), 3, [-2, -1]), (real(4, 6), 4, [0, 1])),
    ("fft_rfft fft_ihfft", (real(4, 6),), (real(4, 6), None, 0), (real(4, 6), 8)),
    ("fft_fft fft_ifft", (real(4, 6),), (imaginary(4, 6), None, 0)),
    ("fft_irfft fft_hfft", (imaginary(4, 6),), (imaginary(4, 6), 6, 0)),
    ("fft_rfft2", (real(2, 4, 6),), (real(2, 4, 6), None, [0, 1])),
    ("fft_fft2 fft_ifft2 fft_irfft2", (imaginary(2, 4, 6),)),
    ("fft_rfftn", (real(2, 4, 6), None, [1, 2]), (real(4, 6),)),
    ("fft_fftn fft_ifftn fft_irfftn", (imaginary(2, 4, 6), None, [1]), (imaginary(4, 6),)),
    ("topk", (real(4, 6), 2), (real(4, 6), 2, 0)),
    ("flip", (real(4, 6), [1]), (real(2, 4, 6), [0, 2])),
    ("roll", (real(4, 6), [1], [1]), (real(4, 6), [3], [0]), (real(4, 6), [1])),
    ("triu tril", (real(2, 4, 6),), (real(4, 6), 1)),
    ("diff", (real(4, 6),), (real(4, 6), 1, 0), (real(4, 6), 1, -1, real(4, 2))),
)  # fmt: skip

_LSTM = [real(8, 4), real(8, 2), real(8), real(8)]
_GRU = [real(6, 4), real(6, 2), real(6), real(6)]
_LAYERS: Rows = (
    ("lstm.input", (real(4, 2, 4), [real(1, 4, 2)] * 2, _LSTM, True, 1, 0.0, True, False, True),
     (real(2, 4, 4), [real(2, 4, 2)] * 2, _LSTM[:2] * 2, False, 1, 0.0, True, True, False)),
    ("gru.input", (real(4, 2, 4), real(1, 4, 2), _GRU, True, 1, 0.0, True, False, True)),
    ("rnn_tanh.input rnn_relu.input", (real(4, 2, 4), real(1, 4, 6), [real(6, 4), real(6, 6)], False, 1, 0.0, True, False, True)),
    ("layer_norm", (real(2, 4, 6), [6], real(6), real(6)), (real(4, 6), [6]), (real(2, 4, 6), [4, 6], real(4, 6))),
    ("native_layer_norm", (real(2, 4, 6), [6], real(6), real(6), 1e-5)),
    ("rms_norm", (real(2, 4, 6), [6], real(6)), (real(4, 6), [6])),
    ("group_norm", (real(2, 8, 4), 2, real(8), real(8)), (real(2, 4, 2, 2), 4), (real(4, 4), 1)),
    ("batch_norm", (real(4, 2, 6), positive(2), real(2), Draw((2,), "buffer"), Draw((2,), "buffer"), False, 0.1, 1e-5, False),
     (real(4, 2, 6), positive(2), real(2), None, None, True, 0.1, 1e-5, False)),
    ("_native_batch_norm_legit_no_training",
     (real(4, 2, 6), positive(2), real(2), Draw((2,), "buffer"), Draw((2,), "buffer"), 0.1, 1e-5)),
    ("_native_batch_norm_legit_functional",
     (real(4, 2, 6), positive(2), real(2), Draw((2,), "buffer"), Draw((2,), "buffer"), True, 0.1, 1e-5)),
    ("instance_norm", (real(4, 2, 6), positive(2), real(2), None, None, True, 0.1, 1e-5, False)),
    ("conv1d", (real(2, 4, 8), real(6, 4, 3)), (real(2, 4, 8), real(6, 4, 3), real(6), [1], [1])),
    ("conv1d.padding", (real(2, 4, 8), real(6, 4, 3), None, [1], "same")),
    ("conv2d", (real(2, 2, 4, 4), real(6, 2, 2, 2), None, [2, 2]), (real(2, 2, 4, 6), real(2, 2, 3, 3), real(2), [1, 1], [1, 1]),
     (real(2, 4, 4, 4), real(8, 2, 1, 1), real(8), [1, 1], [0, 0], [1, 1], 2),
     (real(2, 4, 4, 4), real(4, 1, 3, 3), real(4), {"groups": 4})),
    ("conv2d.padding", (real(2, 4, 4, 4), real(6, 4, 2, 2), None, [2, 2], "valid")),
    ("conv3d", (real(2, 2, 4, 4, 4), real(4, 2, 1, 2, 2), None, [1, 2, 2])),
    ("convolution", (real(2, 2, 4, 4), real(6, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    ("conv_transpose1d", (real(2, 4, 6), real(4, 6, 2), None, [2]), (real(2, 4, 6), real(4, 2, 3), real(2), [2], [1], [1])),
    ("conv_transpose2d.input", (real(2, 4, 4, 6), real(4, 2, 2, 2), real(2), [2, 2]),
     (real(2, 8, 4, 2), real(8, 2, 3, 2), None, [1, 2], [1, 0], [0, 0], 4),
     (real(2, 4, 2, 2), real(4, 2, 2, 2), real(4), [2, 2], [0, 0], [0, 0], 2)),
    ("conv_transpose3d.input", (real(2, 2, 4, 2, 2), real(2, 4, 2, 2, 2), None, [2, 2, 2])),
    ("max_pool3d avg_pool3d", (real(2, 4, 4, 2, 4), [2, 2, 2])),
    ("max_pool1d_with_indices", (real(2, 4, 8), [2])),
    ("max_pool2d_with_indices", (real(2, 4, 8, 4), [2, 2])),
    ("max_pool3d_with_indices", (real(2, 4, 4, 2, 4), [2, 2, 2])),
    ("adaptive_max_pool1d", (real(2, 4, 6), [2])),
    ("adaptive_max_pool2d", (real(2, 4, 6, 4), [2, 2])),
    ("adaptive_max_pool3d adaptive_avg_pool3d", (real(2, 4, 4, 2, 4), [2, 2, 2])),
    ("col2im", (real(2, 16, 6), [6, 4], [2, 2], [1, 1], [0, 0], [2, 2])),
    ("_weight_norm", (real(4, 6), real(4, 1)), (real(4, 2, 6), real(1, 1, 6), 2)),
    ("im2col", (real(2, 4, 6, 4), [2, 2], [1, 1], [0, 0], [2, 2])),
    ("max_pool1d avg_pool1d", (real(2, 4, 8), [2]), (real(2, 4, 8), [3], [1])),
    ("max_pool2d avg_pool2d", (real(2, 4, 8, 4), [2, 2]), (real(2, 4, 4, 4), [3, 3], [2, 2], [1, 1])),
    ("adaptive_avg_pool1d", (real(2, 4, 6), [2])),
    ("adaptive_avg_pool2d", (real(2, 4, 6, 4), [2, 2]), (real(2, 4, 6, 4), [1, 1])),
    ("upsample_nearest1d.vec", (real(2, 4, 6), [12], None)),
    ("upsample_nearest2d.vec", (real(2, 4, 6, 4), None, [2.0, 2.0]), (real(2, 4, 6, 4), [9, 8], None)),
    ("upsample_nearest3d.vec _upsample_nearest_exact3d.vec", (real(2, 4, 2, 2, 4), None, [2.0, 2.0, 2.0])),
    ("upsample_linear1d.vec", (real(2, 4, 6), [12], False, None)),
    ("upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec", (real(2, 4, 6, 4), [12, 8], False, None)),
    ("upsample_trilinear3d.vec", (real(2, 4, 2, 2, 4), [4, 4, 8], False, None)),
    ("_upsample_nearest_exact1d.vec", (real(2, 4, 6), [12], None)),
    ("_upsample_nearest_exact2d.vec", (real(2, 4, 6, 4), None, [2.0, 2.0])),
    ("upsample_bilinear2d.vec", (real(2, 4, 6, 4), [12, 8], False, None), (real(2, 4, 6, 4), None, True, [2.0, 2.0])),
)  # fmt: skip

_LOOKUPS: Rows = (
    ("embedding", (real(8, 6), below(8, 2, 4)), (real(8, 6), below(8, 4), 1), (real(8, 6), below(8, 4), -1, True)),
    ("index_select", (real(8, 6), 0, below(8, 4)), (real(4, 6), 1, below(6, 2))),
    ("gather", (real(8, 6), 0, below(8, 4, 6)), (real(4, 6), 1, below(6, 4, 2)), (real(6, 6), -1, below(6, 2, 2))),
    ("scatter.src scatter_add", (real(4, 6), 1, below(6, 4, 2), real(4, 2)), (real(4, 6), 0, below(4, 2, 6), real(2, 6))),
    ("take_along_dim", (real(8, 6), below(8, 4, 6), 0), (real(4, 6), below(6, 4, 2), -1), (real(4, 6), below(6, 1, 2), 1),
     (real(4, 6), below(24, 8))),
    ("scatter_reduce.two", (real(4, 6), 1, below(6, 4, 2), real(4, 2), "amax"), (real(4, 6), 0, below(4, 2, 6), real(2, 6), "mean"),
     (real(4, 6), 0, below(4, 2, 6), real(2, 6), "sum")),
    ("index_fill.int_Scalar", (real(8, 6), 0, below(8, 4), 0.0), (real(4, 6), 1, below(6, 2), 2.0)),
    ("bucketize.Tensor", (real(4, 6), Draw((4,), "ends", 2)),),
    ("searchsorted.Tensor", (Draw((4,), "ends", 2), real(4, 6))),
    ("grid_sampler grid_sampler_2d", (real(2, 4, 4, 6), real(2, 4, 2, 2), 0, 0, False)),
    ("grid_sampler grid_sampler_3d", (real(2, 4, 2, 4, 2), real(2, 4, 2, 2, 3), 0, 0, False)),
    ("scatter.value", (real(4, 6), 1, below(6, 4, 2), 2.0), (real(4, 6), 1, below(6, 4, 2), 0.0)),
    ("index_add index_copy", (real(8, 6), 0, Draw((2,), "distinct", 8), real(2, 6)),
     (real(4, 6), 1, Draw((2,), "distinct", 6), real(4, 2))),
    ("index.Tensor", (real(8, 6), [below(8, 4)]), (real(4, 6), [None, below(6, 2, 4)]),
     (real(4, 6, 2), [below(4, 2, 1), below(6, 4)]), (real(4, 6, 2), [below(4, 2), None, below(2, 2)])),
    ("index_put", (real(4, 6), [Draw((2,), "distinct", 4)], real(2, 6)),
     (real(6, 4), [None, Draw((2,), "distinct", 4)], real(2)),
     (real(4, 6), [below(4, 2), below(6, 2)], real(2), True)),
    ("one_hot", (below(8, 4, 6), 8), (below(8, 4), 10)),
    ("nonzero", (boolean(4, 6),)),
)  # fmt: skip

_LOSSES: Rows = (
    ("cross_entropy_loss", (real(4, 8), below(8, 4), None, 2, -100, 0.0), (real(4, 8), below(8, 4), None, 2, 3),
     (real(4, 8), below(8, 4)), (real(4, 8), below(8, 4), None, 0), (real(4, 8), below(8, 4), Draw((8,), "buffer"), 2),
     (real(4, 8), below(8, 4), None, 2, -100, 0.1), (real(2, 8, 4), below(8, 2, 4), None, 2), (real(8), below(8), None, 2),
     (real(4, 8), unit(4, 8), None, 2)),
    ("nll_loss nll_loss_nd", (real(4, 8), below(8, 4)), (real(4, 8), below(8, 4), None, 2),
     (real(4, 8), below(8, 4), Draw((8,), "buffer"), 0)),
    ("mse_loss l1_loss smooth_l1_loss huber_loss", (real(4, 6), real(4, 6)), (real(4, 6), real(4, 6), 2), (real(4, 6), real(4, 6), 0)),
    ("margin_ranking_loss", (real(4, 6), real(4, 6), Draw((4, 6), "buffer")), (real(4, 6), real(4, 6), Draw((4, 6), "buffer"), 0.1, 2)),
    ("poisson_nll_loss", (real(4, 6), Draw((4, 6), "buffer"), True, False, 1e-8, 1),
     (real(4, 6), Draw((4, 6), "buffer"), True, False, 1e-8, 2)),
    ("soft_margin_loss", (real(4, 6), Draw((4, 6), "buffer"))),
    ("kl_div", (real(4, 6), unit(4, 6)), (real(4, 6), real(4, 6), {"log_target": True})),
    ("binary_cross_entropy", (unit(4, 6), unit(4, 6)), (unit(4, 6), unit(4, 6), Draw((6,), "buffer"), 2)),
    ("binary_cross_entropy_with_logits", (real(4, 6), unit(4, 6)), (real(4, 6), unit(4, 6), Draw((6,), "buffer"), Draw((6,), "buffer"), 2)),
)  # fmt: skip

_CREATED: Rows = (
    ("scalar_tensor", (2.0,)),
    ("full", ([4, 6], 2.0)),
    ("zeros ones", ([4, 6],)),
    ("empty.memory_format", ([0, 6],)),
    ("eye arange", (4,)),
    ("arange.start", (2, 6)),
    ("arange.start_step", (0, 8, 2)),
    ("linspace", (0, 1, 4)),
    ("new_ones new_zeros", (real(4, 6), [2])),
    ("new_full", (real(4, 6), [2], 3.0)),
    ("new_empty", (real(4, 6), [0])),
)  # fmt: skip
