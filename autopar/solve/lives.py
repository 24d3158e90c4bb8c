"""The walk over a module that finds the lives of its values (`solve.liveness`).

What is computed again in the backward keeps what it is made of: of a view that is made again, what it views. Of a product of elements the
gradients come one after the other, and what the first of them read last is gone when the second comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import fx

from autopar.cost.compute import node_cost
from autopar.cost.pricing import saved_values
from autopar.graph import Value, operands_of, outputs_of, specs_of, value_spec
from autopar.passes.overlap import IN_FLIGHT, REDUCE_SCATTER
from autopar.solve.in_two import Walked, halve
from autopar.solve.liveness import Given, InTwo, Keeper, Kept, Liveness, Span, Staging, Uses
from autopar.solve.problem import Problem
from autopar.solve.views import is_view

aten = torch.ops.aten


def find_liveness(problem: Problem, *, training: bool = True, staging: Staging | None = None) -> Liveness:
    """Walk the module once; without training nothing is kept, without staging there is one stage and one micro-batch in flight."""
    return _Walk(problem, training, staging).run()


class _Walk:
    """One walk over the ops.

    ``roots`` are the values whose storage values share; ``read`` has for each that is computed again the positions whose backward reads it.
    """

    def __init__(self, problem: Problem, training: bool, staging: Staging | None) -> None:
        self.problem, self.training = problem, training
        calls = [node for node in problem.module.graph.nodes if node.op == "call_function" and node in problem.shared]
        self.position = {node: t for t, node in enumerate(calls)}
        self.edges = {(use.edge.value, use.operand): use.edge for use in problem.uses}
        self.again = staging.again if staging is not None else {}
        self.repeats = staging.repeats if staging is not None else {}
        self.roots: dict[Value, Value] = {}
        self.spans: dict[Value, Span] = {}
        self.kept: dict[Value, list[tuple[int, Keeper]]] = {}
        self.read: dict[Value, list[int]] = {}
        self.used: dict[int, list[fx.Node]] = {}
        self.saved: dict[fx.Node, tuple[list[int], list[int]]] = {}
        self.weights: set[int] = set()
        self.biases: set[int] = set()
        self.kernels: set[fx.Node] = set()
        self.twice: dict[int, Value] = {}
        self.in_two = staging is not None and staging.in_two and training
        self.live = _stages(problem, self.position, staging)

    def run(self) -> Liveness:
        for node, t in self.position.items():
            self._store(node, t)
            self._keep(node, t)
            if self.training:
                self._leave(node, t)
        live = self.live
        for node, t in self.position.items() if self.training else ():
            self._shorten(node, t)
        for value, given in self._given():
            live.given.append(given)
            live.joins.append((max(t for t, stage in enumerate(live.stage_at) if stage == given.stage), self._shared(value)))
        _add_ahead(live, self.used, training=self.training)
        live.spans.extend(self.spans.values())
        latest = _latest(self.read, self.again, self.position)
        live.spans.extend(Span(self._shared(root), min(reads), latest[root.node], is_again=True) for root, reads in self.read.items())
        for value, keepers in self.kept.items():
            end = self.spans[self.roots[value]].end
            live.kept.append(Kept(self._shared(value), tuple(keepers), self.repeats.get(value.node, 1), end))
        return replace(live, in_two=self._halved()) if self.in_two else live

    def _halved(self) -> InTwo:
        return halve(
            Walked(
                position=self.position,
                stage_at=self.live.stage_at,
                roots=self.roots,
                spans=self.spans,
                read=self.read,
                again=self.again,
                weights=self.weights,
                biases=self.biases,
                edges=self._edge,
                kernels=self.kernels,
                twice=self.twice,
            ),
            self.live.kept,
        )

    def _edge(self, value: Value, node: fx.Node, operand: int) -> Keeper:
        """Over which an op gets an operand; None if it takes it as it is made."""
        return self.edges.get((self._shared(value), (self.problem.shared[node], operand)))

    def _shared(self, value: Value) -> Value:
        return Value(self.problem.shared.get(value.node, value.node), value.index)

    def _store(self, node: fx.Node, t: int) -> None:
        """What an op makes, and the last uses of what it reads."""
        operands = operands_of(node)
        for index, _ in enumerate(specs_of(node)):
            value = Value(node, index)
            aliased = is_view(node) and operands[0].node in self.position
            self.roots[value] = self.roots[operands[0]] if aliased else value
            if not aliased:
                self.spans[value] = Span(self._shared(value), t, t)
        if node.target is aten.cross_entropy_loss.default:  # its backward has two gradients of what it reads
            self.live.spans.append(Span(self._shared(operands[0]), t, t))
            self.twice[t] = operands[0]
        for value in operands:
            if value in self.roots:
                self.spans[self.roots[value]].end = t
            elif value.node.op == "placeholder" and value.node in self.problem.shared:
                self.used.setdefault(t, []).append(self.problem.shared[value.node])

    def _keep(self, node: fx.Node, t: int) -> None:
        """What its backward needs, or if that computes it again, what it is made of."""
        operands, same = operands_of(node), self.problem.shared[node]
        if same not in self.saved:
            self.saved[same] = saved_values(node, self.problem.factors.rules.get(node)) if self.training else ([], [])
        kept_operands, kept_results = self.saved[same]
        is_again = node in self.again
        for i in kept_results:
            if is_again:
                self.read.setdefault(self.roots[Value(node, i)], []).append(t)
            else:
                self.kept.setdefault(Value(node, i), []).append((t, None))
        made_of = [] if is_view(node) else range(len(operands))
        for i in made_of if is_again else kept_operands:
            value, root = operands[i], self.roots.get(operands[i])
            if root is None:
                continue
            if root.node not in self.again:
                stored, by = self._stored(value, self._edge(value, node, i))
                self.kept.setdefault(stored, []).append((t, by))
            elif i in kept_operands:
                self.read.setdefault(root, []).append(t)

    def _stored(self, value: Value, by: Keeper) -> tuple[Value, Keeper]:
        """What is kept for a value: of a view that is made again, what it views."""
        while value.node in self.again and is_view(value.node):
            viewed = operands_of(value.node)[0]
            value, by = viewed, self._edge(viewed, value.node, 0)
        return value, by

    def _shorten(self, node: fx.Node, t: int) -> None:
        """Of a product of elements the gradient of the second factor comes when that of the first is there, and the second factor gone."""
        factors = operands_of(node) if node.target is aten.mul.Tensor else []
        if len(factors) != 2 or not all(value in self.spans and value_spec(value).requires_grad for value in factors):
            return
        if len(self.kept.get(factors[1], ())) + len(self.read.get(factors[1], ())) == 1 and self.spans[factors[1]].end == t:
            self.spans[factors[1]].end = t - 1

    def _leave(self, node: fx.Node, t: int) -> None:
        """What an op keeps of its own, and what the gradients of its weights need."""
        if not any(spec.requires_grad for spec in specs_of(node)):
            return
        if any(_has_own_gradient(node, value) for value in operands_of(node)):
            self.weights.add(t)
        if node.target is aten.add.Tensor and any(_is_trained(value) for value in operands_of(node)):
            self.biases.add(t)
        if node not in self.again:
            self.live.hidden.append((t, self.problem.shared[node], self.repeats.get(node, 1)))
        elif self.in_two and node_cost(node, self.problem.factors.rules.get(node)).hidden_bytes != 0:
            self.kernels.add(node)

    def _given(self) -> Iterator[tuple[Value, Given]]:
        """The outputs that ops make."""
        split, microbatches = self.problem.split, self.problem.microbatches
        for i, value in enumerate(outputs_of(self.problem.module.graph)):
            if value.node not in self.position:
                continue
            part = float(value_spec(value).num_bytes)
            num_bytes, joined_bytes, sent_bytes = part, 0.0, part
            if split is not None and microbatches > 1:
                is_parted = split.outputs[i].is_sharded
                num_bytes = part if is_parted and not split.is_average else microbatches * part
                joined_bytes = 0.0 if split.outputs[i].holds_whole else num_bytes if is_parted else part
                sent_bytes = joined_bytes or part
            stage = self.live.stage_at[self.position[value.node]]
            yield value, Given(stage, num_bytes, joined_bytes, sent_bytes)


def _has_own_gradient(node: fx.Node, weight: Value) -> bool:
    """Whether the gradient of a weight is worked out by itself; that of a norm or a convolution is by the kernel that gives the gradient of
    its input, and that of a bias wants nothing but what the product before it wants."""
    if not _is_trained(weight) or str(node.target).startswith("aten.conv"):
        return False
    return len(value_spec(weight).shape) > 1 or node.target is aten.mul.Tensor


def _is_trained(value: Value) -> bool:
    return value.node.op == "placeholder" and value_spec(value).requires_grad


def _latest(read: Mapping[Value, Sequence[int]], again: Mapping[fx.Node, int], position: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """For every op that is computed again the last position whose backward wants it, or what is made of it in its block."""
    latest: dict[fx.Node, int] = {}
    for value, positions in read.items():
        latest[value.node] = max(latest.get(value.node, 0), *positions)
    for node in sorted(again, key=position.__getitem__, reverse=True):
        for value in operands_of(node):
            if node in latest and again.get(value.node) == again[node]:
                latest[value.node] = max(latest.get(value.node, 0), latest[node])
    return latest


def _add_ahead(live: Liveness, used: Mapping[int, Sequence[fx.Node]], *, training: bool) -> None:
    """Copies of parameters at the ops that use them, and one op ahead in the backward; whole gradients there, and those in flight."""
    for t, parameters in used.items():
        live.gathers.extend((t, parameter) for parameter in parameters)
    for before, t in pairwise(sorted(used)):
        if training and live.stage_at[before] == live.stage_at[t]:
            live.gathers.extend((t, parameter) for parameter in used[before])
    in_flight: deque[tuple[int, fx.Node]] = deque(maxlen=IN_FLIGHT[REDUCE_SCATTER])
    for t in sorted(used, reverse=True) if training else ():
        stage = live.stage_at[t]
        live.reductions.extend((t, parameter) for at, parameter in in_flight if at == stage)
        live.reductions.extend((t, parameter) for parameter in used[t])
        in_flight.extend((stage, parameter) for parameter in used[t])


def _stages(problem: Problem, position: Mapping[fx.Node, int], staging: Staging | None) -> Liveness:
    """Stage of every op, micro-batches in flight, and parameters of every stage; what has no stage counts with the op before."""
    placeholders = [node for node in problem.module.graph.find_nodes(op="placeholder") if node in problem.shared]
    is_plain = problem.microbatches == 1 and (staging is None or len(staging.live) == 1)
    stages = 1 if staging is None else len(staging.live)
    stage_at: list[int] = []
    at: dict[fx.Node, dict[int, list[int]]] = {node: {} for node in placeholders}
    tables: set[int] = set()
    for node, t in position.items():
        before = stage_at[-1] if stage_at else 0
        stage_at.append(before if staging is None else staging.stage_of.get(node, before))
        if node.target is aten.embedding.default:
            tables.add(t)
        for value in operands_of(node):
            if value.node in at:
                at[value.node].setdefault(stage_at[-1], []).append(t)
    held: tuple[list[Uses], ...] = tuple([] for _ in range(stages))
    for node, places in at.items():
        times = staging.repeats.get(node, 1) if staging is not None else 1
        for stage in places or range(stages):
            own = places.get(stage, [0])
            held[stage].append(Uses(problem.shared[node], own[0], own[-1], times, bool(places) and own[0] in tables))
    live, later, degree = ((1,), (0,), 1) if staging is None else (staging.live, staging.later, staging.degree)
    shares = staging.shares if staging is not None and staging.shares else (1.0,) * stages
    return Liveness(len(position), stage_at, live, later, held, degree, is_plain, shares)
