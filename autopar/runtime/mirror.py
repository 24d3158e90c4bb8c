"""A model and its skeleton, which is captured in its stead: before every call the one is switched as the other, and has its hooks; before
a capture it gets the attributes that the model has then."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.reads import MISSING, OF_TORCH, Read, alike, place_of
from autopar.capture.trace import switches
from autopar.copying import without_history
from autopar.errors import CaptureError, PlanError

ENGINE = "_autopar"
"""The attribute that makes a model parallel."""


class Held(NamedTuple):
    """An attribute that a program depends on: where it lies in a module, and its value."""

    place: Mapping[str, object]
    attribute: str
    value: object


@dataclass(frozen=True, slots=True)
class Mirror:
    """The modules of both.

    Args:
        pairs: each module of the model, by name, and that of the skeleton.
        children, parameters: of each module of the model.
        copied: of each its attributes when they were given to the skeleton.
    """

    pairs: tuple[tuple[str, nn.Module, nn.Module], ...]
    children: tuple[list[nn.Module | None], ...]
    parameters: tuple[dict[str, nn.Parameter | None], ...]
    copied: tuple[dict[str, object], ...]

    @staticmethod
    def of(model: nn.Module, skeleton: nn.Module) -> Mirror:
        pairs = tuple((name, own, shadow) for (name, own), shadow in zip(model.named_modules(), skeleton.modules(), strict=True))
        children = tuple([*own._modules.values()] for _, own, _ in pairs)
        parameters = tuple(dict(own._parameters) for _, own, _ in pairs)
        return Mirror(pairs, children, parameters, tuple(dict(vars(own)) for _, own, _ in pairs))

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, then buffers of the model by name, what it has twice by its first: as ``named_parameters`` and ``named_buffers`` give
        them, which take several times as long to walk through the modules."""
        found: dict[str, torch.Tensor] = {}
        for kind in ("_parameters", "_buffers"):
            seen: set[int] = set()
            for name, own, _ in self.pairs:
                held: dict[str, torch.Tensor | None] = vars(own)[kind]
                for attribute, tensor in held.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        found[f"{name}.{attribute}" if name else attribute] = tensor
        return found

    def held(self, reads: Iterable[Read]) -> tuple[Held, ...]:
        """What a program that was captured of the skeleton now depends on."""
        modules = {name: own for name, own, _ in self.pairs}
        places = ((place_of(modules[module], attribute), attribute) for module, attribute, _ in reads if module in modules)
        return tuple(Held(place, attribute, place.get(attribute, MISSING)) for place, attribute in places)

    def of_copy(self, held: Iterable[Held], reads: Iterable[Read]) -> tuple[Held, ...]:
        """What a program of the model that this one is a copy of depends on, in this one."""
        own = self.held(reads)
        return tuple(now if alike(now.value, then.value) else now._replace(value=then.value) for now, then in zip(own, held, strict=True))

    def refresh(self) -> None:
        """Give the skeleton the attributes of the model as they are now. What it has a copy of is copied again where it has changed; other
        objects that came later are the model's own."""
        memo = without_history(own for _, own, _ in self.pairs)
        for _, own, shadow in self.pairs:
            memo |= {id(own): shadow} | _tensors_of(own, shadow)
        for (_, own, shadow), copied in zip(self.pairs, self.copied, strict=True):
            for attribute in (vars(own).keys() | vars(shadow).keys()) - OF_TORCH - {ENGINE}:
                now, before = vars(own).get(attribute, MISSING), vars(shadow).get(attribute, MISSING)
                if now is copied.get(attribute, MISSING) and (isinstance(now, torch.Tensor) or alike(now, before)):
                    continue
                if now is MISSING:
                    del vars(shadow)[attribute]
                else:
                    vars(shadow)[attribute] = copy.deepcopy(now, memo) if type(now) is type(before) else now
            copied.clear()
            copied.update(vars(own))

    def follow(self, *, has_stages: bool) -> tuple[bool, ...]:
        """Switch the skeleton as the model is now; its `switches`.

        Args:
            has_stages: whether the model is cut into stages: what only other ranks hold stays as it was.

        Raises:
            PlanError: a parameter of a stage is trained that was frozen.
            CaptureError: a module inside has hooks that the skeleton lacks; those of the model itself are called around its calls. Or a
                module or a parameter is another than the one that was planned for.
        """
        for (name, own, shadow), children, parameters in zip(self.pairs, self.children, self.parameters, strict=True):
            if (own._modules or children) and [*own._modules.values()] != children:
                raise CaptureError(
                    f"{f'module {name}' if name else 'the model'} has other modules inside than when parallelize was called; change the "
                    "model before, and call parallelize then"
                )
            if name:
                refuse_backward_hooks(name, own)
                _refuse_other_hooks(name, own, shadow)
            if shadow.training != own.training:
                shadow.training = own.training
            for attribute, parameter in own._parameters.items():
                meant = shadow._parameters.get(attribute)
                if parameter is not None and parameter is not parameters.get(attribute) and not isinstance(parameter, DTensor):
                    raise CaptureError(
                        f"parameter {f'{name}.{attribute}'.lstrip('.')} is no shard, as parallelize has made of it, but a tensor of shape "
                        f"{tuple(parameter.shape)} that was put in its place; change its values instead, by load_state_dict() or copy_()"
                    )
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
            for attribute, buffer in own._buffers.items():
                if (buffer is None) != (shadow._buffers.get(attribute) is None):
                    shadow._buffers[attribute] = None if buffer is None else torch.empty_like(buffer, device="meta")
        return switches(shadow for _, _, shadow in self.pairs)


def _tensors_of(own: nn.Module, shadow: nn.Module) -> dict[int, object]:
    """Parameters and buffers of the skeleton by the ``id`` of those of the model."""
    tensors: dict[str, torch.Tensor | None] = {**own._parameters, **own._buffers}
    meant = {**shadow._parameters, **shadow._buffers}
    return {id(x): meant[name] for name, x in tensors.items() if x is not None and meant.get(name) is not None}


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
