"""Add communication to a table of computation.

Who computes hands on: the SEND stands right after the computation. Who receives *posts* the receive one computation early, so that the
message travels meanwhile; the computation that uses it waits. Messages from one rank to another carry no tags and are matched first in,
first out (NCCL), so a rank posts the receives from a peer in the order in which that peer sends.
"""

from __future__ import annotations

from itertools import accumulate

from autopar.errors import PlanError
from autopar.schedule.actions import COMPUTE, Action, Kind, Schedule

_AHEAD = 1
"""How many computations before its use a receive is posted.

More gains nothing unless messages take longer than a forward. In the simulator (16 micro-batches, 4 ranks, backward twice the forward,
messages half a forward) posting 0, 1, 2 ahead takes 75, 60, 60 forwards with gpipe, 74.5, 71, 71 with 1f1b, 136, 112, 112 with interleaved.
"""


def message_of(schedule: Schedule, action: Action) -> tuple[Action, Action] | None:
    """The SEND and the RECV of what a computation hands to another rank; None if it hands on nothing, or on its own rank."""
    stage = action.stage
    if action.kind is Kind.FORWARD:
        to, send, receive = stage + 1, Kind.SEND_F, Kind.RECV_F
    elif action.kind is Kind.BACKWARD or action.kind is Kind.INPUT:
        to, send, receive = stage - 1, Kind.SEND_B, Kind.RECV_B
    else:
        return None
    if not 0 <= to < schedule.stages or schedule.degree == 1:
        return None
    return Action(stage, send, action.microbatch), Action(to, receive, action.microbatch)


def _receives(schedule: Schedule) -> list[list[list[Action]]]:
    """For each rank and place in its row: the receives to be posted just before that place."""
    places: list[dict[tuple[int, bool, int], int]] = [{} for _ in schedule.ranks]
    for rank, row in enumerate(schedule.ranks):
        for place, action in enumerate(row):
            if action.kind is not Kind.WEIGHT:
                places[rank][action.stage, action.kind is Kind.FORWARD, action.microbatch] = place
    pairs: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if message := message_of(schedule, action):
                _, receive = message
                to = schedule.rank_of(receive.stage)
                if (receive.stage, receive.kind is Kind.RECV_F, receive.microbatch) not in places[to]:
                    raise PlanError(f"schedule {schedule.head!r}: what {action} computes is used by no action of rank {to}; see check")
                pairs.setdefault((rank, to), []).append(receive)
    posted: list[list[tuple[int, Action]]] = [[] for _ in schedule.ranks]
    for (_, rank), receives in pairs.items():
        used = [places[rank][receive.stage, receive.kind is Kind.RECV_F, receive.microbatch] for receive in receives]
        needed = list(accumulate(reversed(used), min))  # no later than any message behind it
        posted[rank] += zip(reversed(needed), receives, strict=True)
    found: list[list[list[Action]]] = [[[] for _ in row] for row in schedule.ranks]
    for rank, receives_of_rank in enumerate(posted):
        for place, receive in sorted(receives_of_rank, key=lambda item: item[0]):
            found[rank][max(0, place - _AHEAD)].append(receive)
    return found


def lower(schedule: Schedule, *, gather: bool = True, reduce: bool = True) -> Schedule:
    """Add sends, receives, and what happens once per step.

    Args:
        schedule: of computation only.
        gather: whether to gather the parameters of stages: of a rank's first at once, of the next after a forward of the one before, to
            overlap. In training all are needed together later, so that this takes no more memory.
        reduce: whether to reduce the gradients of a stage, right after its last backward.

    Raises:
        PlanError: the schedule communicates already.
    """
    for row in schedule.ranks:
        for action in row:
            if action.kind not in COMPUTE:
                raise PlanError(f"schedule {schedule.head!r} has {action} already; lower takes computation only")
    table = []
    for row, posted in zip(schedule.ranks, _receives(schedule), strict=True):
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, action in enumerate(row):
            first.setdefault(action.stage, place)
            if action.kind is not Kind.FORWARD:
                last[action.stage] = place
        starts = [0, *(place + 1 for place in first.values())]
        gathers = {place: Action(stage, Kind.GATHER) for stage, place in zip(first, starts, strict=False)}
        lowered: list[Action] = []
        for place, action in enumerate(row):
            lowered += posted[place]
            if gather and place in gathers:
                lowered.append(gathers[place])
            lowered.append(action)
            if message := message_of(schedule, action):
                lowered.append(message[0])
            if reduce and last.get(action.stage) == place:
                lowered.append(Action(action.stage, Kind.REDUCE))
        table.append(tuple(lowered))
    return Schedule(schedule.name, schedule.degree, schedule.stages, schedule.microbatches, tuple(table))
