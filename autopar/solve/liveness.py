"""Which activations are alive when: memory of a training step over time, as counts that prices multiply.

At the backward of op ``t`` a rank holds what the ops up to ``t`` keep for their backward, and the gradients (forward: the values) that
cross ``t``. Views share the storage of what they view. A value is kept as the ops that keep it want it, once for each layout, and as it is
made only if one of them takes it so. What an op keeps beside its operands and results (dropout masks, statistics) counts too.

With pipeline stages each stage is a rank's memory of its own: its parameters, what its ops keep for every micro-batch in flight, and what
crosses ``t`` in one of them. The stage that needs most counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import fx

from autopar.cost.pricing import Pricer, local_bytes, saved_values
from autopar.graph import Value, operands_of, outputs_of, specs_of, value_spec
from autopar.layout import REPLICATED, Placement
from autopar.solve.problem import Edge, Problem, local_sizes
from autopar.storage import Held, Stored

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
    """Life of one stored value: made at ``start``, last used forward at ``end``."""

    value: Value
    start: int
    end: int


Keeper = Edge | None
"""Over which edge an op gets the value that it keeps; None if it takes it as it is made."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One (shared) value that is kept for the backward: from which positions on, by whom, how many times."""

    value: Value
    keepers: tuple[tuple[int, Keeper], ...]
    times: int


@dataclass(frozen=True, slots=True)
class Alive:
    """How many of each thing are alive at an op, by shared name."""

    values: Counter[Value]
    kept: Counter[tuple[Value, tuple[Keeper, ...]]]
    hidden: Counter[fx.Node]
    gathers: Counter[fx.Node]
    parameters: Counter[fx.Node]


