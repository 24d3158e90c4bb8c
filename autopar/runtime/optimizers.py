"""How optimizers step with sharded parameters.

| optimizer  | what it needs                                                                  |
|------------|--------------------------------------------------------------------------------|
| `EACH`     | every element by itself: stepped with local shards                             |
| Muon       | products of matrices, which DTensors know: nothing is done here                |
| Adafactor  | norms of whole matrices: stepped with one whole parameter at a time            |
| Rprop      | assignment by masks, which DTensors of torch 2.13 refuse: the same             |
| LBFGS      | products of all gradients together, of which a stage has only its own: refused |
| SparseAdam | sparse gradients, and those of plans are dense: refused                        |

Of DTensors, each op of an update takes several times as long to launch as of tensors, AdamW on a CPU 90 us a parameter in place of 17. So
a copy of the optimizer steps with the local tensors of parameters, gradients and state, just before the optimizer itself, which then finds
no gradients. They are back after its step. Where somebody may look in between, by hooks or a closure, DTensors are stepped with as ever.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from autopar.errors import PlanError
from autopar.ops.host import settle
from autopar.runtime.chunks import Chunks
from autopar.runtime.groups import local_device
from autopar.runtime.parameters import is_on_meta, like

EACH = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.ASGD,
        torch.optim.RMSprop,
    }
)
"""Optimizers, not what is derived of them, that treat every element by itself."""
WHOLE = (torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers that need every parameter whole."""
Hook = Callable[[Optimizer, Any, Any], None]
_ours: dict[int, weakref.ref[torch.Tensor]] = {}
"""Parameters by their ``id``: every step asks for each, and `torch.utils.weak` takes 3 us to answer."""
_replaced: dict[int, weakref.ref[torch.Tensor]] = {}
"""Parameters that `parallelize` took out of models, likewise: those that nothing but an optimizer still holds."""
_stepped: dict[int, torch.Tensor | None] = {}
"""Gradients of parameters by their ``id``, which wait for the end of a step, since the optimizer must not see them again."""
_hooks: list[object] = []


def watch_optimizers(model: nn.Module) -> None:
    """Look after the steps of every optimizer from now on, for the parameters of this model."""
    for parameter in model.parameters():
        _ours[id(parameter)] = weakref.ref(parameter, partial(_forget, id(parameter)))
    _hook_steps()


def refuse_steps_of(replaced: Iterable[torch.Tensor]) -> None:
    """Let no optimizer step with these parameters from now on: a model has others in their place, and nothing would be trained."""
    for parameter in replaced:
        _replaced[id(parameter)] = weakref.ref(parameter, partial(_forget_replaced, id(parameter)))
    _hook_steps()


def _hook_steps() -> None:
    if not _hooks:
        _hooks.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))


def _forget(key: int, reference: object) -> None:
    _ours.pop(key, None)
    _stepped.pop(key, None)


def _forget_replaced(key: int, reference: object) -> None:
    _replaced.pop(key, None)


def is_ours(parameter: torch.Tensor) -> bool:
    """Whether it is one of a parallel model."""
    return _is_among(_ours, parameter)


