"""A model and its skeleton, which is captured in its stead: before every call the one is switched as the other, and has its hooks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from autopar.errors import CaptureError, PlanError
from autopar.trace import switches


@dataclass(frozen=True, slots=True)
class Mirror:
    """The modules of both.

    Args:
        pairs: each module of the model, by name, and that of the skeleton.
    """

    pairs: tuple[tuple[str, nn.Module, nn.Module], ...]

    @staticmethod
    def of(model: nn.Module, skeleton: nn.Module) -> Mirror:
        return Mirror(tuple((name, own, shadow) for (name, own), shadow in zip(model.named_modules(), skeleton.modules(), strict=True)))

    def follow(self, *, has_stages: bool) -> tuple[bool, ...]:
        """Switch the skeleton as the model is now; its `switches`.

        Args:
            has_stages: whether the model is cut into stages: what only other ranks hold stays as it was.

        Raises:
            PlanError: a parameter of a stage is trained that was frozen.
            CaptureError: a module inside has hooks that the skeleton lacks; those of the model itself are called around its calls.
        """
        for name, own, shadow in self.pairs:
            if name:
                refuse_backward_hooks(name, own)
                _refuse_other_hooks(name, own, shadow)
            if shadow.training != own.training:
                shadow.training = own.training
            for attribute, parameter in own._parameters.items():
                meant = shadow._parameters[attribute]
                if parameter is None or meant is None or parameter.requires_grad == meant.requires_grad:
                    continue
                if not has_stages:
                    meant.requires_grad_(parameter.requires_grad)
                elif parameter.requires_grad:  # one that is frozen just gets no gradient
                    raise PlanError(
                        f"parameter {f'{name}.{attribute}'.lstrip('.')} was frozen when the model was cut into stages, and ranks of other "
                        "stages do not see that it is trained now; let it require a gradient before the first call, or plan without "
                        "stages (pipeline=False)"
                    )
        return switches(shadow for _, _, shadow in self.pairs)


def refuse_backward_hooks(name: str, module: nn.Module) -> None:
    """CaptureError if autograd would call hooks of a module of this name."""
    if module._backward_hooks or module._backward_pre_hooks:
        raise CaptureError(
            f"module {name} has backward hooks, and plans call none; remove them, or change gradients by a torch.autograd.Function in the "
            "forward"
        )


def _refuse_other_hooks(name: str, own: nn.Module, shadow: nn.Module) -> None:
    if own._forward_hooks.keys() != shadow._forward_hooks.keys() or own._forward_pre_hooks.keys() != shadow._forward_pre_hooks.keys():
        raise CaptureError(
            f"module {name} has other forward hooks than when parallelize was called, and plans call none: those of then are part of the "
            "forward. Add and remove hooks before, and return from the forward what they would be shown"
        )