@dataclass(frozen=True, slots=True)
class Staging:
    """Which ops run where, for the memory of each stage.

    Args:
        stage_of: stage of every op that has one (`passes.stages`).
        live: for each stage the micro-batches in flight, at most.
        again: ops that are computed again in the backward, with their block; what they give is alive only while the block is at work.
        repeats: how many nodes of the stage a node stands for, where it is more than one.
    """

    stage_of: Mapping[fx.Node, int]
    live: tuple[int, ...]
    again: Mapping[fx.Node, int] = field(default_factory=dict)
    repeats: Mapping[fx.Node, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Liveness:
    """Lives of all stored values of a problem's module; positions number its ops.

    Args:
        length: number of ops.
        spans: of the values.
        kept: the values that are kept, views apart from what they view.
        hidden: position of an op that keeps something of its own, the (shared) op, and how many times.
        gathers: position of an op and a (shared) parameter that it uses.
        stage_at: stage of every op.
        live: for each stage the micro-batches in flight.
        parameters: for each stage how many of each (shared) placeholder it holds.
    """

    length: int
    spans: list[Span]
    kept: list[Kept]
    hidden: list[tuple[int, fx.Node, int]]
    gathers: list[tuple[int, fx.Node]]
    stage_at: list[int]
    live: tuple[int, ...]
    parameters: tuple[Counter[fx.Node], ...]

    def at(self, t: int) -> Alive:
        """What its stage holds at the op ``t``: all of one micro-batch up to there, and what it keeps of the others in flight."""
        stage = self.stage_at[t] if self.stage_at else 0
        kept: Counter[tuple[Value, tuple[Keeper, ...]]] = Counter()
        hidden: Counter[fx.Node] = Counter()
        for last, times in ((t, 1), (self.length, self.live[stage] - 1)):
            for k in self.kept:
                keepers = tuple(dict.fromkeys(by for at, by in k.keepers if at <= last and self.stage_at[at] == stage))
                if keepers and times:
                    kept[k.value, keepers] += times * k.times
            for at, node, count in self.hidden:
                if at <= last and self.stage_at[at] == stage and times:
                    hidden[node] += times * count
        return Alive(
            Counter(span.value for span in self.spans if span.start <= t <= span.end),
            kept,
            hidden,
            Counter(node for position, node in self.gathers if position == t),
            self.parameters[stage],
        )


def find_liveness(problem: Problem, *, training: bool = True, staging: Staging | None = None) -> Liveness:
    """Walk the module once; without training nothing is kept, without staging there is one stage and one micro-batch in flight."""
    rules = problem.factors.rules
    calls = [node for node in problem.module.graph.nodes if node.op == "call_function" and node in problem.shared]
    position = {node: i for i, node in enumerate(calls)}
    edges = {(edge.value, edge.operand): edge for edge in problem.edges}
    roots: dict[Value, Value] = {}
    spans: dict[Value, Span] = {}
    kept: dict[Value, list[tuple[int, Keeper]]] = {}
    live = Liveness(len(calls), [], [], [], [], *_stages(problem, calls, staging))
    again = staging.again if staging is not None else {}
    repeats = staging.repeats if staging is not None else {}
    passing: dict[tuple[Value, int], None] = {}
    saved: dict[fx.Node, tuple[list[int], list[int]]] = {}

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
        same = problem.shared[node]
        if same not in saved:
            saved[same] = saved_values(node, rules.get(node)) if training else ([], [])
        kept_operands, kept_results = saved[same]
        if node in again:  # all that it is made of must be there
            kept_operands, kept_results = list(range(len(operands))), []
        for i in kept_operands:
            root = roots.get(operands[i])
            if root is not None and root.node in again:
                passing[root, again[root.node]] = None
            elif root is not None:
                kept.setdefault(operands[i], []).append((t, edges.get((shared(operands[i]), (problem.shared[node], i)))))
        for i in kept_results:
            kept.setdefault(Value(node, i), []).append((t, None))
        if training and node not in again and any(spec.requires_grad for spec in specs_of(node)):
            live.hidden.append((t, problem.shared[node], repeats.get(node, 1)))
    for value in outputs_of(problem.module.graph):
        if value in roots:
            spans[roots[value]].end = len(calls)
    live.spans.extend(spans.values())
    for root, block in passing:
        within = [position[node] for node, own in again.items() if own == block]
        live.spans.append(Span(shared(root), min(within), max(within)))
    live.kept.extend(Kept(shared(value), tuple(keepers), repeats.get(value.node, 1)) for value, keepers in kept.items())
    return live


def _stages(
    problem: Problem, calls: Sequence[fx.Node], staging: Staging | None
) -> tuple[list[int], tuple[int, ...], tuple[Counter[fx.Node], ...]]:
    """Stage of every call, micro-batches in flight, and placeholders of every stage; what has no stage counts with the op before."""
    placeholders = [node for node in problem.module.graph.find_nodes(op="placeholder") if node in problem.shared]
    if staging is None:
        return [0] * len(calls), (1,), (Counter(problem.shared[node] for node in placeholders),)
    stage_at: list[int] = []
    used: dict[fx.Node, set[int]] = {node: set() for node in placeholders}
    for node in calls:
        stage = staging.stage_of.get(node, stage_at[-1] if stage_at else 0)
        stage_at.append(stage)
        for value in operands_of(node):
            if value.node in used:
                used[value.node].add(stage)
    held: tuple[Counter[fx.Node], ...] = tuple(Counter() for _ in staging.live)
    for node, stages in used.items():
        for stage in stages or range(len(held)):
            held[stage][problem.shared[node]] += staging.repeats.get(node, 1)
    return stage_at, staging.live, held


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes per rank of a step, by kind; ``position`` is the op at whose backward the peak is, ``kept`` what one micro-batch keeps."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    position: int
    kept: float

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
        self._keepers: dict[tuple[Value, Keeper], tuple[int, list[tuple[Placement, ...]]]] = {}
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

    def keeper(self, value: Value, by: Keeper) -> tuple[int, list[tuple[Placement, ...]]]:
        """The cluster that says how a value is kept, and in which layout for each of its variants."""
        if (value, by) not in self._keepers:
            index = self.problem.cluster_of[value.node] if by is None or by.target is None else by.target
            cluster = self.problem.clusters[index]
            layouts = [
                cluster.gives(value, v) if by is None or by.operand is None else cluster.wants(by.operand, v)
                for v in range(len(cluster.variants))
            ]
            self._keepers[value, by] = index, [tuple(_without_gradient(p) for p in layout) for layout in layouts]
        return self._keepers[value, by]

    def kept_bytes(self, value: Value, layout: Sequence[Placement]) -> float:
        return local_bytes(value_spec(value), layout, self.problem.mesh)

    def use(self, variants: Sequence[int]) -> MemoryUse:
        """Peak memory of a full assignment (one variant per cluster), at the stage that needs most."""
        return max(self.uses(variants), key=lambda use: use.total)

    def uses(self, variants: Sequence[int]) -> list[MemoryUse]:
        """Peak memory of every stage."""
        cluster_of, live = self.problem.cluster_of, self.liveness
        length = max(1, live.length)
        crossing, kept = np.zeros(length + 2), np.zeros(length)
        for span in live.spans:
            num_bytes = self.values[span.value][variants[cluster_of[span.value.node]]]
            crossing[span.start] += num_bytes
            crossing[span.end + 1] -= num_bytes
        for entry in live.kept:
            layouts = set()
            for position, by in entry.keepers:
                index, choices = self.keeper(entry.value, by)
                key = live.stage_at[position], choices[variants[index]]
                if key not in layouts:
                    layouts.add(key)
                    kept[position] += entry.times * self.kept_bytes(entry.value, choices[variants[index]])
        for position, node, times in live.hidden:
            kept[position] += times * self.hidden[node][variants[cluster_of[node]]]
        for position, node in live.gathers:
            num_bytes = self.gathers[node][variants[cluster_of[node]]]
            crossing[position] += num_bytes
            crossing[position + 1] -= num_bytes
        alive = np.cumsum(crossing)[:length]
        stage_at = np.array(live.stage_at or [0])
        uses = []
        for stage, count in enumerate(live.live):
            own = kept * (stage_at == stage)
            profile = np.where(stage_at == stage, alive + np.cumsum(own), -1.0)
            peak = int(np.argmax(profile))
            kinds = np.zeros(4)
            for node, times in live.parameters[stage].items():
                index = cluster_of[node]
                kinds += times * self.parameters[index][variants[index]]
            parameters, gradients, optimizer, gathered = map(float, kinds)
            activations = float(max(0.0, profile[peak]) + (count - 1) * own.sum())
            uses.append(MemoryUse(parameters, gradients, optimizer, gathered, activations, peak, float(own.sum())))
        return uses


def _without_gradient(held: Held) -> Placement:
    assert isinstance(held, Placement), "values of ops are not stored"
    return REPLICATED if held.holds_whole else held