def has_ours(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some are of a parallel model; none at all are those of stages that are elsewhere."""
    given = list(parameters)
    return not given or any(map(is_ours, given))


def gradients_of_ours() -> set[int]:
    """The ``id`` of every gradient of a parallel model."""
    parameters = (reference() for reference in _ours.values())
    return {id(parameter.grad) for parameter in parameters if parameter is not None and parameter.grad is not None}


def _is_among(known: Mapping[int, weakref.ref[torch.Tensor]], parameter: torch.Tensor) -> bool:
    reference = known.get(id(parameter))
    return reference is not None and reference() is parameter


def register_before_updates(hook: Hook) -> RemovableHandle:
    """Have a hook called before the step of every optimizer, and before what is done here for it."""
    handle = register_optimizer_step_pre_hook(hook)
    cast(OrderedDict[int, Hook], _global_optimizer_pre_hooks).move_to_end(handle.id, last=False)
    return handle


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    settle()  # it is about to write to what may still be copied to a device
    _refuse_replaced(optimizer)
    _place_states(optimizer)
    has_closure = len(args) > 1 or kwargs.get("closure") is not None
    if type(optimizer) in EACH and not has_closure and not _is_watched(optimizer):
        _step_local(optimizer)
    if not isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam, *WHOLE)):
        return
    ours = [(group, p) for group in optimizer.param_groups for p in group["params"] if is_ours(p)]
    if isinstance(optimizer, torch.optim.LBFGS) and ours:
        shape, placements = tuple(ours[0][1].shape), ours[0][1].placements
        raise PlanError(
            f"LBFGS needs all gradients in one place, and a parameter of shape {shape} is a DTensor of {placements}; use another optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and ours:
        raise PlanError("SparseAdam needs sparse gradients, and plans give every parameter a dense one; use Adam, SGD or Adagrad")
    apart = [(group, p) for group, p in ours if _is_stepped_whole(optimizer, p)]
    if apart and has_closure:
        raise PlanError(
            f"{type(optimizer).__name__} steps with whole parameters before a closure could give new gradients; call backward, and step()"
        )
    updated = [(group, p) for group, p in apart if p.grad is not None]
    for group, parameter in updated:
        _step_whole(optimizer, group, parameter)
    for _, parameter in updated:
        _set_aside(parameter)


def _is_stepped_whole(optimizer: Optimizer, parameter: DTensor) -> bool:
    """Of what is whole as a DTensor torch refuses that without dims, where it is assigned to by masks."""
    return not all(x.is_replicate() for x in parameter.placements) or (isinstance(optimizer, torch.optim.Rprop) and not parameter.dim())


def _refuse_replaced(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups if _replaced else ():
        for parameter in group["params"]:
            if _is_among(_replaced, parameter):
                raise PlanError(
                    f"this {type(optimizer).__name__} was made before parallelize and holds parameters that it replaced, one of shape "
                    f"{tuple(parameter.shape)}; make it after, from model.parameters()"
                )


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for group in optimizer.param_groups if _stepped else ():
        for parameter in group["params"]:
            if id(parameter) in _stepped:
                parameter.grad = _stepped.pop(id(parameter))


def _set_aside(parameter: DTensor) -> None:
    if parameter.grad is not None:  # else it is there twice
        _stepped[id(parameter)], parameter.grad = parameter.grad, None


def _place_states(optimizer: Optimizer) -> None:
    """Have state of a parameter's shape lie as the parameter does: what an optimizer made or loaded before there was a plan is whole."""
    _place_numbers(optimizer)
    for parameter in [p for p in optimizer.state if isinstance(p, DTensor) and is_ours(p)]:
        for key, value in optimizer.state[parameter].items():
            if not isinstance(value, torch.Tensor if parameter.dim() else DTensor):
                continue
            if value.shape != parameter.shape or _lies_as(value, parameter):
                continue
            if is_on_meta(value):
                raise PlanError(
                    f"{type(optimizer).__name__} was made while its parameter of shape {tuple(parameter.shape)} was on meta, and its state "
                    f"{key!r} has no values; make it once the model has a plan: give parallelize an example_batch"
                )
            whole = _gathered(value) if isinstance(value, DTensor) else value
            placed = _made_for(parameter, whole)
            Chunks.of(placed).fill(whole)
            optimizer.state[parameter][key] = placed


def _place_numbers(optimizer: Optimizer) -> None:
    """The same for parameters of no dims, of which every number in a state has the shape: one that is loaded lies as one that the optimizer
    makes itself, which a count of steps does not."""
    if type(optimizer) not in EACH and type(optimizer) is not torch.optim.Adafactor:
        return
    for group in optimizer.param_groups:
        for parameter in [p for p in group["params"] if isinstance(p, DTensor) and not p.dim() and is_ours(p)]:
            state = optimizer.state.get(parameter, {})
            loaded = [key for key, value in state.items() if isinstance(value, torch.Tensor) and not value.dim() and key != "step"]
            if not loaded or any(isinstance(value, DTensor) for value in state.values()):
                continue
            other = nn.Parameter(like(torch.ones_like(parameter.to_local()).detach(), parameter))
            other.grad = torch.zeros_like(other)
            made = _step_copy(optimizer, [{**group, "params": [other]}], {})[other]
            local = parameter.to_local().device
            state.update({key: like(state[key].to(local), parameter) for key in loaded if isinstance(made.get(key), DTensor)})


def _lies_as(value: torch.Tensor, parameter: DTensor) -> bool:
    if not isinstance(value, DTensor):
        return False
    return value._spec is parameter._spec or (value.placements == parameter.placements and value.device_mesh == parameter.device_mesh)


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether somebody may look at gradients between our hooks and the step, or step by a graph."""
    everywhere = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    others = any(not str(getattr(hook, "__module__", "")).startswith("autopar.") for hook in everywhere)
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return others or bool(own) or any(group.get("differentiable") for group in optimizer.param_groups)


def _step_local(optimizer: Optimizer) -> None:
    """A step of what the rank has of all parameters that have dims and gradients that lie as they do."""
    local: dict[int, tuple[DTensor, nn.Parameter]] = {}
    groups, states = [], {}
    for group in optimizer.param_groups:
        own = [p for p in group["params"] if is_ours(p) and _lies_alike(p, p.grad)]  # which may be there twice
        for parameter in own:
            part = nn.Parameter(parameter._local_tensor)
            part.grad = parameter.grad._local_tensor
            local[id(parameter)] = parameter, part
            if parameter in optimizer.state:
                states[part] = {key: _local(x) for key, x in optimizer.state[parameter].items()}
        groups.append({**group, "params": [local[id(parameter)][1] for parameter in own]})
    if not local:
        return
    found = _step_copy(optimizer, groups, states)
    for parameter, part in local.values():
        kept = optimizer.state[parameter]
        for key, value in found[part].items():
            is_like_it = isinstance(value, torch.Tensor) and value.shape == part.shape
            if not is_like_it or _local(kept.get(key)) is not value:
                kept[key] = like(value, parameter) if is_like_it else value
        _set_aside(parameter)
    increment_version([parameter for parameter, _ in local.values()])


def _lies_alike(parameter: DTensor, gradient: object) -> bool:
    return isinstance(gradient, DTensor) and parameter.dim() > 0 and gradient.placements == parameter.placements


def _local(x: object) -> object:
    return x._local_tensor if isinstance(x, DTensor) else x


def _step_copy(optimizer: Optimizer, groups: list[dict[str, Any]], states: Mapping[nn.Parameter, dict[str, Any]]) -> Mapping[Any, Any]:
    """A step of a copy of an optimizer that has these groups and states, without hooks; gives the states then."""
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": defaultdict(dict, states)}
    type(optimizer).step.__wrapped__(copy)  # type: ignore[attr-defined]
    found: Mapping[Any, Any] = copy.state
    return found


def _step_whole(optimizer: Optimizer, group: Mapping[str, Any], parameter: DTensor) -> None:
    """A step of one parameter, which every rank makes with all of it, and of which it keeps its shard.

    State of the parameter's shape is sharded like it, other state whole on every rank.
    """
    whole, gradient = nn.Parameter(_gathered(parameter)), parameter.grad
    assert isinstance(gradient, DTensor)
    whole.grad = _gathered(gradient)
    state = {key: _gathered(x) if isinstance(x, DTensor) else x for key, x in optimizer.state.get(parameter, {}).items()}
    found = _step_copy(optimizer, [{**group, "params": [whole]}], {whole: state} if state else {})
    Chunks.of(parameter).fill(whole.detach())
    kept = optimizer.state[parameter]
    for key, value in found[whole].items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            kept[key] = value
            continue
        if key not in kept:
            kept[key] = _made_for(parameter, value)
        Chunks.of(kept[key]).fill(value)


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
