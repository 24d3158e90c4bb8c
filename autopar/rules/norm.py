"""Normalisations: what statistics are taken over is whole, all else is free."""

from __future__ import annotations

import torch

from autopar.rules.lines import integer, letters, line, whole
from autopar.rules.notation import Rule
from autopar.rules.registry import Arguments, Call, Local, register

aten = torch.ops.aten


def _layer_norm(call: Call) -> str:
    num_dims, num_normal = len(call.operands[0].shape), len(call.args[1])  # type: ignore[arg-type]
    batch, normal = letters(num_dims - num_normal, "b"), letters(num_normal, "k", "!")
    # native_layer_norm gives mean and inverse deviation too, with dims of size 1
    statistics = [[*batch, *["1"] * num_normal]] * (len(call.results) - 1)
    return line([[*batch, *normal], *[normal] * (len(call.operands) - 1)], [[*batch, *normal], *statistics])


def _group_norm(call: Call) -> Rule:
    groups = call.args[1]
    assert isinstance(groups, int)
    space = letters(len(call.operands[0].shape) - 2, "s", "!")
    channels = "(g c!)" if groups > 1 else "c!"
    sizes = {"g": groups} if groups > 1 else {}
    weights = [[channels]] * (len(call.operands) - 1)
    return Rule.parse(line([["b", channels, *space], *weights], [["b", channels, *space]]), **sizes)


def _weight_norm(call: Call) -> str:
    """A length for each row along one dim (Salimans and Kingma 2016)."""
    dim = integer(call.argument(2, "dim", 0))
    if dim < 0:  # one length for all
        return whole(call)
    rows = letters(len(call.operands[0].shape), "k", "!")
    rows[dim] = "o"
    return line([rows, [name if i == dim else "1" for i, name in enumerate(rows)]], [rows], "1")


def _local_group_norm(call: Call, local: Local) -> Arguments:
    return call.target, (call.args[0], local.sizes.get("g", 1), *call.args[2:]), call.kwargs


def _batch_norm(call: Call) -> str:
    """Statistics of the batch make batch and space whole; stored ones leave them free."""
    training = call.args[5]
    mark = "!" if training else ""
    space = letters(len(call.operands[0].shape) - 2, "s", mark)
    term = [f"b{mark}", "c", *space]
    return line([term, *[["c"]] * (len(call.operands) - 1)], [term])


def _stored_batch_norm(call: Call) -> str:
    """Two more results, saved statistics, are empty."""
    term = ["b", "c", *letters(len(call.operands[0].shape) - 2, "s")]
    saved = [letters(len(spec.shape), f"r{i}x", "!") for i, spec in enumerate(call.results[1:])]
    return line([term, *[["c"]] * (len(call.operands) - 1)], [term, *saved])


def _updating_batch_norm(call: Call) -> str:
    """As in training; four more results by channel: statistics of the batch, and what the stored ones become."""
    term = ["b!", "c", *letters(len(call.operands[0].shape) - 2, "s", "!")]
    return line([term, *[["c"]] * (len(call.operands) - 1)], [term, *[["c"]] * (len(call.results) - 1)])


def _instance_norm(call: Call) -> str:
    space = letters(len(call.operands[0].shape) - 2, "s", "!")
    return line([["b", "c", *space], *[["c"]] * (len(call.operands) - 1)], [["b", "c", *space]])


register([aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default], _layer_norm)
register(aten.group_norm.default, _group_norm, local=_local_group_norm)
register(aten.batch_norm.default, _batch_norm)
register(aten._native_batch_norm_legit_no_training.default, _stored_batch_norm)
register(aten._native_batch_norm_legit_functional.default, _updating_batch_norm)
register(aten.instance_norm.default, _instance_norm)
register(aten._weight_norm.default, _weight_norm)
