"""Products of groups of rows, each with a matrix of its own: those of torch, and one that any dtype, size and device has.

Models that are captured ask for torch's with parameters in bfloat16 alone, and for one of ``transformers`` else, whose backward looks at
values in some versions; ``passes/normalize.py`` puts ours in its place.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.lines import whole
from autopar.rules.registry import Call, register, register_named

_library = torch.library.Library("autopar", "FRAGMENT")


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of x [rows, in] times the matrix of weight [groups, in, out] of their group; ``ends`` [groups]: how many rows there are up to
    the end of each. Rows after the last end are zeros."""
    found = x.new_zeros(x.shape[0], weight.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], weight[group], out=found[start:end])
        start = end
    return found


def _grouped_mm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of weight."""
    of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
    start = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(gradient[start:end], weight[group].T, out=of_x[start:end])
        torch.mm(x[start:end].T, gradient[start:end], out=of_weight[group])
        start = end
    return of_x, of_weight


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    return *torch.ops.autopar.grouped_mm_backward(gradient, x, weight, ends), None


def _rule(call: Call) -> str:
    """Rows lie in groups, one after the other. Where a group ends depends on all rows, so that rows and groups are whole; what each product
    sums over and its columns are as in any product."""
    shapes = [len(spec.shape) for spec in call.operands]
    return "s! k, e! k n, e! -> s! n ; 0 | 1" if shapes == [2, 3, 1] else whole(call)


for _schema, _made, _shape in (
    (
        "grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor",
        _grouped_mm,
        lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]),
    ),
    (
        "grouped_mm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor ends) -> (Tensor, Tensor)",
        _grouped_mm_backward,
        lambda gradient, x, weight, ends: (torch.empty_like(x), torch.empty_like(weight)),
    ),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, _made, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{_name}", _shape, lib=_library)
torch.library.register_autograd("autopar::grouped_mm", _differentiate, setup_context=_keep, lib=_library)

register(torch.ops.autopar.grouped_mm.default, _rule)
register_named(["aten::_grouped_mm"], _rule)
