"""What reductions of gradients send under a decision, compressed or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.compression import Message, Reduction
from autopar.graph import value_spec
from autopar.passes.compress import is_reduction, is_scattered
from autopar.passes.reshard import plan_parameter_steps
from autopar.solve.decide import Decision
from autopar.solve.problem import Edge, Fan
from autopar.solve.ways import Way
from autopar.storage import storage_layout


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """The gradient of a parameter, summed over the ranks of an axis.

    Args:
        exact: the collective that does it without compression.
        compressed: what compression makes of it; None if it stays exact.
        size: ranks of the axis.
    """

    exact: Message
    compressed: Reduction | None
    size: int

    @property
    def sent_bytes(self) -> float:
        """What each rank sends."""
        return self.exact_bytes if self.compressed is None else self.compressed.sent_bytes(self.size)

    @property
    def exact_bytes(self) -> float:
        return self.exact.sent_bytes(self.size)


@dataclass(frozen=True, slots=True)
class GradientTraffic:
    """Of a rank in a step, over all gradients of parameters that are summed over ranks.

    Args:
        count: of reductions; ``num_compressed`` of them travel compressed.
        sent_bytes: that a rank sends for them, by a ring (all_to_all: pairwise); ``exact_bytes`` without compression.
    """

    count: int
    num_compressed: int
    sent_bytes: float
    exact_bytes: float


def gradient_reduction(decision: Decision, edge: Edge, axis: int) -> GradientReduction | None:
    """What happens on an axis to the gradient of a value that goes over an edge; None if it is no parameter, or is not reduced."""
    problem, variants, pricer = decision.problem, decision.solution.variants, decision.prices.pricer
    spec, mesh = value_spec(edge.value), problem.mesh
    if edge.value.node.op != "placeholder" or edge.target is None or edge.operand is None or not (spec.requires_grad and pricer.training):
        return None
    held = problem.clusters[edge.source].gives(edge.value, variants[edge.source])
    wanted = problem.clusters[edge.target].wants(edge.operand, variants[edge.target])
    stored = storage_layout(mesh, problem.factors.of(edge.value.node), held)
    for step in plan_parameter_steps(stored, held, wanted, needs_grad=True):
        if step.axis == axis and is_reduction(step.op, dict(step.arguments)):
            kind, width = "reduce_scatter" if is_scattered(step.op) else "all_reduce", spec.reduced_width
            exact = Message(kind, width * math.prod(step.local_shape))
            how, size = pricer.compression, mesh.sizes[axis]
            found = how.reduction(step.local_shape, width, size, is_scattered=is_scattered(step.op)) if how is not None else None
            return GradientReduction(exact, found, size)
    return None


def gradient_traffic(decision: Decision) -> GradientTraffic:
    """All reductions of gradients of a decision."""
    count, compressed, sent, exact = 0, 0, 0.0, 0.0
    for fan in decision.problem.fans:
        for axis in range(len(decision.problem.mesh.in_space.sizes)):
            for way, edge in ways_of(decision, fan, axis):
                if (found := gradient_reduction(decision, edge, axis)) is not None:
                    times = fan.multiplicity * decision.prices.repeats(edge, way)
                    count, compressed = count + times, compressed + times * (found.compressed is not None)
                    sent, exact = sent + times * found.sent_bytes, exact + times * found.exact_bytes
    return GradientTraffic(count, compressed, sent, exact)


def ways_of(decision: Decision, fan: Fan, axis: int) -> Iterator[tuple[Way, Edge]]:
    """The different ways that a value goes on an axis, each with the first edge that goes it."""
    found: dict[Way, Edge] = {}
    for edge in fan.edges:
        found.setdefault(decision.prices.way(edge, axis, decision.solution.variants), edge)
    yield from found.items()
