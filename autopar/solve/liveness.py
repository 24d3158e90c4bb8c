r"""Which values are alive when: memory of a training step over time, as counts that prices multiply (`solve.footprint`).

At the backward of op ``t`` a rank holds what the ops up to ``t`` keep for their backward, and the gradients (forward: the values) that
cross ``t``. Views share the storage of what they view. A value is kept as the ops that keep it want it, once for each layout, and as it is
made only if one of them takes it so. What an op keeps beside its operands and results (dropout masks, statistics) counts too.

Gradients of parameters come one by one in the first backward, and lie there in all others, when fewer micro-batches may be in flight; at
the end of the step they are left alone with the outputs of the model, and with what the optimizer takes for one parameter after the other.
So a stage is looked at in four `Phase`\ s. Stored parameters (ZeRO-3) are gathered one op ahead, and their gradients are whole until they
have been reduced, a few ops later (`passes.overlap`). The copies of ZeRO-2 are made anew by every micro-batch, from its forward to its
backward; those of ZeRO-1 once a step (`passes.prepare`).

With pipeline stages each stage is a rank's memory of its own: its parameters, what its ops keep for every micro-batch in flight, and what
crosses ``t`` in one of them. The stage that needs most counts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import fx

from autopar.cost.pricing import saved_values
from autopar.graph import Value, operands_of, outputs_of, specs_of, value_spec
from autopar.passes.overlap import IN_FLIGHT, REDUCE_SCATTER
from autopar.schedule.actions import Schedule
from autopar.schedule.check import peak_later, peak_live
from autopar.solve.problem import Edge, Problem

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
"""Ops whose results share the storage of their operand, as a rule (`_is_view`)."""


@dataclass(slots=True)
class Span:
    """Life of one stored value: made at ``start``, last used forward at ``end``; if ``is_again``, in the backward that makes it again."""

    value: Value
    start: int
    end: int
    is_again: bool = False


Keeper = Edge | None
"""Over which edge an op gets the value that it keeps; None if it takes it as it is made."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One (shared) value that is kept for the backward: from which positions on, by whom, how many times; last used forward at ``end``."""

    value: Value
    keepers: tuple[tuple[int, Keeper], ...]
    times: int
    end: int


@dataclass(frozen=True, slots=True)
class Uses:
    """A (shared) parameter of a stage: the first and the last op that reads it, and how many times it stands there."""

    parameter: fx.Node
    first: int
    last: int
    times: int


@dataclass(frozen=True, slots=True)
class Given:
    """An output of the model, which every rank gets whole.

    Args:
        stage: that makes it.
        num_bytes: of what all micro-batches give of it.
        joined_bytes: of what they are joined to at the end; 0 if nothing is joined.
        sent_bytes: of what other ranks of the pipeline get.
    """

    stage: int
    num_bytes: float
    joined_bytes: float
    sent_bytes: float


class Phase(Enum):
    """A part of the step."""

    FIRST = "until the first backward is over"
    LATER = "later"
    END = "when all is computed"
    UPDATE = "while the optimizer steps"


class Moment(NamedTuple):
    """The backward of an op, in a phase of its stage; at the end any op of the stage, then the first that uses what is updated."""

    phase: Phase
    position: int


@dataclass(frozen=True, slots=True)
class Alive:
    """How many of each thing are alive at a moment, by shared name; ``constant`` is in bytes.

    ``copies`` are those that a step makes once, ``own_copies`` those of micro-batches; ``updated`` is what the optimizer is at,
    ``stepped`` all that it updates in the stage; ``fetched`` is there if it is kept on the host.
    """

    values: Counter[Value]
    kept: Counter[tuple[Value, tuple[Keeper, ...]]]
    hidden: Counter[fx.Node]
    gathers: Counter[fx.Node]
    reductions: Counter[fx.Node]
    parameters: Counter[fx.Node]
    gradients: Counter[fx.Node]
    copies: Counter[fx.Node]
    own_copies: Counter[fx.Node]
    updated: Counter[fx.Node]
    stepped: Counter[fx.Node]
    fetched: Counter[tuple[Value, tuple[Keeper, ...]]]
    constant: float


