"""Loss scaling in float16 (Micikevicius et al., ICLR 2018), so that `torch.amp.GradScaler` works as on one device.

Where backwards run inside of the call (`runtime.pipeline`), the gradient of the loss, which is the scale, only comes in later: they run
under the scale that is expected, and what comes in settles the rest, exactly, since gradients of parameters are in float32 and scales are
powers of two. And gradients that are infinite or NaN on one rank are so on every rank.

Torch asks only the ranks that share the first gradient of an optimizer whether one is, so that some would step and others not. In any
precision scalers therefore ask all ranks from the moment a plan takes force, for optimizers of parallel models: the step is skipped on all
ranks or on none.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from autopar.callers import user_level
from autopar.runtime.optimizers import has_ours
from autopar.runtime.recorder import Recorder

INITIAL = 2.0**16
"""What `torch.amp.GradScaler` begins with."""
BACKOFF = 0.5
"""By which it backs off after an overflow."""


@dataclass(slots=True)
class LossScale:
    """The scale under which backwards run before the gradient of the loss comes in."""

    expected: float = INITIAL

    def settle(self, came: float, *, overflowed: bool) -> float:
        """What gradients are to be multiplied by, now that ``came`` is the gradient of the loss; the next scale is expected to be that
        one, or less after an overflow.

        Warns:
            UserWarning: gradients overflowed under another scale than the one that came, and without a scaler nothing skips the step.
        """
        ratio = came / self.expected
        if overflowed and came and came < self.expected:
            warnings.warn(
                f"gradients in float16 overflowed under the loss scale {self.expected:g} that was expected, and {came:g} came: "
                "torch.amp.GradScaler skips this step; without one they are infinite now, and its update has to be skipped",
                stacklevel=user_level(),
            )
        if came:
            self.expected = came * (BACKOFF if overflowed else 1.0)
        return ratio


def share_overflow(grads: Sequence[torch.Tensor], device: torch.device, recorder: Recorder | None = None) -> bool:
    """Make a gradient of this rank infinite or NaN if one of any rank is; tell whether one is. All ranks call this.

    Args:
        grads: local gradients of this rank.
        device: of the ranks.
        recorder: of the step, if it is recorded.
    """
    found = torch.zeros(1, dtype=torch.float32, device=device)
    for kind in dict.fromkeys((grad.dtype, grad.device) for grad in grads):
        own = [grad for grad in grads if (grad.dtype, grad.device) == kind]
        own_found = torch.zeros(1, dtype=torch.float32, device=kind[1])
        torch._amp_foreach_non_finite_check_and_unscale_(own, own_found, torch.ones(1, dtype=torch.float32, device=kind[1]))
        found += own_found.to(device)
    if dist.get_world_size() > 1:
        with nullcontext() if recorder is None else recorder.blocking("all_reduce", "world", "update", found, "overflow"):
            dist.all_reduce(found, dist.ReduceOp.MAX)
    overflowed = bool(found.item())
    if overflowed:
        for grad in grads:
            grad.fill_(torch.inf)
    return overflowed


_of_torch = GradScaler._unscale_grads_


def watch_scalers() -> None:
    """Let every scaler skip the steps of a parallel model on all ranks or on none, from now on."""
    GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[method-assign]


def _unscale_grads_(
    self: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    found = _of_torch(self, optimizer, inv_scale, found_inf, allow_fp16)
    if not has_ours(chain.from_iterable(group["params"] for group in optimizer.param_groups)) or dist.get_world_size() == 1:
        return found
    device = found_inf.device
    own_found = sum((own.to(device) for own in found.values()), torch.zeros((), dtype=torch.float32, device=device))
    worst = torch.stack([torch.full_like(own_found, bool(found)), own_found])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    for own in found.values():
        own.copy_(worst[1])
    return found if found or not worst[0] else {device: worst[1]}  # torch raises where no rank has a gradient
