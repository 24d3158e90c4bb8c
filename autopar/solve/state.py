"""The state of a model: what it takes whatever the layout."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from autopar.cost.updates import state_bytes
from autopar.graph import specs_of
from autopar.trace import Source


class StateBytes(NamedTuple):
    """Bytes of all parameters, of their gradients, and of the state of the optimizer; of what is trained alone, and in training."""

    parameters: float
    gradients: float
    optimizer: float

    @staticmethod
    def of(module: fx.GraphModule, optimizer: str, *, training: bool) -> StateBytes:
        nodes = [n for n in module.graph.find_nodes(op="placeholder") if n.meta["placeholder"].source is Source.PARAMETER]
        specs = [specs_of(node)[0].stored for node in nodes]
        trained = [spec for spec in specs if training and spec.requires_grad]
        state = sum(state_bytes(optimizer, spec.shape, spec.numel) for spec in trained)
        return StateBytes(sum(spec.num_bytes for spec in specs), sum(spec.num_bytes for spec in trained), state)
