"""Optimizers that do not treat every element by itself, on sharded parameters.

| optimizer | what it needs                                                                  |
|-----------|--------------------------------------------------------------------------------|
| Muon      | products of matrices, which DTensors know: nothing is done here                |
| Adafactor | norms of whole matrices: stepped with one whole parameter at a time            |
| Rprop     | assignment by masks, which DTensors of torch 2.13 refuse: the same             |
| LBFGS     | products of all gradients together, of which a stage has only its own: refused |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import PlanError
from autopar.host import settle
from autopar.runtime.chunks import Chunks
from autopar.runtime.groups import local_device
from autopar.runtime.parameters import like

WHOLE = (torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers that need every parameter whole."""
_ours = WeakTensorKeyDictionary()
_stepped = WeakTensorKeyDictionary()
"""Gradients that wait for the end of a step, since the optimizer must not see them again."""
_hooks: list[object] = []


def watch_optimizers(model: nn.Module) -> None:
    """Check every optimizer at its steps from now on, for the parameters of this model, and give whole ones to those that need them."""
    for parameter in model.parameters():
        _ours[parameter] = True
    if not _hooks:
        _hooks.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    settle()  # it is about to write to what may still be copied to a device
    ours = [(group, p) for group in optimizer.param_groups for p in group["params"] if p in _ours]
    if isinstance(optimizer, torch.optim.LBFGS) and ours:
        shape, placements = tuple(ours[0][1].shape), ours[0][1].placements
        raise PlanError(
            f"LBFGS needs all gradients in one place, and a parameter of shape {shape} is a DTensor of {placements}; use another optimizer"
        )
    if not isinstance(optimizer, WHOLE):
        return
    sharded = [(group, p) for group, p in ours if p.grad is not None and not all(x.is_replicate() for x in p.placements)]
    if sharded and (len(args) > 1 or kwargs.get("closure") is not None):
        raise PlanError(
            f"{type(optimizer).__name__} steps with whole parameters before a closure could give new gradients; call backward, and step()"
        )
    for group, parameter in sharded:
        _step_whole(optimizer, group, parameter)
        _stepped[parameter], parameter.grad = parameter.grad, None


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p in _stepped):
        parameter.grad = _stepped.pop(parameter)


def _step_whole(optimizer: Optimizer, group: Mapping[str, Any], parameter: DTensor) -> None:
    """A step of one parameter, which every rank makes with all of it, and of which it keeps its shard.

    State of the parameter's shape is sharded like it, other state whole on every rank.
    """
    whole, gradient = nn.Parameter(_gathered(parameter)), parameter.grad
    assert isinstance(gradient, DTensor)
    whole.grad = _gathered(gradient)
    alone: Any = object.__new__(type(optimizer))
    state = {key: _gathered(x) if isinstance(x, DTensor) else x for key, x in optimizer.state.get(parameter, {}).items()}
    alone.__dict__ = {
        **optimizer.__dict__,
        "param_groups": [{**group, "params": [whole]}],
        "state": defaultdict(dict, {whole: state} if state else {}),
    }
    type(optimizer).step.__wrapped__(alone)  # type: ignore[attr-defined]  # without the hooks, which are called once for all parameters
    _keep_shard(parameter, whole.detach())
    kept = optimizer.state[parameter]
    for key, value in alone.state[whole].items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            kept[key] = value
            continue
        if key not in kept:
            kept[key] = _made_for(parameter, value)
        _keep_shard(kept[key], value)


def _gathered(x: DTensor) -> torch.Tensor:
    """All of a tensor on the device of its mesh, in memory of its own, wherever its shards are."""
    local = x.to_local().detach()
    whole: torch.Tensor = like(local.to(local_device(x.device_mesh.device_type)), x).full_tensor()
    return whole.clone() if whole.data_ptr() == local.data_ptr() else whole


def _made_for(parameter: DTensor, value: torch.Tensor) -> DTensor:
    """Memory for state beside a parameter."""
    local = parameter.to_local()
    if value.shape == parameter.shape:
        return like(torch.empty_like(local, dtype=value.dtype, requires_grad=False), parameter)
    mesh = parameter.device_mesh
    return DTensor.from_local(torch.empty_like(value), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _keep_shard(x: DTensor, whole: torch.Tensor) -> None:
    for offsets, part in Chunks.of(x).parts.items():
        part.copy_(whole[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))])
