"""Optimizers that do not work on sharded parameters say so before their first step.

Those that treat every element by itself work on the shards, and the matrix products of Muon are those of DTensors. The rest need more:

===========  ==============================================================================
Adafactor    norms of whole matrices, changed in place, which DTensors of torch 2.13 refuse
Rprop        assignment to some elements by a mask, which they refuse too
LBFGS        products of all gradients together, of which a stage has only its own
===========  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import PlanError
from autopar.host import settle

_ours = WeakTensorKeyDictionary()
_hooks: list[object] = []
NEEDS: tuple[tuple[type[torch.optim.Optimizer], Callable[[DTensor], bool], str], ...] = (
    (torch.optim.Adafactor, lambda parameter: _is_sharded(parameter), "norms of whole matrices"),
    (torch.optim.Rprop, lambda parameter: _is_sharded(parameter), "whole parameters"),
    (torch.optim.LBFGS, lambda parameter: True, "all gradients in one place"),
)
"""Of each kind which parameters it cannot take, and what it needs."""


def watch_optimizers(model: torch.nn.Module) -> None:
    """Check every optimizer at its steps from now on, for the parameters of this model."""
    for parameter in model.parameters():
        _ours[parameter] = True
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    settle()  # it is about to write to what may still be copied to a device
    for kind, refuses, need in NEEDS:
        if isinstance(optimizer, kind):
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if p in _ours):
                if refuses(parameter):
                    stored = f"a parameter of shape {tuple(parameter.shape)} is stored as {parameter.placements}"
                    raise PlanError(
                        f"{kind.__name__} needs {need}, and {stored}; use one that treats every element by itself (AdamW, SGD ...), or "
                        "keep parameters whole: Manual(dp=...)"
                    )


def _is_sharded(parameter: DTensor) -> bool:
    return not all(placement.is_replicate() for placement in parameter.placements)
