"""What a forward reads of its modules' own attributes, such as the `p` of a dropout: what was captured is of the values that they had.

Attributes that no forward reads may change as they like. Parameters, buffers and modules are none, but where they are None: a forward asks
for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn

OF_TORCH = frozenset(vars(nn.Module())) | frozenset(vars(nn.Module))
"""What every module has, switched apart or of no matter to what is computed."""
MISSING = object()
"""The value of an attribute that a module does not have."""
_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Read(NamedTuple):
    """An attribute that was read, and its value then.

    Args:
        module: name of the module.
        attribute: its name.
        value: `MISSING` if there was none in the module itself.
    """

    module: str
    attribute: str
    value: object


def place_of(module: nn.Module, attribute: str) -> Mapping[str, object]:
    """Where a module itself has an attribute, or would have it."""
    own: Mapping[str, object] = vars(module)
    kinds: tuple[Mapping[str, object], ...] = (module._parameters, module._buffers, module._modules)
    return own if attribute in own else next((kind for kind in kinds if attribute in kind and kind[attribute] is None), own)


def own_value(module: nn.Module, attribute: str) -> object:
    """What a module itself has under a name, which may be in place of what its class has."""
    return place_of(module, attribute).get(attribute, MISSING)


@contextmanager
def reading(model: nn.Module) -> Iterator[list[Read]]:
    """Note what this thread reads of the modules of a model; the list is there at the end.

    torch.export calls a module that has several names by others in its place, one for each name, which share its ``__dict__``.
    """
    names: dict[int, dict[str, object]] = {id(vars(module)): {} for module in model.modules()}
    found, plain, thread = list[Read](), object.__getattribute__, get_ident()

    def noted(self: nn.Module, attribute: str) -> Any:
        own = names.get(id(plain(self, "__dict__")))
        is_new = own is not None and attribute not in own and attribute not in OF_TORCH
        if own is not None and is_new and not attribute.startswith("__") and get_ident() == thread:
            own[attribute] = own_value(self, attribute)
        return plain(self, attribute)

    nn.Module.__getattribute__ = noted  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        del nn.Module.__getattribute__
    for name, module in model.named_modules():
        found += (Read(name, attribute, value) for attribute, value in names[id(vars(module))].items() if _is_own(module, attribute, value))


def _is_own(module: nn.Module, attribute: str, value: object) -> bool:
    """Whether it matters what a module has under a name: methods are those of its class, tensors and modules are looked after apart."""
    if value is not MISSING:
        return True
    others = (module._parameters, module._buffers, module._modules)
    return not any(attribute in kind for kind in others) and _is_value(type(module), attribute)


def _is_value(cls: type, attribute: str) -> bool:
    kept = next((vars(base)[attribute] for base in cls.__mro__ if attribute in vars(base)), None)
    return not callable(kept) and not hasattr(kept, "__get__")


def hold(reads: Sequence[Read], model: nn.Module) -> bool:
    """Whether a model has what was read."""
    modules = dict(model.named_modules())
    return all(read.module in modules and alike(own_value(modules[read.module], read.attribute), read.value) for read in reads)


def alike(one: object, other: object) -> bool:
    """Whether two values are one, or are made up of equal numbers and texts in the same way; tensors that they hold are not compared."""
    return one is other or (not isinstance(one, torch.Tensor) and _made_alike(one, other, frozenset()))


def _made_alike(one: Any, other: Any, seen: frozenset[int]) -> bool:
    if one is other or id(one) in seen:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _LEAVES):
        return bool(one == other)
    seen |= {id(one)}
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_made_alike(*pair, seen) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_made_alike(one[key], other[key], seen) for key in one)
    if isinstance(one, set | frozenset):
        return bool(one == other)
    if isinstance(one, torch.Tensor | nn.Module):
        return True
    return hasattr(one, "__dict__") and _made_alike(vars(one), vars(other), seen)
