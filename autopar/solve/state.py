"""What a model takes whatever the layout: its state, and what of it a rank holds at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autopar.capture.trace import Source
from autopar.cost.updates import state_bytes
from autopar.graph import is_call, outputs_of, specs_of, value_spec
from autopar.solve.places import MemoryLimit
from autopar.units import bytes_text, number_text

MUCH = 0.1
"""Of outputs that take more of the memory limit it is told where nothing fits."""


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
        state = sum(state_bytes(optimizer, spec.shape, spec.numel, spec.dtype.itemsize) for spec in trained)
        return StateBytes(sum(spec.num_bytes for spec in specs), sum(spec.num_bytes for spec in trained), state)


@dataclass(frozen=True, slots=True)
class Least:
    """What a rank holds at least.

    Args:
        num_ranks: that share the state evenly.
        state: the part of each, nothing where it is on the host.
        outputs: bytes of what the model returns, which comes back whole to every rank.
        has_loss: whether a scalar is among that, which may be asked for alone.
        training: whether there are gradients and a state of the optimizer.
    """

    num_ranks: int
    state: StateBytes
    outputs: float
    has_loss: bool
    training: bool

    @staticmethod
    def of(module: fx.GraphModule, num_ranks: int, optimizer: str, *, training: bool) -> Least:
        """Of a normal graph; without an ``optimizer`` its state is on the host."""
        state = StateBytes.of(module, optimizer, training=training) if optimizer else StateBytes(0.0, 0.0, 0.0)
        even = StateBytes(*(num_bytes / num_ranks for num_bytes in state))
        outputs = [value_spec(value) for value in {*outputs_of(module.graph)} if is_call(value.node)]
        has_loss = training and any(not spec.shape for spec in outputs)
        return Least(num_ranks, even, sum(spec.num_bytes for spec in outputs), has_loss, training)

    @property
    def num_bytes(self) -> float:
        """All state, or when there are no gradients yet the rest of it beside the outputs."""
        return max(sum(self.state), self.state.parameters + self.state.optimizer + self.outputs)

    def text(self, limit: MemoryLimit) -> str:
        """In words, beside the limit."""
        what = "parameters, gradients and optimizer state" if self.training else "parameters"
        whole = f"; outputs of the model come back whole to every rank and take {bytes_text(self.outputs)}"
        spared = ": outputs='loss' gives the loss alone" if self.has_loss else ""
        much = whole + spared if self.outputs > MUCH * limit.mean else ""
        if not sum(self.state):
            return f"{what} lie on the host; the memory limit of a device is {limit}{much}"
        ranks = number_text(self.num_ranks, "rank")
        return f"{what} alone need {bytes_text(sum(self.state))} per rank, evenly over {ranks}; the memory limit is {limit}{much}"
