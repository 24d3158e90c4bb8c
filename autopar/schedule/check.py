"""Prove a table: complete, in order, free of deadlock, first in first out; and count the micro-batches that it keeps alive.

An action *needs* others, on its own rank or on another: a forward needs the forward of the stage before, a backward its forward and the
backward of the stage behind, both by way of SEND and RECV if the table says who sends what when. A table is right if every need on a
rank stands earlier in its row, and if all rows can be played to their ends together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.schedule.actions import ONCE, Action, Kind, Schedule, grid_lines
from autopar.schedule.lower import lower, message_of
from autopar.units import number_text

_WINDOW = 4
"""Columns of the grid shown at either side of a bad action."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A schedule with an index of its actions; only the first of two equal ones counts."""

    schedule: Schedule
    place: dict[Action, tuple[int, int]]  # rank and place in its row
    has_transfers: bool

    def back(self, stage: int, microbatch: int) -> Action:
        """What computes gradients of a stage's inputs."""
        whole, part = Action(stage, Kind.BACKWARD, microbatch), Action(stage, Kind.INPUT, microbatch)
        return part if part in self.place and whole not in self.place else whole

    def needs(self, action: Action) -> list[Action]:
        """What must have been done, wherever."""
        stage, kind, k = action.stage, action.kind, action.microbatch
        arrives = self.has_transfers and self.schedule.degree > 1
        if kind is Kind.FORWARD:
            gather = Action(stage, Kind.GATHER)
            found = [gather] if gather in self.place else []
            if stage > 0:
                found += [Action(stage, Kind.RECV_F, k)] if arrives else []
                found.append(Action(stage - 1, Kind.SEND_F if arrives else Kind.FORWARD, k))
            return found
        if kind is Kind.BACKWARD or kind is Kind.INPUT:
            found = [Action(stage, Kind.FORWARD, k)]
            if stage + 1 < self.schedule.stages:
                found += [Action(stage, Kind.RECV_B, k)] if arrives else []
                found.append(Action(stage + 1, Kind.SEND_B, k) if arrives else self.back(stage + 1, k))
            return found
        if kind is Kind.WEIGHT:
            return [Action(stage, Kind.INPUT, k)]
        if kind is Kind.SEND_F:
            return [Action(stage, Kind.FORWARD, k)]
        if kind is Kind.SEND_B:
            return [self.back(stage, k)]
        if kind is Kind.REDUCE:
            last = [(stage, Kind.BACKWARD), (stage, Kind.WEIGHT)]
            return [a for a in self.schedule.ranks[self.schedule.rank_of(stage)] if (a.stage, a.kind) in last]
        return []

    def fault(self, text: str, *, rank: int = -1, place: int = 0) -> PlanError:
        """An error that shows the grid around an action; rank -1: the start of the grid."""
        first = max(0, place - _WINDOW) if rank >= 0 else 0
        rows = [
            ["..."] * (first > 0)
            + [f">{a}<" if (r, i) == (rank, place) else str(a) for i, a in enumerate(row[: place + _WINDOW + 1]) if i >= first]
            + ["..."] * (len(row) > place + _WINDOW + 1)
            for r, row in enumerate(self.schedule.ranks)
        ]
        return PlanError("\n".join([f"schedule {self.schedule.head!r}: {text}", *grid_lines(rows)]))


def _index(schedule: Schedule) -> _Table:
    place: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.ranks):
        for i, action in enumerate(row):
            place.setdefault(action, (rank, i))
    return _Table(schedule, place, schedule.has_transfers)


def _play(table: _Table, *, buffered: bool) -> tuple[list[Action], list[int]]:
    """Play all rows as far as they go: the actions in an order in which they can be, and how far each rank got."""
    rows = table.schedule.ranks
    done: set[Action] = set()
    order: list[Action] = []
    reached = [0] * len(rows)
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        while reached[rank] < len(rows[rank]):
            action = rows[rank][reached[rank]]
            needs = table.needs(action)
            if not buffered and action.kind in (Kind.SEND_F, Kind.SEND_B):
                needs.append(_received_as(action))
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            order.append(action)
            reached[rank] += 1
            ready += waiting.pop(action, [])
    return order, reached


def _received_as(send: Action) -> Action:
    if send.kind is Kind.SEND_F:
        return Action(send.stage + 1, Kind.RECV_F, send.microbatch)
    return Action(send.stage - 1, Kind.RECV_B, send.microbatch)


def play_order(schedule: Schedule) -> tuple[Action, ...]:
    """The actions of all ranks in an order in which they can be played one by one.

    Raises:
        PlanError: the ranks wait for each other forever.
    """
    table = _index(schedule)
    order, reached = _play(table, buffered=True)
    stuck = [(rank, place) for rank, place in enumerate(reached) if place < len(schedule.ranks[rank])]
    if stuck:
        done, waits = set(order), []
        for rank, place in stuck:
            head = schedule.ranks[rank][place]
            waits.append(f"{head} on rank {rank} for {' and '.join(str(need) for need in table.needs(head) if need not in done)}")
        text = f"the ranks wait for each other forever: {'; '.join(waits)}; reorder one of the rows"
        raise table.fault(text, rank=stuck[0][0], place=stuck[0][1])
    return tuple(order)


def deadlock_free(schedule: Schedule, buffered: bool = True) -> bool:
    """Whether all ranks reach the end of their rows; a table of computation is lowered first.

    Args:
        schedule: the table.
        buffered: a SEND ends at once, as with asynchronous messages; else it holds up its rank until the peer has posted the RECV.
    """
    table = _index(schedule if schedule.has_transfers or schedule.degree == 1 else lower(schedule))
    return len(_play(table, buffered=buffered)[0]) == sum(map(len, table.schedule.ranks))


