"""What the ranks of a pipeline hold of their memory as a table is played."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from autopar.resident import StageBytes
from autopar.schedule.actions import COMPUTE, Action, Kind, Schedule

HELD = ("kept", "left", "gradients", "coming", "first", "later", "last", "forward", "inputs", "first_weights", "later_weights")
"""Of `StageBytes` what counts while all is computed."""
_BESIDE = {
    Kind.FORWARD: ("forward", "forward"),
    Kind.BACKWARD: ("first", "later"),
    Kind.INPUT: ("inputs", "inputs"),
    Kind.WEIGHT: ("first_weights", "later_weights"),
}
"""Which of it is there while an action computes, before and after the gradients of weights are there."""
COLUMNS = {kind: len(HELD) + i for i, kind in enumerate((Kind.RECV_F, Kind.RECV_B, Kind.SEND_F, Kind.SEND_B))}
"""Of the messages that a stage has in memory beside what it computes with: those that come and are not used yet, the last that it sent."""
_HELD_OF = attrgetter(*HELD)
_GRADIENTS, _COMING = HELD.index("gradients"), HELD.index("coming")
_WANTED = {Kind.FORWARD: Kind.RECV_F, Kind.BACKWARD: Kind.RECV_B, Kind.INPUT: Kind.RECV_B}


class Sent(NamedTuple):
    """Bytes that a stage sends of a micro-batch, activations to the stage after and gradients to the one before."""

    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, slots=True)
class RankMoments:
    """What a rank holds at the moments of its row, but for those that are like one before.

    Args:
        stages: of the rank.
        counts: of each moment and stage how often `HELD` of its `StageBytes` are held, and `COLUMNS` of messages, in a row
            ``[moments, stages * (HELD + COLUMNS)]``.
        at_end: the same when all is computed, a row.
    """

    stages: tuple[int, ...]
    counts: np.ndarray
    at_end: np.ndarray

    def peak_bytes(self, stages: Sequence[StageBytes], sent: Sequence[Sent]) -> float:
        """The most bytes that these stages hold at a time, with their messages; ``sent`` by all stages."""
        own = [stages[stage] for stage in self.stages]
        at_border = (Sent(), *sent, Sent())
        comes = [(at_border[i].forward, at_border[i + 2].backward) for i in self.stages]
        goes = [(max(0.0, sent[i].forward - stages[i].sent), sent[i].backward) for i in self.stages]
        each = np.array([(*_HELD_OF(s), *a, *b) for s, a, b in zip(own, comes, goes, strict=True)]).ravel()
        updating = sum(stage.received + stage.together for stage in own) + max(stage.update for stage in own)
        ends = max(sum(stage.end for stage in own), updating) - sum(stage.copies + stage.gone for stage in own)
        return sum(stage.static for stage in own) + max(0.0, float((self.counts @ each).max()), float(self.at_end @ each) + ends)


def moments_of(schedule: Schedule) -> tuple[RankMoments, ...]:
    """Of every rank. They are counted once, for bytes that are asked for often.

    What is sent lies there until the next message goes, and what comes from where its receive is posted to the computation that wants it:
    of a ``schedule`` with communication (`schedule.lower`).
    """
    return tuple(map(_moments, schedule.ranks))


def _moments(row: Sequence[Action]) -> RankMoments:
    frees = {(a.stage, a.microbatch) for a in row if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    last = {a.stage: a for a in row if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    stages = tuple(sorted({action.stage for action in row}))
    held = {stage: [0] * (len(HELD) + len(COLUMNS)) for stage in stages}
    seen: dict[tuple[int, ...], None] = {}  # in order
    posted: set[tuple[int, Kind, int]] = set()
    for action in row:
        own = held[action.stage]
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            for each in held.values():
                each[COLUMNS[Kind.SEND_F]] = each[COLUMNS[Kind.SEND_B]] = 0
            own[COLUMNS[action.kind]] = 1
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            posted.add((action.stage, action.kind, action.microbatch))
            own[COLUMNS[action.kind]] += 1
        comes = _WANTED.get(action.kind)
        if comes is not None and (action.stage, comes, action.microbatch) in posted:
            own[COLUMNS[comes]] -= 1
        own[0] += action.kind is Kind.FORWARD and (action.stage, action.microbatch) in frees
        if action.kind in COMPUTE:
            is_last = last.get(action.stage) == action
            beside = HELD.index("last" if is_last and action.kind is Kind.BACKWARD else _BESIDE[action.kind][own[_GRADIENTS]])
            own[_COMING] = int(is_last and action.kind is Kind.WEIGHT)
            own[beside] = 1
            seen[tuple(count for stage in stages for count in held[stage])] = None
            own[beside], own[_COMING] = 0, int(is_last)
        if action.kind is Kind.INPUT:
            own[0] -= 1
            own[1] += 1
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            own[0 if action.kind is Kind.BACKWARD else 1] -= 1
            own[_GRADIENTS] = 1
    at_end = [count for stage in stages for count in (*held[stage][: len(HELD)], *(0 for _ in COLUMNS))]
    return RankMoments(stages, np.array(list(seen)), np.array(at_end))


def peak_bytes(ranks: Iterable[RankMoments], stages: Sequence[StageBytes], sent: Sequence[Sent] | None = None) -> tuple[float, ...]:
    """For each rank: the most bytes that its stages hold at a time; messages take nothing where nothing is said of them."""
    sent = [Sent()] * len(stages) if sent is None else sent
    return tuple(moments.peak_bytes(stages, sent) for moments in ranks)
