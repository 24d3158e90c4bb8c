"""Each process of the tests captures a model once: many tests plan for the same models, and to capture one takes as long as the rest.

What is captured depends on the model on meta and on the call, which are compared whole, by their pickles. Captures of models that cannot be
pickled, that hold values, or that are large, are made anew, and so are all those of tests that replace or call `capture` themselves.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.capture.trace import Captured, capture
from autopar.planner import session
from autopar.precision import autocast_state

KEPT, MAX_NODES = 64, 1000


def _key(model: nn.Module, call: object) -> tuple[object, ...] | None:
    if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return None
    try:
        given = pickle.dumps((model, call))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    code = tuple(type(module).forward for module in model.modules())
    return given, code, torch.get_default_dtype(), torch.is_grad_enabled(), autocast_state()


def share() -> None:
    """Let the sessions of this process share what they capture."""
    known: OrderedDict[object, Captured] = OrderedDict()

    def shared(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], **settings: Any) -> Captured:
        key = _key(model, (args, dict(kwargs), settings))
        if key in known:
            known.move_to_end(key)
            return known[key]
        captured = capture(model, args, kwargs, **settings)
        if key is not None and len(captured.graph.graph.nodes) <= MAX_NODES:
            known[key] = captured
            if len(known) > KEPT:
                known.popitem(last=False)
        return captured

    session.capture = shared  # type: ignore[attr-defined]
