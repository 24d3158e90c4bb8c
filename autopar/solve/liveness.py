r"""Which values are alive when: memory of a training step over time, as counts that prices multiply (`solve.footprint`).

At the backward of op ``t`` a rank holds what the ops up to ``t`` keep for their backward, and the gradients (forward: the values) that
cross ``t``. Views share the storage of what they view. So do the gradients of two summands, and that of what is only summed up: it is the
sum's, spread out; where one is moved it is another (programs under a limit know of these as far as no layout decides). A value is kept as
the ops that keep it want it, once for each layout, and as it is made only if one of them takes it so; of an input of the model, which is
there whole, the part. What an op keeps beside its operands and results (dropout masks, statistics) counts too.

Gradients of parameters come one by one in the first backward, and lie there in all others, when fewer micro-batches may be in flight; at
the end of the step what is left of them when they are reduced (shards of ZeRO-1) is alone with the outputs of the model, and with what the
optimizer takes for one parameter after the other, or on GPUs for all. These shards come in the last backward, beside all that is whole. So
a stage is looked at in five `Phase`\ s. The gradient of what several ops use is in parts until the first of them has its own (tied
embeddings). Stored parameters (ZeRO-3) are gathered one op ahead, and their gradients are whole until they have been reduced, a few ops
later (`passes.overlap`). Vectors lie in rows all the while in which one of a row is wanted or awaited (`passes.vectors`). The copies of
ZeRO-2 are made anew by every micro-batch, from its forward to its backward; those of ZeRO-1 once a step (`passes.prepare`).

With pipeline stages each stage is a rank's memory of its own: its parameters, what its ops keep for every micro-batch in flight, and what
crosses ``t`` in one of them. The stage that needs most counts. Of backwards in two parts `solve.split_lives` tells what each works on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import fx

from autopar.graph import Value
from autopar.schedule.actions import Schedule
from autopar.schedule.check import peak_later, peak_live
from autopar.solve.problem import Edge


@dataclass(slots=True)
class Span:
    """Life of one stored value and its gradient: made at ``start``, last used forward at ``end``. A view of a parameter takes nothing in
    the forward; a gradient without a storage of its own, if nothing moves it back over the edges ``viewed``, nothing in the backward."""

    value: Value
    start: int
    end: int
    in_forward: bool = True
    viewed: tuple[Edge, ...] | None = None


Keeper = Edge | None
"""Over which edge an op gets the value that it keeps; None if it takes it as it is made."""


Wanted = tuple[Value, Keeper]
"""A value as it is wanted over an edge; where it is wanted as it is made, the one whose storage it shares, and None."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One (shared) value that is kept for the backward: from which positions on, by whom, how many times; last used forward at ``end``."""

    value: Value
    keepers: tuple[tuple[int, Keeper], ...]
    times: int
    end: int


Interval = tuple[int, int]
"""The first and the last of positions."""


@dataclass(frozen=True, slots=True)
class Again:
    """A (shared) value that is computed again: at the backwards of which ops it is there as it is wanted over an edge, or as it is made
    (None); ``is_beside``: of a view, only where that is not as the view is, since what it views is there too."""

    value: Value
    places: tuple[tuple[Interval, Keeper], ...]
    is_beside: bool = False

    def at(self, t: int) -> tuple[Keeper, ...]:
        """As what it is there."""
        return tuple(dict.fromkeys(by for (first, last), by in self.places if first <= t <= last))


@dataclass(frozen=True, slots=True)
class Stay:
    """A value that is computed again, as it is wanted over an edge (``by``) or as it is made, or its gradient (``is_gradient``): at the
    backwards of which ops it is there, in I and in W of its stage. What is there in both is there all along between them. Of what is
    computed again ``root`` is the value whose storage it shares."""

    value: Value
    inputs: Interval | None
    weights: Interval | None
    is_gradient: bool = False
    by: Keeper = None
    root: Value | None = None


