"""Which activations are alive when: memory of a training step over time, as counts that prices multiply.

At the backward of op ``t`` a rank holds what the ops up to ``t`` keep for their backward, and the gradients (forward: the values) that
cross ``t``. Views share the storage of what they view. A value that is resharded for an op that keeps it is kept as the copy too, and so is
what an op keeps beside its operands and results (dropout masks, statistics).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from autopar.cost.pricing import Pricer, local_bytes, saved_values
from autopar.graph import Value, operands_of, outputs_of, specs_of, value_spec
from autopar.layout import Placement
from autopar.solve.problem import Edge, Problem, local_sizes
from autopar.storage import Stored

aten = torch.ops.aten

ALIASES = frozenset(
    {
        aten.reshape.default,
        aten.transpose.int,
        aten.permute.default,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
        aten.detach.default,
    }
)
"""Ops whose results share the storage of their operand."""


@dataclass(slots=True)
class Span:
    """Life of one stored value: made at ``start``, last used forward at ``end``, kept for the backward or not."""

    value: Value
    start: int
    end: int
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Alive:
    """How many of each thing are alive at an op, by shared name."""

    values: Counter[Value]
    copies: Counter[Edge]
    hidden: Counter[fx.Node]
    gathers: Counter[fx.Node]


@dataclass(frozen=True, slots=True)
class Liveness:
    """Lives of all stored values of a problem's module; positions number its ops.

    Args:
        length: number of ops.
        spans: of the values.
        copies: position of an op and the edge of an operand that it keeps: a copy is kept if the edge reshards.
        hidden: position of an op that keeps something of its own, and the (shared) op.
        gathers: position of an op and a (shared) parameter that it uses.
    """

    length: int
    spans: list[Span]
    copies: list[tuple[int, Edge]]
    hidden: list[tuple[int, fx.Node]]
    gathers: list[tuple[int, fx.Node]]

    def at(self, t: int) -> Alive:
        values: Counter[Value] = Counter()
        for span in self.spans:
            if span.start <= t:
                values[span.value] += span.kept + (span.end >= t)
        return Alive(
            values,
            Counter(edge for position, edge in self.copies if position <= t),
            Counter(node for position, node in self.hidden if position <= t),
            Counter(node for position, node in self.gathers if position == t),
        )


def find_liveness(problem: Problem, *, training: bool = True) -> Liveness:
    """Walk the module once; without training nothing is kept."""
    rules = problem.factors.rules
    calls = [node for node in problem.module.graph.nodes if node.op == "call_function" and node in problem.shared]
    position = {node: i for i, node in enumerate(calls)}
    edges = {(edge.value, edge.operand): edge for edge in problem.edges}
    roots: dict[Value, Value] = {}
    spans: dict[Value, Span] = {}
    live = Liveness(len(calls), [], [], [], [])

    def shared(value: Value) -> Value:
        return Value(problem.shared.get(value.node, value.node), value.index)

    for node, t in position.items():
        operands = operands_of(node)
        for index, _ in enumerate(specs_of(node)):
            value = Value(node, index)
            aliased = node.target in ALIASES and operands[0].node in position
            roots[value] = roots[operands[0]] if aliased else value
            if not aliased:
                spans[value] = Span(shared(value), t, t)
        for value in operands:
            if value in roots:
                spans[roots[value]].end = t
            elif value.node.op == "placeholder" and value.node in problem.shared:
                live.gathers.append((t, problem.shared[value.node]))
        kept_operands, kept_results = saved_values(node, rules.get(node)) if training else ([], [])
        for i in kept_operands:
            if operands[i] in roots:
                spans[roots[operands[i]]].kept = True
                edge = edges.get((shared(operands[i]), (problem.shared[node], i)))
                if edge is not None:
                    live.copies.append((t, edge))
        for i in kept_results:
            if Value(node, i) in spans:
                spans[Value(node, i)].kept = True
        if training and any(spec.requires_grad for spec in specs_of(node)):
            live.hidden.append((t, problem.shared[node]))
    for value in outputs_of(problem.module.graph):
        if value in roots:
            spans[roots[value]].end = len(calls)
    live.spans.extend(spans.values())
    return live


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes per rank of a step, by kind; ``position`` is the op at whose backward the peak is."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    position: int

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations


class Footprint:
    """Bytes per rank of everything that may be held, for each variant of its cluster, worked out once.

    ``parameters[index]`` has one row of `ParameterBytes` per variant of a placeholder's cluster; the others are by shared name.
    """

    def __init__(self, problem: Problem, pricer: Pricer, liveness: Liveness) -> None:
        self.problem, self.liveness = problem, liveness
        self.parameters: dict[int, np.ndarray] = {}
        self.values: dict[Value, np.ndarray] = {}
        self.gathers: dict[fx.Node, np.ndarray] = {}
        self.hidden: dict[fx.Node, np.ndarray] = {}
        for index, cluster in enumerate(problem.clusters):
            node = cluster.leader
            for value in cluster.choices[0][0].gives:
                held = [cluster.gives(value, v) for v in range(len(cluster.variants))]
                self.values[value] = np.array([local_bytes(value_spec(value), h, problem.mesh) for h in held])
            if node.op == "placeholder":
                self.parameters[index] = np.array([pricer.parameter_bytes(specs_of(node)[0], h) for h in held])
                is_gathered = [Stored(3) in h for h in held]
                self.gathers[node] = self.values[Value(node)] * is_gathered
                continue
            for member in cluster.members:
                sizes = local_sizes(problem, cluster, member)
                self.hidden[member] = pricer.hidden_bytes(member, problem.factors.rules.get(member), sizes, len(cluster.variants))

    def copy_bytes(self, edge: Edge, variants: Sequence[int]) -> float:
        """Of the copy that an edge makes: none if it moves nothing."""
        assert edge.target is not None and edge.operand is not None
        gives = self.problem.clusters[edge.source].gives(edge.value, variants[edge.source])
        wants = self.problem.clusters[edge.target].wants(edge.operand, variants[edge.target])
        is_copied = any(is_copy(held, wanted) for held, wanted in zip(gives, wants, strict=True))
        return local_bytes(value_spec(edge.value), wants, self.problem.mesh) if is_copied else 0.0

    def use(self, variants: Sequence[int]) -> MemoryUse:
        """Peak memory of a full assignment (one variant per cluster)."""
        problem, cluster_of = self.problem, self.problem.cluster_of
        kinds = np.zeros(4)
        for index, rows in self.parameters.items():
            kinds += problem.clusters[index].multiplicity * rows[variants[index]]
        change = np.zeros(self.liveness.length + 2)
        for span in self.liveness.spans:
            num_bytes = self.values[span.value][variants[cluster_of[span.value.node]]]
            change[span.start] += num_bytes * (1 + span.kept)
            change[span.end + 1] -= num_bytes
        for position, edge in self.liveness.copies:
            change[position] += self.copy_bytes(edge, variants)
        for position, node in self.liveness.hidden:
            change[position] += self.hidden[node][variants[cluster_of[node]]]
        for position, node in self.liveness.gathers:
            num_bytes = self.gathers[node][variants[cluster_of[node]]]
            change[position] += num_bytes
            change[position + 1] -= num_bytes
        profile = np.cumsum(change)[: max(1, self.liveness.length)]
        peak = int(np.argmax(profile))
        parameters, gradients, optimizer, gathered = map(float, kinds)
        return MemoryUse(parameters, gradients, optimizer, gathered, float(profile[peak]), peak)


def is_copy(held: object, wanted: Placement) -> bool:
    """Whether a reshard on an axis gives a tensor of its own."""
    return isinstance(held, Placement) and held != wanted and not (held.holds_whole and wanted.holds_whole)
