"""Ops that have no kernel in float64, worked out by others that have one; so that a reference can be run in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class InFloat64(TorchDispatchMode):
    """Within this context `_WITHOUT` take float64 too."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = _WITHOUT.get(func) if args and getattr(args[0], "dtype", None) is torch.float64 else None
        return (made or func)(*args, **(kwargs or {}))


def _grouped_mm(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """Products of groups. Of operands with three dims each group has its own matrix; of those with two it has the rows or columns up to its
    offset (int32 [groups]): rows of x, columns of y, and where both have two dims what they are summed over."""
    if offs is None:
        return x @ y
    ends = offs.tolist()
    parts = [*enumerate(zip([0, *ends[:-1]], ends, strict=True))]
    if x.dim() == 2 and y.dim() == 2:
        return torch.stack([x[:, a:b] @ y[a:b] for _, (a, b) in parts])
    if x.dim() == 2:
        found = x.new_zeros(x.shape[0], y.shape[-1])
        for group, (a, b) in parts:
            found[a:b] = x[a:b] @ y[group]
        return found
    found = x.new_zeros(x.shape[-2], y.shape[-1])
    for group, (a, b) in parts:
        found[:, a:b] = x[group] @ y[:, a:b]
    return found


_WITHOUT: Mapping[object, Callable[..., torch.Tensor]] = {torch.ops.aten._grouped_mm.default: _grouped_mm}