class Link(NamedTuple):
    """A value, the one whose storage it shares, the last op whose backward adds to its gradient, and the edge to the next of a chain: if
    nothing is moved over it, the gradient of the next is that of the value."""

    value: Value
    root: Value
    last: int
    edge: Edge | None


@dataclass(frozen=True, slots=True)
class InTwo:
    """What a backward in two parts, I and W, works on (`solve.split_lives`).

    Args:
        late: positions of ops that have all their backward in W.
        reads_late: positions of ops that read what they keep in W.
        stays: what comes and goes, of every stage.
        joined: position of an op and an edge over which W gathers what is computed again, for the gradient of its weight alone.
        weights: position of an op that makes the gradient of a weight in W, and the values whose gradient it may want for that.
        kept: what every stage keeps, and by whom.
    """

    late: frozenset[int]
    reads_late: frozenset[int]
    stays: tuple[tuple[Stay, ...], ...]
    joined: tuple[tuple[int, Edge], ...]
    weights: tuple[tuple[tuple[int, tuple[Link, ...]], ...], ...]
    kept: tuple[tuple[tuple[Kept, tuple[tuple[int, Keeper], ...]], ...], ...]


@dataclass(frozen=True, slots=True)
class Uses:
    """A (shared) parameter of a stage: the first and the last op that reads it, and how many times it stands there.

    ``is_table``: the first op is an embedding, whose gradient comes whole beside what it is added to (products add to it).
    """

    parameter: fx.Node
    first: int
    last: int
    times: int
    is_table: bool = False

    def num_parts(self, t: int, *, is_made: bool) -> int:
        """How many more of its gradient are there at an op than the whole one; ``is_made``: by a backward before.

        Of several ops it is the sum of what the others have given and the part of the first, which is then added to what a backward before
        has made.
        """
        is_shared, is_first = self.first < self.last, t == self.first
        parts = int(is_shared and self.first <= t <= self.last) + int(is_shared and is_first)
        return parts + int(is_made and is_first and (is_shared or self.is_table))


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
    LAST = "in the last backward"
    END = "when all is computed"
    UPDATE = "while the optimizer steps"


class Moment(NamedTuple):
    """The backward of an op, in a phase of its stage; at the end any op of the stage, then the first that uses what is updated."""

    phase: Phase
    position: int


@dataclass(frozen=True, slots=True)
class Alive:
    """How many of each thing are alive at a moment, by shared name; ``constant`` is in bytes.

    ``partials`` are parameters of which the parts of a gradient are there, ``coming`` those whose shards of ZeRO-1 come; ``gathered_rows``
    and ``reduced_rows`` are vectors that lie in a row, and their gradients; ``reduced`` are gradients of which that is left; ``copies`` are
    those that a step makes once, ``own_copies`` those of micro-batches; ``updated`` is what the optimizer is at, ``stepped`` all that it
    updates in the stage; ``fetched`` is there if it is kept on the host; ``joins`` are outputs that are made whole; ``again`` is computed
    again, ``beside`` if it is not as it is made, ``resharded`` are gradients moved over edges, ``joined`` edges over which parts are
    joined, and ``scattered`` those over which sums are.
    """

    values: Counter[Value]
    kept: Mapping[tuple[Value, tuple[Keeper, ...]], float]
    hidden: Mapping[fx.Node, float]
    gathers: Counter[fx.Node]
    reductions: Counter[fx.Node]
    gathered_rows: Counter[fx.Node]
    reduced_rows: Counter[fx.Node]
    parameters: Counter[fx.Node]
    gradients: Counter[fx.Node]
    partials: Counter[fx.Node]
    coming: Counter[fx.Node]
    reduced: Counter[fx.Node]
    copies: Counter[fx.Node]
    own_copies: Mapping[fx.Node, float]
    updated: Counter[fx.Node]
    stepped: Counter[fx.Node]
    fetched: Counter[tuple[Value, tuple[Keeper, ...]]]
    joins: Counter[Value]
    again: Counter[tuple[Value, tuple[Keeper, ...]]]
    beside: Counter[tuple[Value, tuple[Keeper, ...]]]
    resharded: Counter[tuple[Value, tuple[Edge, ...]]]
    joined: Counter[Edge]
    scattered: Counter[Edge]
    constant: float


