"""The walk over a module that finds the lives of its values (`solve.liveness`).

What is computed again in the backward keeps what it is made of: of a view that is made again, what it views. Of a product of elements the
gradients come one after the other, and what the first of them read last is gone when the second comes. The gradient of what is only
summed up is that of the sum spread out, which kernels of products and norms make whole. Of inputs of the model their parts are kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import fx

from autopar.capture.trace import Source
from autopar.cost.compute import node_cost
from autopar.cost.pricing import saved_values
from autopar.graph import Value, operands_of, outputs_of, specs_of, value_spec
from autopar.passes.buckets import BUCKET_NUM_BYTES, SMALL_NUM_BYTES
from autopar.passes.overlap import IN_FLIGHT, REDUCE_SCATTER
from autopar.solve.liveness import Again, Given, Interval, InTwo, Keeper, Kept, Liveness, Span, Staging, Uses, Wanted
from autopar.solve.problem import Edge, Problem
from autopar.solve.split_lives import Walked, halve
from autopar.solve.views import is_view

aten = torch.ops.aten

_SUMS = (aten.sum.default, aten.sum.dim_IntList)


def find_liveness(problem: Problem, *, training: bool = True, staging: Staging | None = None) -> Liveness:
    """Walk the module once; without training nothing is kept, without staging there is one stage and one micro-batch in flight.

    Problems that differ in the number of micro-batches alone share their walks: that only decides how large the outputs are.
    """
    key = training, problem.microbatches == 1, staging.key if staging is not None else None
    walk = problem.walks.get(key)
    if walk is None:
        walk = problem.walks[key] = _Walk(problem, training, staging)
        walk.run()
    return replace(walk.live, given=[given for _, given in walk.given(problem)])


class _Walk:
    """One walk over the ops.

    ``roots`` are the values whose storage values share; ``read`` has for what is computed again, as it is wanted, the positions whose
    backward reads it so.
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
        self.read: dict[Wanted, list[int]] = {}
        self.used: dict[int, list[fx.Node]] = {}
        self.through_views: dict[int, list[fx.Node]] = defaultdict(list)
        self.saved: dict[fx.Node, tuple[list[int], list[int]]] = {}
        self.weights: set[int] = set()
        self.biases: set[int] = set()
        self.biased: set[int] = set()
        self.kernels: set[fx.Node] = set()
        self.twice: dict[int, Value] = {}
        self.reads: dict[Value, list[int]] = defaultdict(list)
        self.in_two = staging is not None and staging.in_two and training
        self.live = _stages(problem, self.position, staging)

    def run(self) -> None:
        for node, t in self.position.items():
            self._store(node, t)
            self._keep(node, t)
            if self.training:
                self._leave(node, t)
        live = self.live
        reads = Counter(self.roots[value] for (value, _), positions in self.read.items() for _ in positions)
        for node, t in self.position.items() if self.training else ():
            self._shorten(node, t, reads)
            self._view(node, t)
        for value, given in self.given(self.problem):
            live.joins.append((max(t for t, stage in enumerate(live.stage_at) if stage == given.stage), self._shared(value)))
        live.spans.extend(self.spans.values())
        latest = self._latest()
        live.gathers.extend((t, self.problem.shared[parameter]) for t, parameter in self._gathered(latest))
        self._add_reductions()
        self._add_rows()
        self._add_again(latest)
        for value, keepers in self.kept.items():
            end = self.spans[self.roots[value]].end if value in self.roots else self.reads[value][-1]
            live.kept.append(Kept(self._shared(value), tuple(keepers), self.repeats.get(value.node, 1), end))
        if self.in_two:
            self.live = replace(live, in_two=self._halved())

    def _latest(self) -> dict[fx.Node, int]:
        """For every op that is computed again the last position whose backward wants it, or what is made of it in its block."""
        latest: dict[fx.Node, int] = defaultdict(int)
        for (value, _), positions in self.read.items():
            root = self.roots[value].node
            latest[root] = max(latest[root], *positions)
        for node in sorted(self.again, key=self.position.__getitem__, reverse=True):
            for value in operands_of(node) if node in latest else ():
                if self.again.get(value.node) == self.again[node]:
                    latest[value.node] = max(latest[value.node], latest[node])
        return latest

    def _gathered(self, latest: Mapping[fx.Node, int]) -> Iterator[tuple[int, fx.Node]]:
        """Positions of ops with the parameters of which there is a copy then, if it is gathered for each use: those that the op uses, in
        the backward also those of the one before it, which are gathered one ahead, and those of ops that are computed again and have
        their own backward to come."""
        used = {t: (*self.used.get(t, ()), *self.through_views.get(t, ())) for t in sorted({*self.used, *self.through_views})}
        there = {t: dict.fromkeys(parameters) for t, parameters in used.items()}
        for before, t in pairwise(used) if self.training else ():
            if self.live.stage_at[before] == self.live.stage_at[t]:
                there[t].update(dict.fromkeys(used[before]))
        for node, t in self.position.items():
            for later in range(t + 1, latest.get(node, t) + 1) if t in used else ():
                there.setdefault(later, {}).update(dict.fromkeys(used[t]))
        return ((t, parameter) for t, parameters in there.items() for parameter in parameters)

    def _add_reductions(self) -> None:
        """Whole gradients at the ops that make them in the backward, and those in flight."""
        live, used = self.live, self.used
        in_flight: deque[tuple[int, fx.Node]] = deque(maxlen=IN_FLIGHT[REDUCE_SCATTER])
        for t in sorted(used, reverse=True) if self.training else ():
            stage, shared = live.stage_at[t], [self.problem.shared[parameter] for parameter in used[t]]
            live.reductions.extend((t, parameter) for at, parameter in in_flight if at == stage)
            live.reductions.extend((t, parameter) for parameter in shared)
            in_flight.extend((stage, parameter) for parameter in shared if not _is_in_row(parameter))

    def _add_rows(self) -> None:
        """Vectors that travel together: in the backward until the last is taken out of the row; their gradients until the last of them is
        there, and is put in a row with the others."""
        uses: dict[_Use, list[int]] = defaultdict(list)
        for t in sorted({*self.used, *self.through_views}):
            for parameter in (*self.used.get(t, ()), *self.through_views.get(t, ())):
                if _is_in_row(parameter):
                    uses[_Use(self.live.stage_at[t], parameter)].append(t)
        for row in _rows(uses):
            there = min(uses[use][0] for use in row) + 1, max(uses[use][-1] for use in row)
            self.live.gathered_rows.extend((there, self.problem.shared[use.parameter]) for use in row if there[0] <= there[1])
        for row in _rows(reversed(uses)) if self.training else ():
            end = min(uses[use][0] for use in row)
            for use in row:
                waits = [(end, end), (end, uses[use][0] - 1)]
                self.live.reduced_rows.extend((there, self.problem.shared[use.parameter]) for there in waits if there[0] <= there[1])

    def _add_again(self, latest: Mapping[fx.Node, int]) -> None:
        """What is computed again: from where it is first wanted, be it to compute more of its block, to where it is read last; as made,
        until all that is gathered is there."""
        used: dict[Wanted, int] = defaultdict(int)
        for node, last in latest.items():
            for i, value in enumerate(operands_of(node)):
                if value in self.roots and self.roots[value].node in self.again:
                    wanted = self._wanted(value, node, i)
                    used[wanted] = max(used[wanted], last)
        places: dict[Value, list[tuple[Interval, Keeper]]] = defaultdict(list)
        made: dict[Value, list[int]] = defaultdict(list)
        for (value, edge), positions in self.read.items():
            root, first, last = self.roots[value], min(positions), max(*positions, used[value, edge])
            if edge is not None:
                places[value].append(((first, last if value == root else latest[root.node]), edge))  # a view stands for what it views
                self.live.scattered.append((first, edge))
                if last in positions and last in self.biased:
                    self.live.joined.append((last, edge))
            if edge is None or (value == root and last < latest[root.node]):
                made[root].append(first if edge is None else last)
        for value, own in places.items():
            if (root := self.roots[value]) != value and root in made:
                made[root] += (first for (first, _), _ in own)
        for root, positions in made.items():
            places[root].append(((min(positions), latest[root.node]), None))
        for value, own in places.items():
            is_beside = self.roots[value] != value and self.roots[value] in made
            self.live.again.append(Again(self._shared(value), tuple(own), is_beside))

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
                wanted=self._wanted,
                kernels=self.kernels,
                twice=self.twice,
            ),
            self.live.kept,
        )

    def _edge(self, value: Value, node: fx.Node, operand: int) -> Keeper:
        """Over which an op gets an operand; None if it takes it as it is made."""
        return self.edges.get((self._shared(value), (self.problem.shared[node], operand)))

    def _wanted(self, value: Value, node: fx.Node, operand: int) -> Wanted:
        """As what an op wants an operand that another makes."""
        edge = self._edge(value, node, operand)
        return (self.roots[value] if edge is None else value), edge

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
                of_parameter = is_view(node) and operands[0].node.op == "placeholder" and not is_input(operands[0].node)
                viewed = () if of_parameter and not value_spec(value).requires_grad else None
                self.spans[value] = Span(self._shared(value), t, t, in_forward=not of_parameter, viewed=viewed)
        if node.target is aten.cross_entropy_loss.default:  # its backward has two gradients of what it reads
            self.live.spans.append(Span(self._shared(operands[0]), t, t))
            self.twice[t] = operands[0]
        for value in operands:
            self.reads[self.roots.get(value, value)].append(t)
            if value in self.roots:
                span = self.spans[self.roots[value]]
                span.end = t
                if not span.in_forward:
                    self.through_views[t].append(operands_of(self.roots[value].node)[0].node)
            elif value.node.op == "placeholder" and value.node in self.problem.shared:
                self.used.setdefault(t, []).append(value.node)

    def _keep(self, node: fx.Node, t: int) -> None:
        """What its backward needs, or if that computes it again, what it is made of."""
        operands, same = operands_of(node), self.problem.shared[node]
        if same not in self.saved:
            self.saved[same] = saved_values(node, self.problem.factors.rules.get(node)) if self.training else ([], [])
        kept_operands, kept_results = self.saved[same]
        is_again = node in self.again
        for i in kept_results:
            if is_again:
                self.read.setdefault((self.roots[Value(node, i)], None), []).append(t)
            else:
                self.kept.setdefault(Value(node, i), []).append((t, None))
        made_of = [] if is_view(node) else range(len(operands))
        for i in made_of if is_again else kept_operands:
            value, root = operands[i], self.roots.get(operands[i])
            if not is_input(value.node) if root is None else not self.spans[root].in_forward:
                continue
            if root is None or root.node not in self.again:
                stored, by = self._stored(value, self._edge(value, node, i))
                self.kept.setdefault(stored, []).append((t, by))
            elif i in kept_operands:
                self.read.setdefault(self._wanted(value, node, i), []).append(t)

    def _stored(self, value: Value, by: Keeper) -> tuple[Value, Keeper]:
        """What is kept for a value: of a view that is made again, what it views."""
        while value.node in self.again and is_view(value.node):
            viewed = operands_of(value.node)[0]
            value, by = viewed, self._edge(viewed, value.node, 0)
        return value, by

    def _shorten(self, node: fx.Node, t: int, reads: Mapping[Value, int]) -> None:
        """Of a product of elements the gradient of the second factor comes when that of the first is there, and the second factor gone."""
        factors = operands_of(node) if node.target is aten.mul.Tensor else []
        if len(factors) != 2 or not all(value in self.spans and value_spec(value).requires_grad for value in factors):
            return
        if len(self.kept.get(factors[1], ())) + reads.get(factors[1], 0) == 1 and self.spans[factors[1]].end == t:
            self.spans[factors[1]].end = t - 1

    def _view(self, node: fx.Node, t: int) -> None:
        """Tell which gradient that an op gives has no storage of its own: of a sum that of what it reads, of two summands that of the later
        one, if that of the other is there as long."""
        values = [value for value in operands_of(node) if value in self.spans and value_spec(value).requires_grad]
        if len(values) == 2 and node.target is aten.add.Tensor and len({value_spec(value).shape for value in values}) == 1:
            first, value = sorted(values, key=lambda value: self.spans[value].start)
            if any(self.spans[value].start < at < t for at in self.reads[first]):
                return  # which adds to the gradient, and so makes another
        elif node.target in _SUMS and values:
            (value,) = values
            cost = node_cost(value.node, self.problem.factors.rules.get(value.node))
            if cost.is_matmul or cost.hidden_bytes != 0:
                return
        else:
            return
        span = self.spans[value]
        if self.reads[value] == [t] and self.live.stage_at[span.start] == self.live.stage_at[t]:
            edges = (self._edge(value, node, i) for i, value in enumerate(operands_of(node)) if value in values)
            span.viewed = tuple(edge for edge in edges if edge is not None)

    def _leave(self, node: fx.Node, t: int) -> None:
        """What an op keeps of its own, over which edges its gradients go back, and what those of its weights need."""
        if not any(spec.requires_grad for spec in specs_of(node)):
            return
        edges: dict[Value, list[Edge]] = defaultdict(list)
        for i, value in enumerate(operands_of(node)):
            if value in self.roots and value_spec(value).requires_grad and (edge := self._edge(value, node, i)) is not None:
                edges[self._shared(value)].append(edge)
        self.live.resharded.extend((t, value, tuple(dict.fromkeys(own))) for value, own in edges.items())
        if any(_has_own_gradient(node, value) for value in operands_of(node)):
            self.weights.add(t)
        if node.target is aten.add.Tensor and any(_is_trained(value) for value in operands_of(node)):
            self.biases.add(t)
            self.biased.update(self.position[value.node] for value in operands_of(node) if value.node in self.position)
        if node not in self.again:
            self.live.hidden.append((t, self.problem.shared[node], self.repeats.get(node, 1)))
        elif self.in_two and node_cost(node, self.problem.factors.rules.get(node)).hidden_bytes != 0:
            self.kernels.add(node)

    def given(self, problem: Problem) -> Iterator[tuple[Value, Given]]:
        """The outputs that ops make, of as many micro-batches as a problem has."""
        split, microbatches = problem.split, problem.microbatches
        for i, value in enumerate(outputs_of(problem.module.graph)):
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


