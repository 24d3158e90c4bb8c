"""A model and a loss function as one module, for models that do not return a scalar loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

LossFn = Callable[..., Any]


class WithLoss(nn.Module):
    """``loss_fn(model(inputs), others)``: arguments that the model's forward does not take go to the loss function.

    Keyword arguments are told apart by name, positional ones by how many the forward takes.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameters = inspect.signature(self.model.forward).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        count = len(args) if takes_any else len(positional)
        names = {p.name for p in parameters}
        own = {name: value for name, value in kwargs.items() if name in names}
        others = {name: value for name, value in kwargs.items() if name not in names}
        return self._loss_fn(self.model(*args[:count], **own), *args[count:], **others)