@dataclass(frozen=True, slots=True)
class Staging:
    """Which ops run where, for the memory of each stage.

    Args:
        stage_of: stage of every op that has one (`passes.stages`).
        live: for each stage the micro-batches in flight, at most; of several stages that stand as one, in their mean.
        later: the same after its first backward.
        degree: ranks of the pipeline.
        again: ops that are computed again in the backward, with their block; what they give is alive only while the block is at work.
        repeats: how many nodes of the stage a node stands for, where it is more than one.
        shares: for each stage its limit of memory as a part of the largest; empty if they are alike.
        in_two: whether backwards are in two parts.
    """

    stage_of: Mapping[fx.Node, int]
    live: tuple[float, ...]
    later: tuple[float, ...]
    degree: int = 1
    again: Mapping[fx.Node, int] = field(default_factory=dict)
    repeats: Mapping[fx.Node, int] = field(default_factory=dict)
    shares: tuple[float, ...] = ()
    in_two: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What tells stagings apart."""
        several = (tuple(mapping.items()) for mapping in (self.stage_of, self.again, self.repeats))
        return *several, self.live, self.later, self.degree, self.shares, self.in_two

    @staticmethod
    def of(schedule: Schedule, stage_of: Mapping[fx.Node, int], again: Mapping[fx.Node, int]) -> Staging:
        """The stages of a schedule."""
        return Staging(
            stage_of, peak_live(schedule), peak_later(schedule), schedule.degree, again, in_two=schedule.is_in_two
        )


@dataclass(frozen=True, slots=True)
class Liveness:
    """Lives of all stored values of a problem's module; positions number its ops.

    Args:
        length: number of ops.
        spans: of the values.
        kept: the values that are kept, views apart from what they view.
        hidden: position of an op that keeps something of its own, the (shared) op, and how many times.
        gathers: position of an op and a (shared) parameter of which there is a copy then, if it is gathered for each use.
        reductions: position of an op and a (shared) parameter whose gradient is whole then, if it is reduced in each micro-batch.
        gathered_rows: positions between which a (shared) vector lies in a row with others, if it is gathered for each use.
        reduced_rows: the same of its gradient, beside that at the op which makes it, if it is reduced in each micro-batch.
        stage_at: stage of every op.
        live: for each stage the micro-batches in flight.
        later: the same after its first backward.
        parameters: of each stage.
        given: the outputs.
        joins: position of the last op of a stage and a (shared) output that is then made whole.
        again: what is computed again.
        resharded: position of an op, a (shared) value that it gets over edges, over which the gradient goes back, and these edges.
        joined: position of an op and an edge over which parts are joined in its backward, beside the result.
        scattered: position of an op and an edge over which it gets what is computed again, of which ranks may have terms.
        degree: ranks of the pipeline.
        is_plain: whether copies of parameters are made one by one, as ops want them: without stages and micro-batches.
        shares: for each stage its limit of memory as a part of the largest.
        in_two: of backwards in two parts; else None.
    """

    length: int
    stage_at: list[int]
    live: tuple[float, ...]
    later: tuple[float, ...]
    parameters: tuple[list[Uses], ...]
    degree: int
    is_plain: bool
    shares: tuple[float, ...]
    spans: list[Span] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    hidden: list[tuple[int, fx.Node, int]] = field(default_factory=list)
    gathers: list[tuple[int, fx.Node]] = field(default_factory=list)
    reductions: list[tuple[int, fx.Node]] = field(default_factory=list)
    gathered_rows: list[tuple[Interval, fx.Node]] = field(default_factory=list)
    reduced_rows: list[tuple[Interval, fx.Node]] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    joins: list[tuple[int, Value]] = field(default_factory=list)
    again: list[Again] = field(default_factory=list)
    resharded: list[tuple[int, Value, tuple[Edge, ...]]] = field(default_factory=list)
    joined: list[tuple[int, Edge]] = field(default_factory=list)
    scattered: list[tuple[int, Edge]] = field(default_factory=list)
    in_two: InTwo | None = None

    def stage_of(self, moment: Moment) -> int:
        return self.stage_at[moment.position] if self.stage_at else 0

    def at(self, moment: Moment) -> Alive:
        """What its stage holds: all of one micro-batch up to the op, and what it keeps of the others in flight."""
        phase, t = moment
        stage, is_end = self.stage_of(moment), phase in (Phase.END, Phase.UPDATE)
        others = 0 if phase is Phase.LAST else (self.later if phase is Phase.LATER else self.live)[stage] - 1
        at_end = {Phase.END: self.joined_bytes, Phase.UPDATE: self.received_bytes}
        kept = defaultdict[tuple[Value, tuple[Keeper, ...]], float](float)
        hidden, own_copies = defaultdict[fx.Node, float](float), defaultdict[fx.Node, float](float)
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
            Counter() if is_end else Counter(span.value for span in self.spans if span.start <= t <= span.end and span.viewed != ()),
            kept,
            hidden,
            Counter() if is_end else Counter(node for position, node in self.gathers if position == t),
            Counter() if is_end else Counter(node for position, node in self.reductions if position == t),
            Counter() if is_end else Counter(node for (first, last), node in self.gathered_rows if first <= t <= last),
            Counter() if is_end else Counter(node for (first, last), node in self.reduced_rows if first <= t <= last),
            self._held(stage, lambda _: True),
            self._held(stage, lambda use: not is_end and (use.first >= t or self.is_made_before(moment))),
            self._held(stage, lambda use: 0 if is_end else use.num_parts(t, is_made=self.is_made_before(moment))),
            self._held(stage, lambda use: phase is Phase.LAST and use.first >= t),
            self._held(stage, lambda _: is_end),
            self._held(stage, lambda use: not is_end and (use.first <= t or not self.is_plain)),
            own_copies,
            Counter(use.parameter for use in self.parameters[stage] if phase is Phase.UPDATE and use.first == t),
            self._held(stage, lambda _: phase is Phase.UPDATE),
            Counter() if is_end else self._fetched_at(t),
            Counter() if is_end else Counter(value for position, value in self.joins if position == t),
            Counter() if is_end else self._again_at(t, is_beside=False),
            Counter() if is_end else self._again_at(t, is_beside=True),
            Counter() if is_end else Counter((value, edges) for position, value, edges in self.resharded if position == t),
            Counter() if is_end else Counter(edge for position, edge in self.joined if position == t),
            Counter() if is_end else Counter(edge for position, edge in self.scattered if position == t),
            self.given_bytes(stage) + (at_end[phase](stage) if is_end else 0.0),
        )

    def is_made_before(self, moment: Moment) -> bool:
        """Whether a backward before that of the moment has made all gradients."""
        return moment.phase is Phase.LATER or (moment.phase is Phase.LAST and self.later[self.stage_of(moment)] > 0)

    def _again_at(self, t: int, *, is_beside: bool) -> Counter[tuple[Value, tuple[Keeper, ...]]]:
        entries = (entry for entry in self.again if entry.is_beside == is_beside)
        return Counter((entry.value, keepers) for entry in entries if (keepers := entry.at(t)))

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

    def _held(self, stage: int, wanted: Callable[[Uses], int]) -> Counter[fx.Node]:
        counts: Counter[fx.Node] = Counter()
        for use in self.parameters[stage]:
            if count := wanted(use):
                counts[use.parameter] += count * use.times
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