@dataclass(frozen=True, slots=True)
class Staging:
    """Which ops run where, for the memory of each stage.

    Args:
        stage_of: stage of every op that has one (`passes.stages`).
        live: for each stage the micro-batches in flight, at most.
        later: the same after its first backward.
        degree: ranks of the pipeline.
        again: ops that are computed again in the backward, with their block; what they give is alive only while the block is at work.
        repeats: how many nodes of the stage a node stands for, where it is more than one.
        shares: for each stage its limit of memory as a part of the largest; empty if they are alike.
    """

    stage_of: Mapping[fx.Node, int]
    live: tuple[int, ...]
    later: tuple[int, ...]
    degree: int = 1
    again: Mapping[fx.Node, int] = field(default_factory=dict)
    repeats: Mapping[fx.Node, int] = field(default_factory=dict)
    shares: tuple[float, ...] = ()

    @staticmethod
    def of(schedule: Schedule, stage_of: Mapping[fx.Node, int], again: Mapping[fx.Node, int]) -> Staging:
        """The stages of a schedule."""
        return Staging(stage_of, peak_live(schedule), peak_later(schedule), schedule.degree, again)


@dataclass(frozen=True, slots=True)
class Liveness:
    """Lives of all stored values of a problem's module; positions number its ops.

    Args:
        length: number of ops.
        spans: of the values.
        kept: the values that are kept, views apart from what they view.
        hidden: position of an op that keeps something of its own, the (shared) op, and how many times.
        weights: position of an op whose weight's gradient may be worked out later (a W of the schedule), from what it keeps and the
            gradient of its (shared) result, and how many times.
        gathers: position of an op and a (shared) parameter of which there is a copy then, if it is gathered for each use.
        reductions: position of an op and a (shared) parameter whose gradient is whole then, if it is reduced in each micro-batch.
        stage_at: stage of every op.
        live: for each stage the micro-batches in flight.
        later: the same after its first backward.
        parameters: of each stage.
        given: the outputs.
        degree: ranks of the pipeline.
        is_plain: whether copies of parameters are made one by one, as ops want them: without stages and micro-batches.
        shares: for each stage its limit of memory as a part of the largest.
    """

    length: int
    stage_at: list[int]
    live: tuple[int, ...]
    later: tuple[int, ...]
    parameters: tuple[list[Uses], ...]
    degree: int
    is_plain: bool
    shares: tuple[float, ...]
    spans: list[Span] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    hidden: list[tuple[int, fx.Node, int]] = field(default_factory=list)
    weights: dict[int, tuple[Value | None, int]] = field(default_factory=dict)
    gathers: list[tuple[int, fx.Node]] = field(default_factory=list)
    reductions: list[tuple[int, fx.Node]] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)

    def stage_of(self, moment: Moment) -> int:
        return self.stage_at[moment.position] if self.stage_at else 0

    def at(self, moment: Moment) -> Alive:
        """What its stage holds: all of one micro-batch up to the op, and what it keeps of the others in flight."""
        phase, t = moment
        stage, is_end = self.stage_of(moment), phase in (Phase.END, Phase.UPDATE)
        others = (self.later if phase is Phase.LATER else self.live)[stage] - 1
        at_end = {Phase.END: self.joined_bytes, Phase.UPDATE: self.received_bytes}
        kept: Counter[tuple[Value, tuple[Keeper, ...]]] = Counter()
        hidden: Counter[fx.Node] = Counter()
        own_copies: Counter[fx.Node] = Counter()
        for last, times in () if is_end else ((t, 1), (self.length, others)):
            for k in self.kept:
                keepers = tuple(dict.fromkeys(by for at, by in k.keepers if at <= last and self.stage_at[at] == stage))
                if keepers and times:
                    kept[k.value, keepers] += times * k.times
            for at, node, count in self.hidden:
                if at <= last and self.stage_at[at] == stage and times:
                    hidden[node] += times * count
            for use in self.parameters[stage]:
                if use.first <= last and times and self.stage_at[use.first] == stage:
                    own_copies[use.parameter] += times * use.times
        return Alive(
            Counter() if is_end else Counter(span.value for span in self.spans if span.start <= t <= span.end),
            kept,
            hidden,
            Counter() if is_end else Counter(node for position, node in self.gathers if position == t),
            Counter() if is_end else Counter(node for position, node in self.reductions if position == t),
            self._held(stage, lambda _: True),
            self._held(stage, lambda use: phase is not Phase.FIRST or use.last >= t),
            self._held(stage, lambda use: not is_end and (use.first <= t or not self.is_plain)),
            own_copies,
            Counter(use.parameter for use in self.parameters[stage] if phase is Phase.UPDATE and use.first == t),
            self._held(stage, lambda _: phase is Phase.UPDATE),
            Counter() if is_end else self._fetched_at(t),
            self.given_bytes(stage) + (at_end[phase](stage) if is_end else 0.0),
        )

    def _fetched_at(self, t: int) -> Counter[tuple[Value, tuple[Keeper, ...]]]:
        found: Counter[tuple[Value, tuple[Keeper, ...]]] = Counter()
        for entry, first, last, keepers in self.fetched():
            if first <= t <= last:
                found[entry.value, keepers] += entry.times
        return found

    def fetched(self) -> Iterator[tuple[Kept, int, int, tuple[Keeper, ...]]]:
        """Of what is kept on the host, for each stage, the positions between which it is on the device: from one before its first use in
        the backward to its last; and by whom it is kept there."""
        for entry in self.kept:
            for stage in dict.fromkeys(self.stage_at[at] for at, _ in entry.keepers):
                own = [(at, by) for at, by in entry.keepers if self.stage_at[at] == stage]
                places = [at for at, _ in own]
                yield entry, min(places), min(max(places) + 1, self.length - 1), tuple(dict.fromkeys(by for _, by in own))

    def _held(self, stage: int, wanted: Callable[[Uses], bool]) -> Counter[fx.Node]:
        counts: Counter[fx.Node] = Counter()
        for use in self.parameters[stage]:
            if wanted(use):
                counts[use.parameter] += use.times
        return counts

    def given_bytes(self, stage: int) -> float:
        """Outputs of the model that a stage makes, of all micro-batches."""
        return sum(given.num_bytes for given in self.given if given.stage == stage)

    def joined_bytes(self, stage: int) -> float:
        """Outputs of the model that are joined in a stage at the end, or come from other ranks."""
        return self.received_bytes(stage) + sum(given.joined_bytes for given in self.given if given.stage == stage)

    def received_bytes(self, stage: int) -> float:
        """Outputs of the model that come from other ranks at the end, to the first stage of a rank."""
        others = [given for given in self.given if stage < self.degree and given.stage % self.degree != stage]
        return sum(given.sent_bytes for given in others)


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
        self.edges = {(edge.value, edge.operand): edge for edge in problem.edges}
        self.again = staging.again if staging is not None else {}
        self.repeats = staging.repeats if staging is not None else {}
        self.roots: dict[Value, Value] = {}
        self.spans: dict[Value, Span] = {}
        self.kept: dict[Value, list[tuple[int, Keeper]]] = {}
        self.read: dict[Value, list[int]] = {}
        self.used: dict[int, list[fx.Node]] = {}
        self.saved: dict[fx.Node, tuple[list[int], list[int]]] = {}
        self.graded: set[Value] = set()
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
        live.given.extend(self._given())
        _add_ahead(live, self.used, training=self.training)
        live.spans.extend(self.spans.values())
        latest = _latest(self.read, self.again, self.position)
        live.spans.extend(Span(self._shared(root), min(reads), latest[root.node], is_again=True) for root, reads in self.read.items())
        for value, keepers in self.kept.items():
            end = self.spans[self.roots[value]].end
            live.kept.append(Kept(self._shared(value), tuple(keepers), self.repeats.get(value.node, 1), end))
        return live

    def _shared(self, value: Value) -> Value:
        return Value(self.problem.shared.get(value.node, value.node), value.index)

    def _store(self, node: fx.Node, t: int) -> None:
        """What an op makes, and the last uses of what it reads."""
        operands = operands_of(node)
        for index, _ in enumerate(specs_of(node)):
            value = Value(node, index)
            aliased = _is_view(node) and operands[0].node in self.position
            self.roots[value] = self.roots[operands[0]] if aliased else value
            if not aliased:
                self.spans[value] = Span(self._shared(value), t, t)
        if node.target is aten.cross_entropy_loss.default:  # its backward has two gradients of what it reads
            self.live.spans.append(Span(self._shared(operands[0]), t, t))
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
        made_of = [] if _is_view(node) else range(len(operands))
        for i in made_of if is_again else kept_operands:
            value, root = operands[i], self.roots.get(operands[i])
            if root is None:
                continue
            if root.node not in self.again:
                stored, by = self._stored(value, self.edges.get((self._shared(value), (same, i))))
                self.kept.setdefault(stored, []).append((t, by))
            elif i in kept_operands:
                self.read.setdefault(root, []).append(t)

    def _stored(self, value: Value, by: Keeper) -> tuple[Value, Keeper]:
        """What is kept for a value: of a view that is made again, what it views."""
        while value.node in self.again and _is_view(value.node):
            viewed = operands_of(value.node)[0]
            value, by = viewed, self.edges.get((self._shared(viewed), (self.problem.shared[value.node], 0)))
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
        times = self.repeats.get(node, 1)
        if any(_has_own_gradient(node, value) for value in operands_of(node)):
            grad = _same_gradient(Value(node), self.position)
            self.live.weights[t] = (None if grad in self.graded else self._shared(grad)), times
            self.graded.add(grad)
        if node not in self.again and any(spec.requires_grad for spec in specs_of(node)):
            self.live.hidden.append((t, self.problem.shared[node], times))

    def _given(self) -> Iterator[Given]:
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
            yield Given(stage, num_bytes, joined_bytes, sent_bytes)


