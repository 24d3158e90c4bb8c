"""Ops that work element by element, with broadcasting: every dim of the result is free.

A sum of tensors is linear in all of them together (``0 1``); adding a number is not linear at all. A product is linear in each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.rules.lines import full, is_tensor, letters, line, linear_unless_cut, stretched
from autopar.rules.registry import Call, register

aten = torch.ops.aten


def elementwise(linear: str | Callable[[Call], str] = "") -> Callable[[Call], str]:
    """The rule of an op that broadcasts its operands; sets of operands with a bool among them are never partial sums."""

    def rule(call: Call) -> str:
        result = call.results[0].shape
        tail = linear if isinstance(linear, str) else linear(call)
        is_bool = [spec.dtype is torch.bool for spec in call.operands]
        groups = [part for part in tail.split("|") if part.strip() and not any(is_bool[int(i)] for i in part.split())]
        operands = [stretched(spec.shape, result) for spec in call.operands]
        return line(operands, [full(result)] * len(call.results), " | ".join(part.strip() for part in groups))

    return rule


def _if_tensors(both: str, first: str = "") -> Callable[[Call], str]:
    """``both`` if the first two arguments are tensors, else ``first``."""
    return lambda call: both if is_tensor(call.args[1]) and is_tensor(call.args[0]) else first


def _sum(call: Call) -> str:
    """Of tensors; of a tensor and a number if that is 0, with which sums begin."""
    if all(map(is_tensor, call.args[:2])):
        return "0 1"
    return "0" if call.args[1] == 0 else ""


def _if_exact(call: Call) -> str:
    """Linear if the conversion loses nothing: the same dtype, a wider float, or an integer to a float."""
    source, target = call.operands[0].dtype, call.results[0].dtype
    widens = target.is_floating_point and torch.promote_types(source, target) == target
    return "0" if source == target or widens else ""


def _if_zero(position: int, linear: str) -> Callable[[Call], str]:
    return lambda call: linear if call.args[position] == 0 else ""


def _convert(call: Call) -> str:
    """The first operand is converted; of a second one only the dtype is read."""
    others = [letters(len(spec.shape), f"o{i}x", "!") for i, spec in enumerate(call.operands[1:])]
    return line([full(call.results[0].shape), *others], [full(call.results[0].shape)], _if_exact(call))


def _prelu(call: Call) -> str:
    """A slope for each channel, which is dim 1, or one for all."""
    shape, slopes = full(call.operands[0].shape), call.operands[1].shape
    channels = shape[1] if len(shape) > 1 else "1"
    return line([shape, ["1" if size == 1 else channels for size in slopes]], [shape])


register(
    [
        # activations
        aten.gelu.default, aten.relu.default, aten.relu6.default, aten.silu.default, aten.tanh.default,
        aten.sigmoid.default, aten.log_sigmoid.default, aten.leaky_relu.default, aten.elu.default, aten.selu.default,
        aten.celu.default, aten.hardtanh.default, aten.hardswish.default, aten.hardsigmoid.default, aten.softplus.default,
        aten.mish.default, aten.threshold.default, aten.softshrink.default, aten.hardshrink.default,
        # functions of one number
        aten.exp.default, aten.exp2.default, aten.expm1.default, aten.log.default, aten.log2.default, aten.log1p.default,
        aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default, aten.square.default, aten.abs.default,
        aten.sin.default, aten.cos.default, aten.tan.default, aten.asin.default, aten.acos.default, aten.atan.default,
        aten.sinh.default, aten.cosh.default, aten.asinh.default, aten.acosh.default, aten.atanh.default, aten.erf.default,
        aten.erfc.default, aten.erfinv.default, aten.log10.default, aten.lgamma.default, aten.digamma.default, aten.sinc.default,
        aten.sgn.default, aten.frac.default, aten.signbit.default, aten.angle.default, aten.isposinf.default, aten.isneginf.default,
        aten.sign.default, aten.floor.default, aten.ceil.default, aten.round.default, aten.round.decimals,
        aten.trunc.default, aten.isnan.default,
        aten.isinf.default, aten.isfinite.default, aten.nan_to_num.default, aten.logit.default,
        aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
        aten.rsub.Scalar,
        # comparisons and logic
        aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
        aten.logical_not.default, aten.bitwise_not.default, aten.bitwise_and.Scalar, aten.bitwise_or.Scalar,
        aten.remainder.Scalar, aten.fmod.Scalar, aten.div.Scalar_mode,
        # of two
        aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
        aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor,
        aten.max.other, aten.min.other,
        aten.maximum.default, aten.minimum.default, aten.clamp.Tensor, aten.pow.Tensor_Tensor, aten.atan2.default,
        aten.remainder.Tensor, aten.fmod.Tensor, aten.floor_divide.default, aten.div.Tensor_mode, aten.clamp_min.Tensor,
        aten.clamp_max.Tensor, aten.fmax.default, aten.fmin.default, aten.copysign.Tensor, aten.hypot.default,
        aten.logaddexp.default, aten.polar.default, aten.logaddexp2.default, aten.float_power.Tensor_Tensor, aten.isclose.default,
        # only the shape is read
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
        aten.fill.Scalar, aten.rand_like.default,
    ],
    elementwise(),
)  # fmt: skip
register(
    [
        aten.neg.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default,
        aten.lift_fresh_copy.default, aten.positive.default, aten.mul.Scalar, aten.div.Scalar, aten.deg2rad.default,
        aten.rad2deg.default, aten.real.default, aten.imag.default, aten.conj.default, aten._conj.default, aten.conj_physical.default,
        aten.resolve_conj.default,
    ],
    elementwise("0"),
)  # fmt: skip
register([aten.add.Tensor, aten.sub.Tensor], elementwise(_sum))
register([aten.add.Scalar, aten.sub.Scalar], elementwise(_sum))
register(aten.rsub.Tensor, elementwise(_if_tensors("0 1")))
register([aten.lerp.Scalar, aten.lerp.Tensor, aten.addcdiv.default, aten.complex.default], elementwise("0 1"))
register(aten.mul.Tensor, elementwise(_if_tensors("0 | 1", "0")))
register([aten.div.Tensor, aten.true_divide.Tensor, aten.ldexp.Tensor, aten.xlogy.Tensor], elementwise("0"))
register(aten.prelu.default, _prelu)
# active dropout is random, and must be replaced by one whose numbers follow the layout before this rule holds
register(aten.dropout.default, elementwise(lambda call: "" if call.args[1] and call.args[2] else "0"))
register(aten.native_dropout.default, elementwise())
# of the first operand only shape and dtype are read
register([aten.copy.default, aten.fill.Tensor], elementwise(lambda call: linear_unless_cut(call, 1, "1")))
register(aten.where.self, elementwise("1 2"))
register(aten.where.ScalarOther, elementwise(_if_zero(2, "1")))
register(aten.where.ScalarSelf, elementwise(_if_zero(1, "1")))
register(aten.where.Scalar, elementwise())
register(aten.masked_fill.Scalar, elementwise(_if_zero(2, "0")))
register(aten.masked_fill.Tensor, elementwise("0 2"))
register(aten.broadcast_tensors.default, elementwise(lambda call: " ".join(map(str, range(len(call.operands))))))
register(aten.addcmul.default, elementwise("0 1 | 0 2"))
register(
    [
        aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default, aten.type_as.default,
    ],
    _convert,
)  # fmt: skip
