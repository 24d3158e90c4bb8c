"""Which rows of the batch a rank computes on: read off a plan, so that a rank need not hold the others.

The batch is split into micro-batches first, and the rows of each over mesh axes, major first. A rank that holds *its rows* of an input has,
micro-batch by micro-batch, those that all ops which read the input want of it: nothing of it need be communicated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.trace import Source
from autopar.factors import Factors
from autopar.graph import Value, operands_of, outputs_of, value_spec
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.microbatch import batch_size
from autopar.rules.strategies import Choice


@dataclass(frozen=True, slots=True)
class RowSplit:
    """How the rows of a batch are dealt out.

    Args:
        axes: of the mesh, major first, over which the rows of a micro-batch are split.
        microbatches: of the step.
    """

    axes: tuple[str, ...]
    microbatches: int = 1


@dataclass(frozen=True, slots=True)
class InputRows:
    """The inputs of which a rank needs its own rows alone.

    Args:
        split: how all of them are split; over no axes if there are none.
        axes: for each such input the axes that split it, major first; that in time is one where rows of a micro-batch are sliced.
    """

    split: RowSplit
    axes: Mapping[fx.Node, tuple[int, ...]]

    @property
    def names(self) -> frozenset[str]:
        """Those of the inputs."""
        return frozenset(_name(node) for node in self.axes)

    def of(self, names: Collection[str]) -> dict[fx.Node, tuple[int, ...]]:
        """The axes of those inputs that come as a rank's rows."""
        return {node: axes for node, axes in self.axes.items() if _name(node) in names}


def find_rows(
    module: fx.GraphModule, factors: Factors, mesh: Mesh, choices: Mapping[fx.Node, tuple[Choice, ...]], microbatches: int
) -> InputRows:
    """Find the inputs of which a rank needs its own rows alone: all ops that read one want its rows split over the same axes.

    Args:
        module: normal graph.
        factors: its factors.
        mesh: of the choices. With an axis in time that is the major one of every input which is found: an op that wants the rows of all
            micro-batches at once, as to count them, wants some that are not this rank's.
        choices: for each op its choice on every axis.
        microbatches: of the step; they may be batches of their own (`passes.average`), of which the mesh has no axis.
    """
    size = batch_size(module)
    inputs = [node for node in module.graph.find_nodes(op="placeholder") if node.meta["placeholder"].source is Source.INPUT]
    wanted: dict[fx.Node, list[tuple[int, ...]]] = {node: [] for node in inputs if value_spec(Value(node)).shape[:1] == (size,)}
    for node, chosen in choices.items():
        for i, value in enumerate(operands_of(node)):
            if value.node in wanted:
                layout = Layout(mesh, factors.values[value], tuple(choice.operands[i] for choice in chosen))
                wanted[value.node].append(tuple(layout.axes(0, 0)))
    for value in outputs_of(module.graph):
        if value.node in wanted:
            wanted[value.node].append(())
    shared = {node: common for node, axes in wanted.items() if (common := _common(axes)) and mesh.time_axis in (None, common[0])}
    in_time = () if mesh.time_axis is None else (mesh.time_axis,)
    found = _common([axes[len(in_time) :] for axes in shared.values()])
    split = RowSplit(tuple(mesh.names[axis] for axis in found), microbatches if found else 1)
    return InputRows(split, dict.fromkeys(shared, (*in_time, *found)) if found else {})


def _common(axes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all begin with."""
    count = 0
    while axes and all(own[count : count + 1] == axes[0][count : count + 1] != () for own in axes):
        count += 1
    return axes[0][:count] if axes else ()


def _name(node: fx.Node) -> str:
    name: str = node.meta["placeholder"].name
    return name
