"""Which activations are alive when: memory of a training step over time, as counts that prices multiply.

At the backward of op ``t`` a rank holds what the ops up to ``t`` keep for their backward, and the gradients (forward: the values) that cross
``t``. Views share the storage of what they view. A value that is resharded for an op that keeps it is kept as the copy too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import fx

from autopar.cost.pricing import Pricer, local_bytes, saved_values
from autopar.graph import Value, operands_of, outputs_of, specs_of, value_spec
from autopar.solve.problem import Problem

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


@dataclass(slots=True)
class Liveness:
    """Lives of all stored values of a problem's module, and where kept copies may be made."""

    spans: list[Span]
    copies: list[tuple[int, tuple[fx.Node, int]]]
    """Position of the op and its (shared) operand, for each operand that the op keeps."""
    length: int
    gathers: list[tuple[int, fx.Node]] = field(default_factory=list)
    """Position of the op and the (shared) parameter that it uses."""

    def counts_at(self, t: int) -> tuple[Counter[Value], Counter[tuple[fx.Node, int]]]:
        """How many of each shared value, and of each shared kept operand, are alive at ``t``."""
        values: Counter[Value] = Counter()
        for span in self.spans:
            if span.start <= t:
                values[span.value] += span.kept + (span.end >= t)
        return values, Counter(operand for position, operand in self.copies if position <= t)

    def profile(self, value_bytes: Callable[[Value], float], copy_bytes: Callable[[tuple[fx.Node, int]], float], gather_bytes: Callable[[fx.Node], float]) -> np.ndarray:
        """Bytes of activations (and gathered copies of single uses) on a rank at every op."""
        change = np.zeros(self.length + 2)
        for span in self.spans:
            num_bytes = value_bytes(span.value)
            if span.kept:
                change[span.start] += num_bytes
            change[span.start] += num_bytes
            change[span.end + 1] -= num_bytes
        for position, operand in self.copies:
            change[position] += copy_bytes(operand)
        for position, parameter in self.gathers:
            num_bytes = gather_bytes(parameter)
            change[position] += num_bytes
            change[position + 1] -= num_bytes
        return np.cumsum(change)[: self.length]


def find_liveness(problem: Problem) -> Liveness:
    """Walk the module once; values and operands are named by their shared ones."""
    rules = problem.factors.rules
    calls = [node for node in problem.module.graph.nodes if node.op == "call_function" and node in problem.shared]
    position = {node: i for i, node in enumerate(calls)}
    roots: dict[Value, Value] = {}
    spans: dict[Value, Span] = {}
    copies, gathers = [], []

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
        kept_operands, kept_results = saved_values(node, rules.get(node))
        for i in kept_operands:
            if operands[i] in roots:
                spans[roots[operands[i]]].kept = True
                copies.append((t, (problem.shared[node], i)))
        for i in kept_results:
            if Value(node, i) in spans:
                spans[Value(node, i)].kept = True
        for value in operands:
            if value.node.op == "placeholder" and value.node in problem.shared:
                gathers.append((t, problem.shared[value.node]))
    for value in outputs_of(problem.module.graph):
        if value in roots:
            spans[roots[value]].end = len(calls)
    return Liveness(list(spans.values()), copies, len(calls), gathers)


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


def memory_use(problem: Problem, liveness: Liveness, pricer: Pricer, variants: Sequence[int]) -> MemoryUse:
    """Peak memory of a full assignment (one variant per cluster)."""
    kinds = np.zeros(4)
    for cluster, variant in zip(problem.clusters, variants, strict=True):
        if cluster.leader.op == "placeholder":
            held = cluster.gives(Value(cluster.leader), variant)
            kinds += cluster.multiplicity * np.array(pricer.parameter_bytes(specs_of(cluster.leader)[0], held))

    def value_bytes(value: Value) -> float:
        index = problem.cluster_of[value.node]
        return local_bytes(value_spec(value), problem.clusters[index].gives(value, variants[index]), problem.mesh)

    def copy_bytes(operand: tuple[fx.Node, int]) -> float:
        node, i = operand
        target = problem.cluster_of[node]
        if operand not in problem.clusters[target].choices[0][0].wants:
            return 0.0
        value = operands_of(node)[i]
        source_node = problem.shared[value.node]
        source = problem.cluster_of[source_node]
        wants = problem.clusters[target].wants(operand, variants[target])
        gives = problem.clusters[source].gives(Value(source_node, value.index), variants[source])
        moved = any(g != w and not (g.holds_whole and w.holds_whole) for g, w in zip(gives, wants, strict=True))  # type: ignore[union-attr]
        return local_bytes(value_spec(value), wants, problem.mesh) if moved else 0.0

    def gather_bytes(node: fx.Node) -> float:
        index = problem.cluster_of[node]
        held = problem.clusters[index].gives(Value(node), variants[index])
        spec = specs_of(node)[0]
        return local_bytes(spec, held, problem.mesh) if any(str(h) == "Z3" for h in held) else 0.0

    profile = liveness.profile(value_bytes, copy_bytes, gather_bytes)
    peak = int(np.argmax(profile)) if len(profile) else 0
    return MemoryUse(*kinds, float(profile[peak]) if len(profile) else 0.0, peak)
