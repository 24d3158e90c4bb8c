"""Play a schedule with priced actions: when does what happen, how long is the step, how much of it is idle, what lies in memory when.

Each rank computes one action after the other. A message travels over the link of its ordered pair of ranks, one after the other, once it is
sent, its receive is posted and the link is free; meanwhile both ranks compute. Gathers and reductions of a rank follow each other beside
its computation: the first forward of a stage waits for its gather, the optimizer for all reductions, and for the outputs of the model that
ranks of other stages broadcast when they have done all else. A reduction starts while the backward before it still runs, as early as its
price allows. Hosts launch ahead of their devices, all through the step: it takes as long as the busiest of them at least. The *bubble* is
1 - (time of F, B, I, W) / (ranks * time from the first of them to the last); equal stages and free messages make it what the table in
``autopar.schedule.tables`` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from math import floor
from typing import Any, NamedTuple

import numpy as np

from autopar.errors import PlanError
from autopar.schedule.actions import COMPUTE, Action, Kind, Schedule
from autopar.schedule.lower import lower
from autopar.units import number_text, seconds_text, share_text


@dataclass(frozen=True, slots=True)
class StagePrice:
    """What one stage costs a rank, for each micro-batch unless said otherwise; seconds and bytes.

    Args:
        forward_s: F.
        backward_s: B.
        forward_comm_s, backward_comm_s: how much of them is communication that is waited for.
        input_s: I.
        weight_s: W.
        gather_s: of the parameters, once per step.
        reduce_s: of the gradients, once per step; the last ``shared_s`` of it over stages, of parameters that several of them use.
        covered_s: how much of the reduction may lie beside the computation before it.
        update_s: of the optimizer, once per step.
        send_forward_s: to the next stage.
        send_backward_s: to the previous stage.
        output_s: of its outputs to the ranks of all other stages, once per step, before the optimizer.
        core_s: of a core, in a step, that all communication takes from what is computed beside it where ranks share cores.
        dispatch_s: of the host, in a step, to launch all that the stage does.
        live_num_bytes: what is saved from the forward to the backward (B, or W).
        freed_num_bytes: of that, what I frees already; negative if it leaves more, of what it computes again.
        static_num_bytes: what lies there all the step.
        send_forward_num_bytes: of one message of a rank to the next stage; ``send_backward_num_bytes`` to the previous stage.
        output_num_bytes: of its outputs, whole.
        shared_num_bytes: of the gradients of a rank that it adds to those of other stages.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0
    shared_s: float = 0.0
    covered_s: float = 0.0
    update_s: float = 0.0
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    output_s: float = 0.0
    core_s: float = 0.0
    dispatch_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    live_num_bytes: float = 0.0
    freed_num_bytes: float = 0.0
    static_num_bytes: float = 0.0
    send_forward_num_bytes: float = 0.0
    send_backward_num_bytes: float = 0.0
    output_num_bytes: float = 0.0
    shared_num_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank does for a time.

    Args:
        rank: of the pipeline.
        action: which; None for the update of the optimizer.
        start_s: from the start of the step.
        end_s: likewise.
        stream: "compute", "collective", "send" or "receive".
    """

    rank: int
    action: Action | None
    start_s: float
    end_s: float
    stream: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step as it was played.

    Args:
        step_time_s: until the last rank is done, and the last host has launched all.
        bubble_fraction: idle share of all ranks, from the first forward to the last backward.
        events: of rank 0, of rank 1, ...; each stream of a rank in order of time.
        busy_s: time that each rank computes.
        peak_num_bytes: most memory of each rank.
        memory_at: for each rank (time, bytes from then on), in order of time.
    """

    step_time_s: float
    bubble_fraction: float
    events: tuple[Event, ...]
    busy_s: tuple[float, ...]
    peak_num_bytes: tuple[float, ...]
    memory_at: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def communicating_s(self) -> tuple[float, ...]:
        """Time that each rank communicates, whether it computes meanwhile or not."""
        return tuple(_length(self._spans(rank, computing=False)) for rank in range(len(self.busy_s)))

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Time that each rank neither computes nor communicates."""
        both = (self._spans(rank, computing=True) + self._spans(rank, computing=False) for rank in range(len(self.busy_s)))
        return tuple(self.step_time_s - _length(spans) for spans in both)

    @property
    def exposed_s(self) -> tuple[float, ...]:
        """Time that each rank communicates and does not compute; with ``busy_s`` and ``idle_s`` it makes up the step."""
        return tuple(self.step_time_s - idle - busy for idle, busy in zip(self.idle_s, self.busy_s, strict=True))

    def _spans(self, rank: int, *, computing: bool) -> list[tuple[float, float]]:
        return [(e.start_s, e.end_s) for e in self.events if e.rank == rank and (e.stream == "compute") == computing]

    def grid(self, width: int = 100) -> str:
        """A picture in text: a line for each rank, time to the right, "." for idle, ":" for communication without computation."""
        prefix = len(f"rank {len(self.busy_s) - 1}: ")
        shown = [event for event in self.events if event.end_s > event.start_s]
        if not shown:
            return "nothing takes any time"
        scale = max(1, width - prefix) / self.step_time_s
        tick = min((event.end_s - event.start_s for event in shown if event.stream == "compute"), default=self.step_time_s)
        if scale * tick >= 1:
            scale = floor(scale * tick) / tick  # whole columns where stages are equal
        lines = [["."] * round(self.step_time_s * scale) for _ in self.busy_s]
        is_looped = any(event.action and event.action.stage >= len(self.busy_s) for event in shown)
        for event in sorted(shown, key=lambda event: event.stream == "compute"):
            first, last = round(event.start_s * scale), round(event.end_s * scale)
            lines[event.rank][first:last] = _box(event, last - first, is_looped)
        head = f"{seconds_text(self.step_time_s)} in all, {seconds_text(1 / scale)} a column, {share_text(self.bubble_fraction)} idle"
        return "\n".join([head, *(f"rank {rank}: ".rjust(prefix) + "".join(line) for rank, line in enumerate(lines))])


_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.INPUT: "=", Kind.WEIGHT: "_"}


def _box(event: Event, width: int, is_looped: bool) -> str:
    """The longest label that fits, filled up."""
    action = event.action
    if event.stream != "compute":
        return ":" * width
    if action is None:
        return "U" * width
    labels = [str(action)] * is_looped + [f"{action.kind.value}{action.microbatch}", action.kind.value, ""]
    return next(label for label in labels if len(label) <= width).ljust(width, _FILL[action.kind])


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """Of the union."""
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


Place = tuple[int, Action | None]
"""A computation: its rank and action, None for the update."""


class Span(NamedTuple):
    """A time, and how many cores something wants in it."""

    start_s: float
    end_s: float
    cores: float


ROUNDS = 11
"""How often who computes beside whom is worked out anew."""


class _Play:
    """The step as far as it has been played; each rank goes on until it must wait for a message, which wakes it.

    Who waits for whom is the schedule's alone: where prices are arrays, all times are, and ``later`` tells the later of two.
    """

    def __init__(
        self,
        schedule: Schedule,
        prices: Sequence[StagePrice],
        stretch: Mapping[Place, float],
        later: Callable[[Any, Any], Any] = max,
    ) -> None:
        self.schedule, self.prices, self.stretch, self.later = schedule, prices, stretch, later
        ranks = range(schedule.degree)
        self.reached = [0 for _ in ranks]  # in the row
        self.clock = [0.0 for _ in ranks]  # end of the last computation
        self.began = [0.0 for _ in ranks]  # start of it
        self.collective = [0.0 for _ in ranks]  # end of the last collective
        self.gathered = [0.0 for _ in prices]
        self.links: dict[tuple[int, int], float] = {}  # free from then on
        self.open: dict[int, tuple[int, Action, float]] = {}  # messages that one side is ready for
        self.arrived: dict[int, float] = {}
        self.waiting: dict[int, int] = {}
        self.events: list[list[Event]] = [[] for _ in ranks]
        self.static = [sum(prices[stage].static_num_bytes for stage in schedule.stages_of(rank)) for rank in ranks]
        self.memory = [[(0.0, static)] for static in self.static]
        self.keeps = schedule.has_backward
        self.ready = deque(ranks)

    def run(self) -> None:
        while self.ready:
            rank = self.ready.popleft()
            row = self.schedule.ranks[rank]
            for place in range(self.reached[rank], len(row)):
                if not self.do(rank, row[place]):
                    break
                self.reached[rank] = place + 1
        for rank, reached in enumerate(self.reached):
            if reached < len(self.schedule.ranks[rank]):
                action = self.schedule.ranks[rank][reached]
                raise PlanError(f"schedule {self.schedule.head!r}: rank {rank} waits for a message at {action} forever; see check")

    def do(self, rank: int, action: Action) -> bool:
        """Play an action; false if it must wait."""
        kind, stage, price = action.kind, action.stage, self.prices[action.stage]
        count = self.schedule.microbatches
        slot = 2 * (stage * count + action.microbatch)  # number of the message that comes in forward; backward is one more
        if kind is Kind.FORWARD:
            return self.compute(rank, action, price.forward_s, slot if stage > 0 else None)
        if kind is Kind.BACKWARD or kind is Kind.INPUT:
            seconds = price.backward_s if kind is Kind.BACKWARD else price.input_s
            return self.compute(rank, action, seconds, slot + 1 if stage + 1 < self.schedule.stages else None)
        if kind is Kind.WEIGHT:
            return self.compute(rank, action, price.weight_s, None)
        if kind is Kind.SEND_F:
            self.message(rank, action, slot + 2 * count)
        elif kind is Kind.SEND_B:
            self.message(rank, action, slot + 1 - 2 * count)
        elif kind is Kind.RECV_F:
            self.message(rank, action, slot)
        elif kind is Kind.RECV_B:
            self.message(rank, action, slot + 1)
        else:
            ready = self.later(self.began[rank], self.clock[rank] - price.covered_s) if kind is Kind.REDUCE else self.clock[rank]
            start = self.later(ready, self.collective[rank])
            end = self.collective[rank] = start + (price.gather_s if kind is Kind.GATHER else price.reduce_s)
            self.events[rank].append(Event(rank, action, start, end, "collective"))
            if kind is Kind.GATHER:
                self.gathered[stage] = end
        return True

    def compute(self, rank: int, action: Action, seconds: float, slot: int | None) -> bool:
        start = self.clock[rank]
        if slot is not None and self.schedule.degree > 1:
            arrived = self.arrived.get(slot)
            if arrived is None:
                self.waiting[slot] = rank
                return False
            start = self.later(start, arrived)
        kind, stage = action.kind, action.stage
        memory, live, freed = self.memory[rank], self.prices[stage].live_num_bytes, self.prices[stage].freed_num_bytes
        if kind is Kind.FORWARD:
            start = self.later(start, self.gathered[stage])
            if self.keeps:
                memory.append((start, memory[-1][1] + live))
        end = self.clock[rank] = start + seconds * self.stretch.get((rank, action), 1.0)
        self.began[rank] = start
        if kind is Kind.BACKWARD:
            memory.append((end, memory[-1][1] - live))
        elif kind is Kind.INPUT:
            memory.append((end, memory[-1][1] - freed))
        elif kind is Kind.WEIGHT:
            memory.append((end, memory[-1][1] - (live - freed)))
        self.events[rank].append(Event(rank, action, start, end, "compute"))
        return True

    def message(self, rank: int, action: Action, slot: int) -> None:
        """One side of a message is ready; if the other is, it travels."""
        if slot not in self.open:
            self.open[slot] = rank, action, self.clock[rank]
            return
        mine, theirs = (rank, action, self.clock[rank]), self.open.pop(slot)
        sends = action.kind is Kind.SEND_F or action.kind is Kind.SEND_B
        (source, send, sent), (to, receive, posted) = (mine, theirs) if sends else (theirs, mine)
        price = self.prices[send.stage]
        start = self.later(self.later(sent, posted), self.links.get((source, to), 0.0))
        end = start + (price.send_forward_s if send.kind is Kind.SEND_F else price.send_backward_s)
        self.links[source, to] = self.arrived[slot] = end
        self.events[source].append(Event(source, send, start, end, "send"))
        self.events[to].append(Event(to, receive, start, end, "receive"))
        if slot in self.waiting:
            self.ready.append(self.waiting.pop(slot))

    def close(self) -> Any:
        """Play what follows the rows, outputs and the optimizer, and tell when all is done, and launched."""
        done = [self.later(*both) for both in zip(self.clock, self.collective, strict=True)]
        for stage, price in enumerate(self.prices):
            if np.any(price.output_s) and self.schedule.degree > 1:
                done = self.give(stage, done)
        for rank, start in enumerate(done):
            update_s = sum(self.prices[stage].update_s for stage in self.schedule.stages_of(rank))
            end = done[rank] = start + update_s * self.stretch.get((rank, None), 1.0)
            self.events[rank].append(Event(rank, None, start, end, "compute"))
        return reduce(self.later, (*done, *_dispatched_s(self.schedule, self.prices)))

    def give(self, stage: int, ready: Sequence[float]) -> list[float]:
        """The rank of a stage broadcasts its outputs, once all ranks are ready for them; when each has them."""
        price, source = self.prices[stage], ready[self.schedule.rank_of(stage)]
        starts = [self.later(time_s, source * (price.output_s > 0)) for time_s in ready]
        done = [start + price.output_s for start in starts]
        for rank, (start, end) in enumerate(zip(starts, done, strict=True)):
            self.events[rank].append(Event(rank, Action(stage, Kind.OUTPUT), start, end, "collective"))
        return done


def simulate(schedule: Schedule, prices: Sequence[StagePrice], sharing: float = 1.0) -> Timeline:
    """Play a step.

    Args:
        schedule: a table that has passed ``check``; one of computation only is lowered first.
        prices: one for each stage, as they are while all ranks compute.
        sharing: how many times as fast a rank computes alone (`DeviceProfile.sharing`). Those that compute at one time share what all have,
            each at no more than this rate; communication takes its part of a core from those that compute at the same time.

    Raises:
        PlanError: the number of prices is not that of stages, or the ranks wait for each other.
    """
    if len(prices) != schedule.stages:
        stages, came = number_text(schedule.stages, "stage"), number_text(len(prices), "price")
        raise PlanError(f"schedule {schedule.head!r} has {stages}, but {came} came; give one for each stage")
    if all(action.kind in COMPUTE for row in schedule.ranks for action in row):
        schedule = lower(schedule)
    stretch: dict[Place, float] = {}
    timeline = _played(schedule, prices, stretch)
    for _ in range(ROUNDS if sharing != 1.0 else 0):  # each is slowed by those that computed or sent beside it
        found = _stretch(timeline, _communicating(timeline, prices), schedule.degree, sharing)
        stretch = {place: (stretch.get(place, factor) + factor) / 2 for place, factor in found.items()}
        timeline = _played(schedule, prices, stretch)
    return timeline


def step_times_s(schedule: Schedule, options: Sequence[Sequence[StagePrice]], sharing: float = 1.0) -> list[float]:
    """Seconds of a step at each of several prices of its stages: what `simulate` says of one after the other. Where ranks do not share
    cores all are played at once. Arguments and errors are those of `simulate`, of a schedule with communication."""
    if sharing != 1.0:
        return [simulate(schedule, prices, sharing).step_time_s for prices in options]
    play = _Play(schedule, [_side_by_side(alike) for alike in zip(*options, strict=True)], {}, np.maximum)
    play.run()
    return [float(step_s) for step_s in play.close()]


def _side_by_side(prices: Sequence[StagePrice]) -> StagePrice:
    """One of arrays."""
    columns: dict[str, Any] = {column.name: np.array([getattr(price, column.name) for price in prices]) for column in fields(StagePrice)}
    return StagePrice(**columns)


def dispatched_s(schedule: Schedule, prices: Sequence[StagePrice]) -> float:
    """Seconds in which the busiest host launches what its rank does in a step."""
    return max(_dispatched_s(schedule, prices))


def _dispatched_s(schedule: Schedule, prices: Sequence[StagePrice]) -> list[float]:
    return [sum(prices[stage].dispatch_s for stage in schedule.stages_of(rank)) for rank in range(schedule.degree)]


def _communicating(timeline: Timeline, prices: Sequence[StagePrice]) -> Iterator[Span]:
    """When communication takes how much of a core from those that compute: that of a stage as much at all times, but nothing of what a
    reduction does beside the computation before it, whose price has it."""
    spans: list[list[tuple[float, float]]] = [[] for _ in prices]
    for event in timeline.events:
        if event.stream == "compute" or event.action is None or event.action.kind is Kind.OUTPUT:
            continue
        kind, stage = event.action.kind, event.action.stage
        beside_s = prices[stage].covered_s if kind is Kind.REDUCE else 0.0
        sender = stage - 1 if kind is Kind.RECV_F else stage + 1 if kind is Kind.RECV_B else stage
        spans[sender].append((min(event.end_s, event.start_s + beside_s), event.end_s))
    for price, own in zip(prices, spans, strict=True):
        lasting_s = sum(end - start for start, end in own)
        if lasting_s > 0:
            yield from (Span(start, end, price.core_s / lasting_s) for start, end in own)


def _stretch(timeline: Timeline, communicating: Iterable[Span], degree: int, sharing: float) -> dict[Place, float]:
    """How many times as long every computation takes, beside what else the timeline has at the same time."""
    computed = [event for event in timeline.events if event.stream == "compute" and event.end_s > event.start_s]
    spans = [*(Span(event.start_s, event.end_s, 1.0) for event in computed), *communicating]
    changes = sorted([(span.start_s, span.cores) for span in spans] + [(span.end_s, -span.cores) for span in spans])
    times = np.array([time_s for time_s, _ in changes])
    wanted = np.cumsum([change for _, change in changes])
    rate = np.minimum(sharing, degree / np.maximum(wanted, 1))
    done = np.concatenate(([0.0], np.cumsum(rate[:-1] * np.diff(times))))  # work of one rank that has computed all along
    starts, ends = (np.interp([getattr(event, name) for event in computed], times, done) for name in ("start_s", "end_s"))
    return {
        (event.rank, event.action): (event.end_s - event.start_s) / float(end - start)
        for event, start, end in zip(computed, starts, ends, strict=True)
    }


def _played(schedule: Schedule, prices: Sequence[StagePrice], stretch: Mapping[Place, float]) -> Timeline:
    play = _Play(schedule, prices, stretch)
    play.run()
    computed = [[event for event in events if event.stream == "compute"] for events in play.events]
    busy = [sum(event.end_s - event.start_s for event in events) for events in computed]
    span = max(play.clock) - min(events[0].start_s for events in computed)
    step_time_s = play.close()
    updates = [events[-1].end_s - events[-1].start_s for events in play.events]
    return Timeline(
        step_time_s=step_time_s,
        bubble_fraction=max(0.0, schedule.degree * span - sum(busy)) / (schedule.degree * span) if span else 0.0,
        events=tuple(event for events in play.events for event in events),
        busy_s=tuple(a + b for a, b in zip(busy, updates, strict=True)),
        peak_num_bytes=tuple(max(num_bytes for _, num_bytes in memory) for memory in play.memory),
        memory_at=tuple(tuple(memory) for memory in play.memory),
    )