class _Use(NamedTuple):
    """A parameter in a stage."""

    stage: int
    parameter: fx.Node


def _is_in_row(parameter: fx.Node) -> bool:
    """Whether it travels with others (`passes.vectors`), whatever axes it is split on."""
    spec = specs_of(parameter)[0]
    return spec.is_vector and spec.num_bytes < SMALL_NUM_BYTES


def _rows(uses: Iterable[_Use]) -> Iterator[list[_Use]]:
    """Those of a stage that make a row, in order."""
    coming: dict[int, list[_Use]] = defaultdict(list)
    for use in uses:
        row = coming[use.stage]
        row.append(use)
        if sum(specs_of(use.parameter)[0].num_bytes for use in row) >= BUCKET_NUM_BYTES:
            yield coming.pop(use.stage)
    yield from (row for row in coming.values() if len(row) > 1)


def _has_own_gradient(node: fx.Node, weight: Value) -> bool:
    """Whether the gradient of a weight is worked out by itself; that of a norm or a convolution is by the kernel that gives the gradient of
    its input, and that of a bias wants nothing but what the product before it wants."""
    if not _is_trained(weight) or str(node.target).startswith("aten.conv"):
        return False
    return len(value_spec(weight).shape) > 1 or node.target is aten.mul.Tensor


def is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["placeholder"].source is Source.INPUT


def _is_trained(value: Value) -> bool:
    return value.node.op == "placeholder" and value_spec(value).requires_grad


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
