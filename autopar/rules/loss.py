"""Losses: the sum over rows is a partial sum where rows are sharded; cross entropy may shard its classes too."""

from __future__ import annotations

import math

import torch

from autopar.rules.lines import full, letters, line, stretched
from autopar.rules.ranged import cross_entropy_range, mean_part
from autopar.rules.registry import Arguments, Call, Coordinate, Local, Op, register

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2
"""Torch's numbers for ``reduction``."""


def _reduction(call: Call) -> int:
    reduction = call.argument(3, "reduction", _MEAN)
    assert isinstance(reduction, int)
    return reduction


def _cross_entropy(call: Call) -> str:
    """``n c&, n -> .`` for a sum over class indices without weights or smoothing; means are whole, as only the whole knows the count."""
    logits, target = call.operands[:2]
    is_index = not target.dtype.is_floating_point
    is_plain = is_index and len(call.operands) == 2 and not call.argument(5, "label_smoothing", 0.0)
    reduction = _reduction(call)
    rows = letters(len(logits.shape) - 1, "n", "!" if reduction == _MEAN else "")
    classes = "c&" if is_plain and reduction == _SUM and len(rows) <= 1 else "c!"
    full_rows = [*rows[:1], classes, *rows[1:]] if rows else [classes]
    operands = [full_rows, rows if is_index else full_rows, *[[classes]] * (len(call.operands) - 2)]
    return line(operands, [rows if reduction == _NONE else []])


def _local_cross_entropy(call: Call, local: Local) -> Arguments:
    axes = local.axes.get("c", ())
    if not axes:
        return call.target, call.args, call.kwargs
    sizes = [local.mesh_sizes[axis] for axis in axes]
    names = [local.axis_names[axis] for axis in axes]
    ignored = call.argument(4, "ignore_index", -100)
    return cross_entropy_range, (*call.args[:2], [Coordinate(axis) for axis in axes], sizes, names, ignored), {}


def _nll(call: Call) -> str:
    rows = letters(len(call.operands[1].shape), "n", "!" if _reduction(call) == _MEAN else "")
    classes = [*rows[:1], "c!", *rows[1:]]
    weights = [["c!"]] * (len(call.operands) - 2)
    linear = "0" if not weights or _reduction(call) != _MEAN else ""
    return line([classes, rows, *weights], [rows if _reduction(call) == _NONE else []], linear)


_REDUCTION_POSITION: dict[Op, int] = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.kl_div.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.margin_ranking_loss.default: 4,
    aten.poisson_nll_loss.default: 5,
}


def _elementwise_loss(call: Call) -> str:
    shape = torch.broadcast_shapes(*(spec.shape for spec in call.operands))
    is_none = call.argument(_REDUCTION_POSITION[call.target], "reduction", _MEAN) == _NONE
    return line([stretched(spec.shape, shape) for spec in call.operands], [full(shape) if is_none else []])


def _local_elementwise_loss(call: Call, local: Local) -> Arguments:
    """A mean over shards is the mean of their means."""
    parts = math.prod(local.mesh_sizes[axis] for axes in local.axes.values() for axis in axes)
    if call.argument(_REDUCTION_POSITION[call.target], "reduction", _MEAN) != _MEAN or parts == 1:
        return call.target, call.args, call.kwargs
    return mean_part, (call.target, parts, *call.args), call.kwargs


register(aten.cross_entropy_loss.default, _cross_entropy, local=_local_cross_entropy)
register([aten.nll_loss.default, aten.nll_loss_nd.default], _nll)
register(list(_REDUCTION_POSITION), _elementwise_loss, local=_local_elementwise_loss)
