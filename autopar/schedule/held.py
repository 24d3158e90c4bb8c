"""What the ranks of a pipeline hold of their memory as a table is played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.resident import StageBytes
from autopar.schedule.actions import COMPUTE, Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class RankMoments:
    """What a rank holds at the moments of its row, but for those that are like one before.

    Args:
        stages: of the rank.
        counts: of each moment and stage how often `StageBytes` ``kept``, ``left``, ``gradients``, ``first`` and ``later`` are held, in a
            row ``[moments, stages * 5]``.
        at_end: the same when all is computed, ``[stages * 5]``.
    """

    stages: tuple[int, ...]
    counts: np.ndarray
    at_end: np.ndarray

    def peak_bytes(self, stages: Sequence[StageBytes]) -> float:
        """The most bytes that these stages hold at a time."""
        own = [stages[stage] for stage in self.stages]
        each = np.array([(s.kept, s.left, s.gradients, s.first, s.later) for s in own]).ravel()
        updating = sum(stage.received + stage.together for stage in own) + max(stage.update for stage in own)
        ends = max(sum(stage.end for stage in own), updating) - sum(stage.copies for stage in own)
        return sum(stage.static for stage in own) + max(0.0, float((self.counts @ each).max()), float(self.at_end @ each) + ends)


def moments_of(schedule: Schedule) -> tuple[RankMoments, ...]:
    """Of every rank. They are counted once, for bytes that are asked for often."""
    return tuple(map(_moments, schedule.ranks))


def _moments(row: Sequence[Action]) -> RankMoments:
    frees = {(a.stage, a.microbatch) for a in row if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    stages = tuple(sorted({action.stage for action in row}))
    held = {stage: [0, 0, 0, 0, 0] for stage in stages}
    seen: dict[tuple[int, ...], None] = {}  # in order
    for action in row:
        own = held[action.stage]
        own[0] += action.kind is Kind.FORWARD and (action.stage, action.microbatch) in frees
        if action.kind in COMPUTE:
            beside = 4 if own[2] else 3
            own[beside] = 1
            seen[tuple(count for stage in stages for count in held[stage])] = None
            own[beside] = 0
        if action.kind is Kind.INPUT:
            own[0] -= 1
            own[1] += 1
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            own[0 if action.kind is Kind.BACKWARD else 1] -= 1
            own[2] = 1
    return RankMoments(stages, np.array(list(seen)), np.array([count for stage in stages for count in held[stage]]))


def peak_bytes(schedule: Schedule, stages: Sequence[StageBytes]) -> tuple[float, ...]:
    """For each rank: the most bytes that its stages hold at a time."""
    return tuple(moments.peak_bytes(stages) for moments in moments_of(schedule))
