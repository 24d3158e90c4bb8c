"""The norm of gradients over pipeline stages, also where a loop calls ``torch.nn.utils.clip_grad_norm_`` itself.

That function is given this rank's parameters and cannot know of other stages. So that the loop of one device stays right, it is replaced,
from the moment a plan with stages takes force, by one that counts all stages where it meets parameters of such a model; for all others it
is what it was. (A script that has imported the function by name before keeps the old one: it should call ``model.clip_grad_norm_``.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import PlanError
from autopar.runtime.place import Place, norm_over_line

_staged = WeakTensorKeyDictionary()
"""Parameters of models in stages: where they are, and whether this rank counts them."""
_of_torch = nn.utils.clip_grad_norm_


def watch_stages(place: Place, parameters: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Let clipping know of parameters in stages, each with whether this rank counts it in a norm."""
    for parameter, is_counted in parameters:
        _staged[parameter] = place, is_counted
    nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_


@functools.wraps(_of_torch)
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    place = next((_staged[p][0] for p in given if p in _staged), None)
    if place is None:
        return _of_torch(given, max_norm, norm_type, error_if_nonfinite, foreach)
    if not norm_type > 0:
        raise PlanError(f"norm_type={norm_type}: with pipeline stages norms are added up by a positive one; give 1, 2, inf or another")
    counted = [p.grad for p in given if p.grad is not None and (p not in _staged or _staged[p][1])]
    grads = [grad for grad in counted if grad is not None]
    norm = norm_over_line(grads, float(norm_type), place, error_if_nonfinite=error_if_nonfinite, foreach=foreach)
    nn.utils.clip_grads_with_norm_(given, max_norm, norm, foreach)
    return norm


def clip(
    model: nn.Module, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """Clip the gradients of a parallel model; the global norm as a plain tensor."""
    norm = clip_grad_norm_(model.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