def _check_places(table: _Table) -> None:
    """Every action is one of this pipeline, stands on the rank of its stage, and stands there once."""
    schedule = table.schedule
    if len(schedule.ranks) != max(1, schedule.degree) or schedule.stages % schedule.degree:
        raise table.fault(f"has {number_text(len(schedule.ranks), 'row')}; every rank has a row, and as many stages as the others")
    known = f"{number_text(schedule.stages, 'stage')} and {number_text(schedule.microbatches, 'micro-batch', 'micro-batches')}"
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            once = action.kind in ONCE
            if action.stage >= schedule.stages or action.microbatch >= schedule.microbatches or once != (action.microbatch < 0):
                raise table.fault(f"{action} is no action of {known}", rank=rank, place=place)
            home = schedule.rank_of(action.stage)
            if home != rank:
                raise table.fault(f"{action} stands on rank {rank}, but stage {action.stage} runs on rank {home}", rank=rank, place=place)
            if table.place[action] != (rank, place):
                raise table.fault(f"{action} stands twice; drop one", rank=rank, place=place)


def _check_complete(table: _Table) -> None:
    """Every stage does every micro-batch, and nothing is sent that nobody receives."""
    schedule, has_backward = table.schedule, table.schedule.has_backward
    expected: dict[Action, None] = {}  # in order
    for stage in range(schedule.stages):
        for k in range(schedule.microbatches):
            computations = [Action(stage, Kind.FORWARD, k)]
            if has_backward:
                computations.append(table.back(stage, k))
                if computations[-1].kind is Kind.INPUT:
                    computations.append(Action(stage, Kind.WEIGHT, k))
            expected.update(dict.fromkeys(computations))
            if table.has_transfers:
                expected.update((action, None) for c in computations for action in message_of(schedule, c) or ())
    for kind in ONCE:
        if any(action.kind is kind for action in table.place):
            expected.update((Action(stage, kind), None) for stage in range(schedule.stages))
    missing = [action for action in expected if action not in table.place]
    if missing:
        rank = schedule.rank_of(missing[0].stage)
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise table.fault(f"{missing[0]}{others} is missing on rank {rank}; every stage does every micro-batch")
    for action, (rank, place) in table.place.items():
        if action not in expected:
            raise table.fault(f"{action} has no use; drop it", rank=rank, place=place)


def _check_order(table: _Table) -> None:
    """What an action needs of its own rank stands before it."""
    for action, (rank, place) in table.place.items():
        for need in table.needs(action):
            home, before = table.place[need]
            if home == rank and before >= place:
                raise table.fault(f"{action} stands before {need}, which it needs; exchange them", rank=rank, place=place)


def _check_first_in_first_out(table: _Table) -> None:
    """Every ordered pair of ranks sends and receives in one order."""
    schedule = table.schedule
    sent: dict[tuple[int, int], deque[Action]] = {}
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                receive = _received_as(action)
                sent.setdefault((rank, schedule.rank_of(receive.stage)), deque()).append(receive)
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                source = schedule.rank_of(action.stage + (-1 if action.kind is Kind.RECV_F else 1))
                due = sent[source, rank].popleft()
                if due != action:
                    text = f"{action} stands where rank {source} sends what {due} receives; messages have no tags, post {due} first"
                    raise table.fault(text, rank=rank, place=place)


def check(schedule: Schedule) -> None:
    """Prove a table, with or without communication.

    Raises:
        PlanError: what is wrong, with the grid around it and the bad action marked.
    """
    table = _index(schedule)
    _check_places(table)
    _check_complete(table)
    _check_order(table)
    _check_first_in_first_out(table)
    play_order(schedule)


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """For each stage: the most micro-batches whose saved values are kept at a time, from forward to backward (B, or W: I frees nothing)."""
    rows = schedule.ranks
    return tuple(peak_of([a for a in rows[schedule.rank_of(stage)] if a.stage == stage]) for stage in range(schedule.stages))


def peak_live_by_rank(schedule: Schedule) -> tuple[int, ...]:
    """For each rank: the same, all its stages together."""
    return tuple(peak_of(row) for row in schedule.ranks)


def peak_later(schedule: Schedule) -> tuple[int, ...]:
    """For each stage: as `peak_live`, after its first backward; 0 if it has no more than one."""
    rows = schedule.ranks
    return tuple(peak_later_of([a for a in rows[schedule.rank_of(stage)] if a.stage == stage]) for stage in range(schedule.stages))


def peak_later_of(actions: Sequence[Action]) -> int:
    """`peak_of` after the first backward; 0 if there is no more than one."""
    ends = [i for i, a in enumerate(actions) if a.kind in (Kind.BACKWARD, Kind.WEIGHT)]
    return peak_of(actions, after=ends[0]) if len(ends) > 1 else 0


def peak_of(actions: Sequence[Action], after: int = -1) -> int:
    """The most micro-batches that are kept at a time, from the end of the action ``after`` on."""
    kept = {(a.stage, a.microbatch) for a in actions if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}  # without gradients nothing is kept
    live = peak = 0
    for i, action in enumerate(actions):
        if action.kind is Kind.FORWARD and (action.stage, action.microbatch) in kept:
            live += 1
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            live -= 1
        peak = max(peak, live) if i >= after else peak
    return peak
