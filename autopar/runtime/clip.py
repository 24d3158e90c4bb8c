"""The norm of gradients over all ranks, also where a loop calls ``torch.nn.utils.clip_grad_norm_`` or ``get_total_norm`` itself.

These functions are given this rank's parameters and gradients: they cannot know of other stages, and of shards they give a DTensor, whose
``item()`` may be this rank's alone. So that the loop of one device stays right, they are replaced, from the moment a plan takes force, by
ones that count all stages and give a plain tensor where they meet those of a parallel model; for all others they are what they were.
Parameters that only other stages have are none here: a call with none at all is one of such a model. (A script that has imported a function
by name before keeps the old one: it should call ``model.clip_grad_norm_``.)
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import PlanError
from autopar.runtime.optimizers import gradients_of_ours, is_ours
from autopar.runtime.place import Place, norm_over_line

_staged = WeakTensorKeyDictionary()
"""Parameters of models in stages: where they are, and whether this rank counts them."""
_models: weakref.WeakKeyDictionary[nn.Module, Place] = weakref.WeakKeyDictionary()
"""Models in stages."""
_of_torch, _norm_of_torch = nn.utils.clip_grad_norm_, nn.utils.get_total_norm


def watch_stages(model: nn.Module, place: Place, parameters: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Let clipping know of a model in stages and its parameters, each with whether this rank counts it in a norm."""
    for parameter, is_counted in parameters:
        _staged[parameter] = place, is_counted
    _models[model] = place


def watch_clipping() -> None:
    """Let torch's functions give the norms of whole parallel models, from now on."""
    nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_
    nn.utils.get_total_norm = get_total_norm  # not that of `torch.nn.utils.clip_grad`, which other models are clipped by


def _place_of(parameters: Sequence[torch.Tensor]) -> Place | None:
    """Where parameters are, if some are in stages.

    Raises:
        PlanError: they are in stages by several plans, or this rank has none and models are in stages by several plans.
    """
    if not parameters and len(_lines_of_models()) > 1:
        gc.collect()  # a model that is gone may still be there
    lines = {place.line: place for place in (_staged[p][0] for p in parameters if p in _staged)} if parameters else _lines_of_models()
    if len(lines) > 1:
        whose = "parameters of models in stages by several plans" if parameters else "no parameters, and several models are in stages"
        raise PlanError(f"a norm of gradients is asked for of {whose}; call model.clip_grad_norm_() of each")
    return next(iter(lines.values()), None)


def _lines_of_models() -> dict[object, Place]:
    return {place.line: place for place in _models.values()}


@functools.wraps(_norm_of_torch)
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    owners = {id(p.grad): p for p in _staged if p.grad is not None}
    staged = [owners[id(grad)] for grad in given if id(grad) in owners]
    place = _place_of(staged) if staged or not given else None
    if place is None:
        norm = _norm_of_torch(given, norm_type, error_if_nonfinite, foreach)
        return _whole(norm) if not gradients_of_ours().isdisjoint(map(id, given)) else norm
    _check_order(norm_type)
    counted = [grad for grad in given if id(grad) not in owners or _staged[owners[id(grad)]][1]]
    return norm_over_line(counted, float(norm_type), place, error_if_nonfinite=error_if_nonfinite, foreach=foreach)


def _check_order(norm_type: float) -> None:
    if not norm_type > 0:
        raise PlanError(f"norm_type={norm_type}: with pipeline stages norms are added up by a positive one; give 1, 2, inf or another")


@functools.wraps(_of_torch)
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    place = _place_of(given)
    if place is None:
        norm = _of_torch(given, max_norm, norm_type, error_if_nonfinite, foreach)
        return _whole(norm) if any(map(is_ours, given)) else norm
    return _clip(given, place, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach)


def _clip(
    given: Sequence[torch.Tensor], place: Place, max_norm: float, norm_type: float, *, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    _check_order(norm_type)
    counted = [p.grad for p in given if p.grad is not None and (p not in _staged or _staged[p][1])]
    grads = [grad for grad in counted if grad is not None]
    norm = norm_over_line(grads, float(norm_type), place, error_if_nonfinite=error_if_nonfinite, foreach=foreach)
    nn.utils.clip_grads_with_norm_(given, max_norm, norm, foreach)
    return norm


def clip(
    model: nn.Module, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """Clip the gradients of a parallel model; the global norm as a plain tensor."""
    given, place = list(model.parameters()), _models.get(model)
    if place is None:
        norm = _of_torch(given, max_norm, norm_type, error_if_nonfinite, foreach)
    else:
        norm = _clip(given, place, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach)
    return _whole(norm)


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