def _is_view(node: fx.Node) -> bool:
    """Whether an op's results share the storage of its operand; what is repeated and then reshaped is a copy."""
    if node.target not in ALIASES:
        return False
    before = operands_of(node)[0].node
    return node.target is not aten.reshape.default or before.target is not aten.expand.default or not _is_repeated(before)


def _is_repeated(node: fx.Node) -> bool:
    """Whether the result of an expansion has more elements than what is stored of it."""
    return value_spec(operands_of(node)[0]).num_bytes < value_spec(Value(node)).num_bytes


def _has_own_gradient(node: fx.Node, weight: Value) -> bool:
    """Whether the gradient of a weight is worked out by itself; that of a norm is by the kernel that gives the gradient of its input, and
    that of a bias wants nothing but what the product before it wants."""
    spec = value_spec(weight)
    return weight.node.op == "placeholder" and spec.requires_grad and (len(spec.shape) > 1 or node.target is aten.mul.Tensor)


def _same_gradient(value: Value, position: Mapping[fx.Node, int]) -> Value:
    """The last value whose gradient is that of ``value``: through views and sums that are all that is made of it."""
    while len(users := list(value.node.users)) == 1 and users[0] in position:
        is_sum = users[0].target is aten.add.Tensor and value_spec(Value(users[0])).shape == value_spec(value).shape
        if not is_sum and (users[0].target not in ALIASES or value_spec(Value(users[0])).num_bytes != value_spec(value).num_bytes):
            break
        value = Value(users[0])
    return value


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
    for node, t in position.items():
        before = stage_at[-1] if stage_at else 0
        stage_at.append(before if staging is None else staging.stage_of.get(node, before))
        for value in operands_of(node):
            if value.node in at:
                at[value.node].setdefault(stage_at[-1], []).append(t)
    held: tuple[list[Uses], ...] = tuple([] for _ in range(stages))
    for node, places in at.items():
        times = staging.repeats.get(node, 1) if staging is not None else 1
        for stage in places or range(stages):
            own = places.get(stage, [0])
            held[stage].append(Uses(problem.shared[node], own[0], own[-1], times))
    live, later, degree = ((1,), (0,), 1) if staging is None else (staging.live, staging.later, staging.degree)
    shares = staging.shares if staging is not None and staging.shares else (1.0,) * stages
    return Liveness(len(position), stage_at, live, later, held, degree, is_plain, shares)
