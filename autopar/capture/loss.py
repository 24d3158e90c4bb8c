"""A model and a loss function as one module, for models that do not return a scalar loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from autopar.errors import CaptureError

LossFn = Callable[..., Any]


class WithLoss(nn.Module):
    """``loss_fn(model(inputs), others)``: arguments that the model's forward does not take go to the loss function.

    Keyword arguments are told apart by name, positional ones by how many the forward takes. In evaluation a call that lacks what the
    loss function wants, as targets, gives what the model returns: that is how to predict.
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
        output, rest = self.model(*args[:count], **own), args[count:]
        lacking = _lacking(self._loss_fn, output, *rest, **others)
        if not lacking:
            return self._loss_fn(output, *rest, **others)
        if not rest and not others and not self.model.training:
            return output
        model, loss = type(self.model).__name__, getattr(self._loss_fn, "__name__", type(self._loss_fn).__name__)
        raise CaptureError(
            f"the call is of {model} and its loss_fn {loss}, and what {model}.forward does not take goes to that: {lacking}; give the call "
            "what it wants after the inputs; in eval() a call without any of it gives the outputs of the model"
        )


def _lacking(loss_fn: LossFn, *args: Any, **kwargs: Any) -> str:
    """What a function says that it lacks of its arguments; nothing if that cannot be told."""
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn, follow_wrapped=False)
    except ValueError:  # of torch's functions in C++
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""
